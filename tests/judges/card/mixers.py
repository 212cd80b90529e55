"""Two kinds of model that are written out here: a conformer, of speech, and a mixer, of patches."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.judges.card.training import Step, training


def _twice(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * width, width))


class Conformer(nn.Module):
    """Attention, and a depthwise convolution in time between two halves of a feed-forward part. x [batch, time, width]."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.first, self.last = _twice(width), _twice(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True, dropout=0.1)
        self.into, self.out = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.along, self.batch = nn.Conv1d(width, width, 31, padding=15, groups=width), nn.BatchNorm1d(width)

    def forward(self, x):
        x = x + self.first(self.norms[0](x)) / 2
        hidden = self.norms[1](x)
        x = x + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = F.glu(self.into(self.norms[2](x).transpose(1, 2)), dim=1)
        x = x + self.out(F.silu(self.batch(self.along(hidden)))).transpose(1, 2)
        return x + self.last(self.norms[3](x)) / 2


def speech(precision: str, batch: int, time: int = 400, letters: int = 40) -> Step:
    with torch.device("cuda"):
        model = nn.Sequential(*[Conformer() for _ in range(12)], nn.Linear(256, 1000))
        x, y = torch.randn(batch, time, 256), torch.randint(1, 1000, (batch, letters))
        times, lengths = torch.full((batch,), time), torch.full((batch,), letters)

    def loss():
        scores = model(x).float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, times, lengths)

    return training(model.cuda(), loss, precision)


class Mixer(nn.Module):
    """Through the patches, then through the width. x [batch, patches, width]."""

    def __init__(self, patches: int, width: int):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.width = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.patches(self.before(x).mT).mT
        return x + self.width(self.between(x))


def mixer(precision: str, batch: int) -> Step:
    with torch.device("cuda"):
        patches = nn.Sequential(nn.Conv2d(3, 512, 16, 16), nn.Flatten(2))
        body, head = nn.Sequential(*[Mixer(196, 512) for _ in range(8)]), nn.Linear(512, 100)
        x, y = torch.randn(batch, 3, 224, 224), torch.randint(0, 100, (batch,))
    model = nn.ModuleList([patches, body, head])
    return training(model, lambda: F.cross_entropy(head(body(patches(x).mT).mean(1)), y), precision)


PROGRAMS: dict[str, Callable[[], Step]] = {
    "conformer fp16 b16": lambda: speech("fp16", 16),
    "mixer fp32 b64": lambda: mixer("fp32", 64),
    "mixer bf16 b256": lambda: mixer("bf16", 256),
}
