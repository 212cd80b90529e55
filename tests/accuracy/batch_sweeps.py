"""Time over the batch: how far it jumps from one batch to the next, published beside simulated (`batch_sweeps.csv`).

    python -m tests.accuracy.batch_sweeps     a line for each sweep; with --all, one for each batch

What a full wave leaves over is waited for, so that the time of one layer is a staircase; the layers of a network have theirs in other
places. A step: how much longer the next batch takes than by its size alone, log (time of an image), where the batches are within
a quarter of each other. The figures are inference by Caffe (uwsampl/nexus), TensorRT (a gist) and lc0, whose towers of 3x3 convolutions look at boards
of 8 x 8. The clock knows PyTorch's kernels and no batch norm that went into a convolution: steps are compared, not times.
"""

import csv
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torchvision
from torch import nn

import virtualgpu
from virtualgpu.hardware.specs import SPECS

TABLE = Path(__file__).parent / "batch_sweeps.csv"
NEAR = 1.25  # batches so near are one step apart
# as far as these differ from cards that are known: multiprocessors, FLOP/s, bytes/s, clock
OTHERS = {
    "TITAN X (Pascal)": ("P100", 28, {"float32": 11.0e12}, 480e9, 1531e6),
    "RTX 2080 Super": ("RTX 2080 Ti", 48, {"float32": 11.2e12, "float16": 44.6e12}, 496e9, 1815e6),
    "GTX 1650": ("T4", 14, {"float32": 3.0e12}, 128e9, 1665e6),
}


def spec(card: str):
    """Of a card in the table."""
    if card in SPECS:
        return SPECS[card]
    like, processors, rates, bandwidth, clock = OTHERS[card]
    return replace(SPECS[like], processors=processors, rates=rates, bandwidth=bandwidth, clock=clock)


def tower(blocks: int, channels: int) -> nn.Sequential:
    """lc0's: two convolutions a block."""
    layers: list[nn.Module] = []
    for _ in range(2 * blocks):
        layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def vgg_s() -> nn.Sequential:
    """CNN-S of Chatfield et al., "Return of the Devil in the Details", 2014."""

    def layer(read, made, size, stride=1, padding=1):
        return nn.Conv2d(read, made, size, stride, padding), nn.ReLU(inplace=True)

    return nn.Sequential(
        *layer(3, 96, 7, 2, 0),
        nn.MaxPool2d(3, 3, ceil_mode=True),
        *layer(96, 256, 5),
        nn.MaxPool2d(2, 2, ceil_mode=True),
        *layer(256, 512, 3),
        *layer(512, 512, 3),
        *layer(512, 512, 3),
        nn.MaxPool2d(3, 3, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(512 * 6 * 6, 4096),
        nn.Linear(4096, 4096),
        nn.Linear(4096, 1000),
    )


def program(name: str) -> tuple[Callable[[], nn.Module], tuple[int, int, int]]:
    """What makes it, and the shape of an image."""
    if name.startswith("tower"):
        blocks, channels = (int(number) for number in name.split()[1].split("x"))
        return lambda: tower(blocks, channels), (channels, 8, 8)
    return {"vgg_s": vgg_s}.get(name) or getattr(torchvision.models, name), (3, 224, 224)


def simulated(card: str, name: str, dtype: str, batches) -> dict[int, float]:
    """Milliseconds of its kernels, by batch."""
    make, shape = program(name)
    kind = getattr(torch, dtype)
    layout = torch.channels_last if dtype == "float16" else torch.contiguous_format
    found = {}
    with virtualgpu.dry_run(1, like=spec(card)), torch.no_grad():
        model = make().cuda().to(kind).to(memory_format=layout).eval()
        clock = virtualgpu.machine().clock
        for batch in batches:
            images = torch.empty(batch, *shape, device="cuda", dtype=kind).contiguous(memory_format=layout)
            model(images)
            before = clock.computing[0]
            model(images)
            found[batch] = 1e3 * (clock.computing[0] - before)
    return found


def steps(times: dict[int, float]) -> dict[int, float]:
    """By the larger batch: log of what an image takes there, over what it takes with the batch before."""
    batches = sorted(times)
    pairs = [(small, large) for small, large in itertools.pairwise(batches) if large <= NEAR * small]
    return {large: math.log(times[large] / large * small / times[small]) for small, large in pairs}


def sweeps() -> dict[tuple[str, str, str], tuple[dict[int, float], dict[int, float]]]:
    """Published and simulated milliseconds by batch, of each card, program and type."""
    published: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    with open(TABLE, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            published[row["card"], row["program"], row["dtype"]][int(row["batch"])] = float(row["ms"])
    return {key: (times, simulated(*key, times)) for key, times in published.items()}


def table(every: bool = False) -> str:
    """As text."""
    largest = f"{'largest steps, an image (%)':<44}{'published':>24}{'simulated':>24}"
    lines = [f"{largest}{'rms of steps':>14}{'simulated':>11}{'apart':>8}"]
    for key, (published, ours) in sweeps().items():
        one, other = steps(published), steps(ours)
        apart = {batch: step - other[batch] for batch, step in one.items()}
        tops = "".join(f"{_largest(found):>24}" for found in (one, other))
        spread = [math.sqrt(sum(step**2 for step in found.values()) / len(one)) for found in (one, other, apart)]
        lines.append(f"{', '.join(key):<44}{tops}{spread[0]:>14.3f}{spread[1]:>11.3f}{spread[2]:>8.3f}")
        for batch in published if every else ():
            lines.append(f"    {batch:>4} images {published[batch]:9.3f} ms published {ours[batch]:9.3f} simulated")
    return "\n".join(lines)


def _largest(found: dict[int, float]) -> str:
    return " ".join(f"{100 * math.expm1(found[batch]):+.0f}@{batch}" for batch in sorted(found, key=found.get)[:-4:-1])


if __name__ == "__main__":
    print(table("--all" in sys.argv))
