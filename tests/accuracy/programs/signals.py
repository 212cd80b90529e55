"""Points in space, and sound: one-dimensional convolutions."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from tests.accuracy.programs.step import Step, training
from tests.accuracy.published import Published


def points(row: Published) -> Step:
    """PointNet: each point alone through convolutions of one, the largest of all."""
    widths = (3, 64, 128, 1024)
    layers = ([nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU(True)] for a, b in itertools.pairwise(widths))
    body = nn.Sequential(*itertools.chain(*layers)).cuda()
    head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(True), nn.Dropout(0.3), nn.Linear(256, 40)).cuda()
    x, y = torch.randn(row.batch, 3, row.size, device="cuda"), torch.zeros(row.batch, dtype=torch.int64, device="cuda")
    parameters = [*body.parameters(), *head.parameters()]
    return training(parameters, lambda: F.cross_entropy(head(body(x).amax(dim=2)), y), row)


def speech(row: Published) -> Step:
    """The first layers of wav2vec 2.0 over a second or more of sound, then a transformer's."""
    sizes = [(1, 10, 5), *[(512, 3, 2)] * 4, *[(512, 2, 2)] * 2]
    layers = ([nn.Conv1d(before, 512, kernel, stride, bias=False), nn.GELU()] for before, kernel, stride in sizes)
    body = nn.Sequential(*itertools.chain(*layers), nn.GroupNorm(1, 512)).cuda()
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    encoder, head = nn.TransformerEncoder(layer, 6).cuda(), nn.Linear(512, 32).cuda()
    sound = torch.randn(row.batch, 1, row.size, device="cuda")
    parameters = [*body.parameters(), *encoder.parameters(), *head.parameters()]

    def loss():
        return F.log_softmax(head(encoder(body(sound).transpose(1, 2))), -1)[..., 0].mean().neg()

    return training(parameters, loss, row, torch.optim.AdamW)
