"""What the programs have in common."""

from collections.abc import Callable

import torch

from tests.accuracy.published import Published
from tests.accuracy.vision import autocast

Step = Callable[[], object]


def training(parameters, loss: Callable, row: Published, kind=torch.optim.Adam, **options) -> Step:
    """A step: gradients away, loss, backward, optimizer; autocast where the row says so."""
    optimizer = kind(parameters, **options)

    def step():
        optimizer.zero_grad()
        with autocast(row):
            value = loss()
        value.backward()
        optimizer.step()

    return step
