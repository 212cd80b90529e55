"""Words by PyTorch's own layers: recurrent ones and transformers."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.accuracy.programs.step import Step, training
from tests.accuracy.published import Published
from tests.accuracy.vision import autocast


def lstm(row: Published) -> Step:
    with torch.device("cuda"):
        words, head = nn.Embedding(10000, 640), nn.Linear(640, 10000)
        layers = nn.LSTM(640, 640, 2, dropout=0.3, batch_first=True)
        tokens = torch.randint(0, 10000, (row.batch, row.size))

    def loss():
        return F.cross_entropy(head(layers(words(tokens))[0]).flatten(0, 1), tokens.flatten())

    parameters = [*words.parameters(), *layers.parameters(), *head.parameters()]
    return training(parameters, loss, row, torch.optim.SGD, lr=0.1)


def transformer(row: Published) -> Step:
    model = nn.Transformer(d_model=1024, nhead=16, batch_first=True).cuda()
    x = torch.randn(row.batch, row.size, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with autocast(row):
            loss = model(x, x).square().mean()
        optimizer.zero_grad()  # so the last gradients are there in the forward pass
        loss.backward()
        optimizer.step()

    return step


def bert(row: Published) -> Step:
    """A classifier of sentences: BERT base's sizes, dropout, a mask, a scaler."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
    with torch.device("cuda"):
        words, places, head = nn.Embedding(30522, 768), nn.Embedding(512, 768), nn.Linear(768, 2)
        encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda()
        tokens, y = torch.randint(0, 30000, (row.batch, row.size)), torch.zeros(row.batch, dtype=torch.int64)
        padded = torch.arange(row.size).expand(row.batch, -1) >= row.size - 16
    parameters = [*words.parameters(), *places.parameters(), *encoder.parameters(), *head.parameters()]
    optimizer, scaler = torch.optim.AdamW(parameters), torch.amp.GradScaler("cuda")

    def step():
        optimizer.zero_grad()
        with autocast(row):
            x = words(tokens) + places.weight[: row.size]
            loss = F.cross_entropy(head(encoder(x, src_key_padding_mask=padded)[:, 0]), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def translation(row: Published) -> Step:
    """A GRU that looks at all of a sentence for each word it writes: a loop of the host's."""
    with torch.device("cuda"):
        words, head = nn.Embedding(10000, 512), nn.Linear(1024, 10000)
        reader, writer = nn.GRU(512, 512, batch_first=True), nn.GRUCell(1024, 512)
        source, target = (torch.randint(0, 10000, (row.batch, row.size)) for _ in range(2))

    def loss():
        read, state = reader(words(source))
        state, context, total = state[0], torch.zeros_like(state[0]), 0.0
        for i in range(row.size - 1):
            state = writer(torch.cat([words(target[:, i]), context], dim=1), state)
            scores = torch.bmm(read, state.unsqueeze(2)).softmax(dim=1)
            context = (scores * read).sum(dim=1)
            total = total + F.cross_entropy(head(torch.cat([state, context], dim=1)), target[:, i + 1])
        return total / row.size

    parameters = [parameter for part in (words, head, reader, writer) for parameter in part.parameters()]
    return training(parameters, loss, row)
