"""A step of training as people write it: gradients away, autocast, a scaler where it is float16, an optimizer."""

from collections.abc import Callable, Iterable

import torch

Step = Callable[[], object]
NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: str) -> torch.autocast:
    """To "fp16" or "bf16"; off for "fp32", and for "bfloat16", which the weights have themselves."""
    return torch.autocast("cuda", NARROW.get(precision, torch.float16), enabled=precision in NARROW)


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5)


def training(model, loss: Callable[[], torch.Tensor], precision: str, optimize=adamw) -> Step:
    model.train()
    optimizer = optimize([parameter for parameter in model.parameters() if parameter.requires_grad])
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def step():
        optimizer.zero_grad()
        with autocast(precision):
            value = loss()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()

    return step
