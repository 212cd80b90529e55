"""Fused optimizers, and learning rates that are tensors: the same bytes and times in a dry run, and with GradScaler, too."""

import pytest
import torch
from torch import nn, optim

import virtualgpu
from virtualgpu import _compat

RATES = {
    "a number": lambda: 0.1,
    "the host's": lambda: torch.tensor(0.1),
    "the GPU's": lambda: torch.tensor(0.1, device="cuda"),
}
OPTIMIZERS = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.Adagrad, {}),
    (optim.Adam, {}),
    (optim.AdamW, {"amsgrad": True}),
]
if _compat.KEEPS_WORKSPACES:  # before PyTorch 2.15 Adagrad had no fused kernel for CUDA
    OPTIMIZERS.remove((optim.Adagrad, {}))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=[f"{kind.__name__} {list(o)}" for kind, o in OPTIMIZERS])
def test_the_same_in_a_dry_run(kind, options, rate):
    def train():
        model = nn.Linear(40, 50, device="cuda")
        optimizer = kind(model.parameters(), lr=RATES[rate](), fused=True, **options)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            with torch.autocast("cuda"):
                loss = model(torch.ones(8, 40, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), virtualgpu.machine().clock.latest()

    with virtualgpu.gpus(1):
        real = train()
    with virtualgpu.dry_run(1):
        assert train() == real
