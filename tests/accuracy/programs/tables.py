"""Rows looked up by index: a recommender, a graph, users and films."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.accuracy.programs.step import Step, training
from tests.accuracy.published import Published


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
