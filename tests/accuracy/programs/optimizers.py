"""An optimizer alone, over 100 M parameters in 208 tensors."""

import torch
from torch import nn

from tests.accuracy.programs.step import Step
from tests.accuracy.published import Published


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
