"""The lower half of EfficientNet-Lite0, as layers alone: the weights lie beside it (origin and licence: README.md). `torch.hub.load`
looks for a file of this name:

    torch.hub.load("data", "efficientnet_lite0_lower", source="local")

The network is Google's (https://arxiv.org/abs/1905.11946, made simpler for small devices). Of its 16 blocks, those up to the
eighth are here: enough to tell textures and small shapes, and half a megabyte.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

STAGES = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
]  # blocks, kernel, stride, wider, channels


def efficientnet_lite0_lower() -> nn.Sequential:
    """With random weights. In: float32 [n, 3, height, width], from -1 to 1. Out: [n, 80, height / 16, width / 16]."""
    layers, channels = [*_convolution(3, 32, 3, 2), nn.ReLU6()], 32
    for blocks, kernel, stride, wider, outputs in STAGES:
        for number in range(blocks):
            layers.append(Block(channels, outputs, kernel, 1 if number else stride, wider))
            channels = outputs
    return nn.Sequential(*layers)


class Block(nn.Module):
    """An inverted residual (MobileNetV2's): wider, one convolution for each channel, narrow again, and a way around."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, wider: int):
        super().__init__()
        middle = inputs * wider
        widen = [*_convolution(inputs, middle, 1), nn.ReLU6()] if wider > 1 else []
        each = [*_convolution(middle, middle, kernel, stride, groups=middle), nn.ReLU6()]
        self.layers = nn.Sequential(*widen, *each, *_convolution(middle, outputs, 1))
        self.around = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.around else self.layers(x)


class _Same(nn.Conv2d):
    """A convolution padded as TensorFlow does, where the weights were learned: with an odd rest, more at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        pads = []
        for length in (x.shape[-1], x.shape[-2]):
            missing = max((math.ceil(length / stride) - 1) * stride + kernel - length, 0)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(x, pads))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [_Same(inputs, outputs, kernel, stride, groups=groups, bias=False), nn.BatchNorm2d(outputs, eps=1e-3)]
