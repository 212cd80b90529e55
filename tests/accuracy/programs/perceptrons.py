"""Linear layers: a plain stack of them, an autoencoder, an actor and its critic."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from tests.accuracy.programs.step import Step, training
from tests.accuracy.published import Published


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
        first, mean, spread, third, last = (
            nn.Linear(784, 400),
            nn.Linear(400, 20),
            nn.Linear(400, 20),
            nn.Linear(20, 400),
            nn.Linear(400, 784),
        )
        x = torch.rand(row.batch, 1, row.size, row.size)
    parameters = [parameter for layer in (first, mean, spread, third, last) for parameter in layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)

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
    actor = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).cuda()
    critic = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
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
