"""Convolutions that others timed, one by one, beside what the clock says of them: `convolutions.csv`, a sample of each source's.

    python -m tests.accuracy.convolutions     by source, direction, kind and card; half of the shapes are inputs of the clock's table

direction: forward, or of the gradient of the image or of the weight. made: channels of the result. layout: channels first or last. One
kernel, or the few that cuDNN makes of it; no bias. DeepBench's on a GPU with tensor cores by cuDNN 7.6, KernelBench's and spio's by PyTorch 2.4
and 2.5.

NeuSight's are 3x3 of random sizes by PyTorch 2.1, with TF32 off and cudnn.benchmark on; its V100 has PCIe. Its times begin before the host launches,
which takes 60 us for the first row and 310 (V100) to 800 (P100) for the last, as cudnn.benchmark's list of shapes grows: what the smallest
convolutions nearby take (a square of the row's number, through the tenth part of those of less than 1 GFLOP) is taken off; only rows are here of which it is
a quarter at most. dlperf's are layers of networks by cuDNN 7.6, the fastest of all algorithms, those of 20 us or more by the data sheet; its Quadro RTX
6000 stands here as a TITAN RTX, its T4 gets hot. kineto's ResNet-50 of batch 32 (of 2021) and HolisticTraceAnalysis' AlexNet, the shapes of which
are guessed from the network, are by torch.profiler. Of NeuSight's and dlperf's at most 60 for each card and type were drawn from a quarter of the shapes
that nothing was fitted to.
"""

import csv
import math
import zlib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch

from tests.accuracy.kernels import summary
from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing.convolutions import CHANNELS, backward_seconds, forward_seconds
from virtualgpu.timing.kernels import Kernels

TABLE = Path(__file__).parent / "convolutions.csv"
SHAPE = "batch", "channels", "height", "width", "made", "kernel_height", "kernel_width", "stride", "groups"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "tf32": torch.float32}


class Convolution(NamedTuple):
    """One measured convolution, by the row's words, and the log of measured over simulated."""

    card: str
    dtype: str
    source: str
    direction: str
    kind: str
    fitted: bool
    log: float


def convolutions() -> list[Convolution]:
    """All of the table."""
    cards: dict[str, Kernels] = {}
    with open(TABLE, encoding="utf-8", newline="") as file:
        return [_timed(row, cards.setdefault(row["card"], Kernels(SPECS[row["card"]]))) for row in csv.DictReader(file)]


def _timed(row: dict, kernels: Kernels) -> Convolution:
    image, weight, result, setting = _tensors(row)
    key, direction = row["dtype"], row["direction"]
    if direction == "forward":
        moved = image.nbytes + weight.nbytes + result.nbytes
        seconds = forward_seconds(kernels, (image, weight, None, *setting), (image, weight, result), 0, moved, key)
    else:
        mask = [direction == "image", direction == "weight", False]
        seconds = backward_seconds(kernels, (result, image, weight, None, *setting, mask), (), 0, 0, key)
    log = math.log(float(row["us"]) / 1e6 / seconds)
    return Convolution(row["card"], key, row["source"], direction, _kind(row, weight), fitted(row), log)


def fitted(row: dict) -> bool:
    """Is its shape one of the half that the clock's medians of other cards' kernels are of (`python -m tests.gpu.tables`)?"""
    return zlib.crc32(" ".join(row[name] for name in SHAPE).encode()) % 2 == 0


def _tensors(row: dict):
    """The image, the weight and the result, without memory, and what else the operation is told."""
    stride, padding, dilation = ([int(n) for n in row[name].split("x")] for name in ("stride", "padding", "dilation"))
    groups, transposed = int(row["groups"]), row["transposed"] == "1"
    layout = torch.channels_last if row["layout"] == "last" else torch.contiguous_format
    channels, made = int(row["channels"]), int(row["made"])
    kernel = int(row["kernel_height"]), int(row["kernel_width"])

    def empty(*shape):
        return torch.empty(shape, dtype=DTYPES[row["dtype"]], device="meta").contiguous(memory_format=layout)

    image = empty(int(row["batch"]), channels, int(row["height"]), int(row["width"]))
    weight = empty(*((channels, made // groups) if transposed else (made, channels // groups)), *kernel)
    setting = (stride, padding, dilation, transposed, [0, 0], groups)
    result = torch.ops.aten.convolution(image, weight, None, *setting)
    return image, weight, empty(*result.shape), setting


def _kind(row: dict, weight) -> str:
    size = f"{row['kernel_height']}x{row['kernel_width']}"
    if int(row["groups"]) > 1:
        return "depthwise" if weight.shape[1] == 1 else "grouped"
    if int(row["channels"]) < CHANNELS:
        return "of few channels"
    return ("transposed " if row["transposed"] == "1" else "") + (size if size in ("1x1", "3x3") else "other sizes")


def table() -> str:
    """As text."""
    groups = defaultdict(list)
    for found in convolutions():
        cores = "float32" if found.dtype == "float32" else "on tensor cores"
        half = "shapes of the table" if found.fitted else "other shapes"
        names = (
            found.source,
            f"{found.source}, {found.card}, {found.dtype}, {half}",
            f"{found.direction}, {cores}",
            f"{found.kind}, {cores}",
            f"{found.card}, {found.dtype}",
        )
        for name in ("all", *names):
            groups[name].append(found.log)
    return summary("convolutions", groups)


if __name__ == "__main__":
    print(table())
