"""What virtual GPUs cost: a dry run against PyTorch's own ways to run on shapes alone, one rank of 512, an operation with real numbers; and how all
that grows with operations, GPUs and micro-batches."""

import resource
import statistics
import sys
import time

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet50

import virtualgpu
from tests.accuracy.published import published
from tests.accuracy.sharded import train as train_llama
from tests.bench.tools import Row, below, silent, timed, train


def rows() -> list[Row]:
    ours, fake, tracked, meta = [], [], [], []
    with silent():
        for _ in range(5):  # in turn, so that a busy moment hits all
            with virtualgpu.dry_run(1):
                ours.append(step_of_resnet("cuda:0"))
            with FakeTensorMode():
                fake.append(step_of_resnet("cpu"))
            meta.append(step_of_resnet("meta"))
        for _ in range(3):
            with FakeTensorMode():
                tracked.append(step_of_resnet("cpu", MemTracker()))
        added, operations = with_numbers()
        operation = {n: real(n, 2) for n in (100, 800)}
        gpus = {n: real(200, n) for n in (2, 8)}
        pieces = {n: dry(n) for n in (2, 16)}
        ranks = {n: of_ranks(n) for n in (8, 512)}
    dry_step, fake_step, tracked_step, meta_step = map(statistics.median, (ours, fake, tracked, meta))
    return [
        Row("dry run: ResNet-50 step, batch 120", 1e3 * dry_step, "ms"),
        Row("dry run: FakeTensorMode alone over ours", fake_step / dry_step, "x", ">= 1 x", fake_step >= dry_step),
        Row(
            "dry run: FakeTensorMode and MemTracker over ours",
            tracked_step / dry_step,
            "x",
            ">= 6 x",
            tracked_step >= 6 * dry_step,
        ),
        Row("dry run: plain meta tensors over ours", meta_step / dry_step, "x"),
        *(
            below(f"dry run: 1 of {n} ranks of Llama 3.1 8B, FSDP2, 5 steps", seconds, "s", 20)
            for n, seconds in ranks.items()
        ),
        below("its host memory", peak_memory(), "GiB", 4),
        below("real numbers: added to each operation", 1e6 * added, "us", 40),
        Row("real numbers: operations in that step", operations),
        Row("real numbers: of which an empty dispatch mode", 1e6 * empty_mode(), "us"),
        below("growth: 8 times the operations, cost of each", operation[800] / operation[100] / 8, "x", 1.3),
        below("growth: the same work on 8 GPUs over 2", gpus[8] / gpus[2], "x", 1.3),
        below("growth: 8 times the micro-batches, cost of each", pieces[16] / pieces[2] / 8, "x", 1.3),
    ]


def step_of_resnet(device: str, tracker: MemTracker | None = None) -> float:
    """Seconds of one training step, the second one: the first fills every cache."""
    with torch.device(device):
        model = resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    x, y = torch.empty(120, 3, 128, 128, device=device), torch.empty(120, 1000, device=device)
    if tracker is None:
        return timed(lambda: train(model, optimizer, nn.functional.mse_loss, x, y))
    tracker.track_external(model, optimizer)

    def step():
        tracker.reset_mod_stats()
        train(model, optimizer, nn.functional.mse_loss, x, y)

    with tracker:
        return timed(step)


def of_ranks(world_size: int) -> float:
    """Seconds of a core: a busy machine tells the same."""
    row = published("torchtitan_2024_12")[0]
    begin = time.process_time()
    train_llama(row._replace(gpus=world_size), expandable=True, steps=5)
    return time.process_time() - begin


def peak_memory() -> float:
    """The most memory that this process has had, PyTorch included, in GiB (Linux counts in KiB, macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def with_numbers() -> tuple[float, int]:
    """Seconds that a virtual GPU adds to each operation of a small CNN's step, and how many there are."""

    def on_virtual_gpu(plain) -> float:
        with virtualgpu.gpus(1):
            return timed(small_cnn("cuda"), 30)

    return added_by(on_virtual_gpu)


def empty_mode() -> float:
    def in_empty_mode(plain) -> float:
        with Counter():
            return timed(plain, 30)

    return added_by(in_empty_mode)[0]


def added_by(measure) -> tuple[float, int]:
    """The median, over nine pairs, of what measure(step) takes longer than the step on the CPU, an operation; their number."""
    plain = small_cnn("cpu")
    with Counter() as counter:
        plain()
    added = [-timed(plain, 30) + measure(plain) for _ in range(9)]
    return statistics.median(added) / counter.operations, counter.operations


def small_cnn(device: str):
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    x, y = torch.randn(8, 1, 12, 12).to(device), torch.arange(8).to(device)
    return lambda: train(model, optimizer, nn.functional.cross_entropy, x, y)


class Counter(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def deep(layers: int, gpus: int) -> nn.ModuleList:
    """Layers dealt out to the GPUs in equal runs."""
    return nn.ModuleList(nn.Linear(8, 8).to(f"cuda:{at * gpus // layers}") for at in range(layers))


def through(stages: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in stages:
        x = layer(x.to(layer.weight.device))
    return x


def real(layers: int, gpus: int) -> float:
    """Seconds of forward and backward through so many layers on so many virtual GPUs, with numbers."""
    with virtualgpu.gpus(gpus):
        model, x = deep(layers, gpus), torch.ones(2, 8, device="cuda:0")
        return min(timed(lambda: through(model, x).sum().backward()) for _ in range(3))


def dry(pieces: int) -> float:
    """The same in a dry run, the batch cut into micro-batches."""
    with virtualgpu.gpus(2), virtualgpu.dry_run():
        model, x = deep(200, 2), torch.ones(16, 8, device="cuda:0")
        return min(timed(lambda: [through(model, p).sum().backward() for p in x.chunk(pieces)]) for _ in range(3))
