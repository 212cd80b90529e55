"""Rows of numbers: linear layers, rows looked up by index, points in space and sound; and an optimizer alone."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from tests.accuracy.published import Published
from tests.accuracy.runner import Step, training


def perceptron(row: Published) -> Step:
    """Two wide layers, or twenty-one narrow ones, whose steps are the host's."""
    widths = [row.size, 4 * row.size, 1000] if row.size > 256 else [row.size] * 21 + [10]
    layers = itertools.chain(*((nn.Linear(*sizes), nn.ReLU()) for sizes in itertools.pairwise(widths)))
    model = nn.Sequential(*list(layers)[:-1]).cuda()
    x, y = torch.randn(row.batch, row.size, device="cuda"), torch.randint(0, widths[-1], (row.batch,), device="cuda")
    return training(model.parameters(), lambda: F.cross_entropy(model(x), y), row)


def autoencoder(row: Published) -> Step:
    """PyTorch's example of a VAE: digits, 128 at a time; the loss is printed."""
    with torch.device("cuda"):
        sizes = (784, 400), (400, 20), (400, 20), (20, 400), (400, 784)
        first, mean, spread, third, last = layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        x = torch.rand(row.batch, 1, row.size, row.size)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        h = F.relu(first(x.view(-1, 784)))
        mu, logvar = mean(h), spread(h)
        std = torch.exp(0.5 * logvar)
        y = torch.sigmoid(last(F.relu(third(mu + torch.randn_like(std) * std))))
        loss = F.binary_cross_entropy(y, x.view(-1, 784), reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def policy(row: Published) -> Step:
    """PPO: 64 moves of many small worlds, then four epochs of updates."""
    actor, critic = (
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)).cuda()
        for outputs in (4, 1)
    )
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=2.5e-4, eps=1e-5)
    world = torch.randn(row.size, row.batch, 64, device="cuda")

    def step():
        actions, olds, values = [], [], []
        with torch.no_grad():
            for view in world:
                chances = torch.distributions.Categorical(logits=actor(view))
                action = chances.sample()
                actions.append(action), olds.append(chances.log_prob(action)), values.append(critic(view)[:, 0])
        views, actions, olds, values = world.flatten(0, 1), torch.cat(actions), torch.cat(olds), torch.cat(values)
        for _ in range(4):
            for part in torch.randperm(len(views), device="cuda").chunk(4):
                chances = torch.distributions.Categorical(logits=actor(views[part]))
                ratio = (chances.log_prob(actions[part]) - olds[part]).exp()
                gain = values[part] - values[part].mean()
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * chances.entropy().mean()
                loss = loss + 0.5 * (critic(views[part])[:, 0] - values[part]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                optimizer.step()

    return step


def dlrm(row: Published) -> Step:
    """26 tables of 100,000 rows, four of them looked up in each for a sample."""
    with torch.device("cuda"):
        tables = nn.ModuleList(nn.EmbeddingBag(100_000, 64, mode="sum") for _ in range(row.size))
        bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU())
        top = nn.Sequential(nn.Linear(27 * 27 + 64, 512), nn.ReLU(), nn.Linear(512, 1))
        dense, y = torch.randn(row.batch, 13), torch.rand(row.batch, 1).round()
        bags = [torch.randint(0, 100_000, (row.batch * 4,)) for _ in tables]
        offsets = torch.arange(0, row.batch * 4, 4)

    def loss():
        x = bottom(dense)
        z = torch.stack([x, *(table(bag, offsets) for table, bag in zip(tables, bags, strict=True))], dim=1)
        out = top(torch.cat([x, (z @ z.transpose(1, 2)).flatten(1)], dim=1))
        return F.binary_cross_entropy_with_logits(out, y)

    parameters = [*tables.parameters(), *bottom.parameters(), *top.parameters()]
    return training(parameters, loss, row, torch.optim.SGD, lr=0.01)


def gnn(row: Published) -> Step:
    """Means over neighbours: batch nodes, size edges."""
    nodes, edges = row.batch, row.size
    with torch.device("cuda"):
        layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        x, y = torch.randn(nodes, 128), torch.randint(0, 128, (nodes,))
        source, target = (torch.randint(0, nodes, (edges,)) for _ in range(2))

    def loss():
        degree = torch.zeros(nodes, device="cuda").scatter_add_(0, target, torch.ones(edges, device="cuda"))
        h = x
        for layer in layers:
            mean = torch.zeros_like(h).index_add(0, target, layer(h)[source]) / degree.clamp(min=1)[:, None]
            h = torch.relu(mean)
        return F.cross_entropy(h, y)

    return training(layers.parameters(), loss, row)


def factors(row: Published) -> Step:
    """Users and films: wide tables, a whole optimizer over them."""
    with torch.device("cuda"):
        users, films = nn.Embedding(row.size, 64), nn.Embedding(row.size // 4, 64)
        user, film = torch.randint(0, row.size, (row.batch,)), torch.randint(0, row.size // 4, (row.batch,))
        stars = torch.rand(row.batch)
    parameters = [users.weight, films.weight]
    return training(parameters, lambda: F.mse_loss((users(user) * films(film)).sum(1), stars), row)


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


def optimizer(row: Published) -> Step:
    """The step alone, or clipping alone."""
    shapes = [(768, 768)] * 104 + [(512, 768)] * 94 + [(768,)] * 10
    parameters = [torch.randn(shape, device="cuda").requires_grad_() for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    kind = row.options["kind"]
    if kind == "clip":
        return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)
    if kind == "SGD":
        return torch.optim.SGD(parameters, momentum=0.9, weight_decay=1e-4).step
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}[kind]
    return torch.optim.AdamW(parameters, **options).step


PROGRAMS = {
    "perceptron": perceptron,
    "VAE": autoencoder,
    "PPO": policy,
    "dlrm": dlrm,
    "gnn": gnn,
    "factors": factors,
    "PointNet": points,
    "wav2vec": speech,
    "optimizer": optimizer,
}
