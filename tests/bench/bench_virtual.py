"""What virtual GPUs cost: a dry run against PyTorch's own ways to run on shapes alone, and an operation with real numbers."""

import statistics
import tempfile

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet50

import virtualgpu
from tests.bench.tools import Row, silent, timed, train
from virtualgpu.memory.ledger import Ledger


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
            tracked.append(with_mem_tracker())
        added, operations = with_numbers()
    addition = small_addition()
    note, moment = (cost / addition for cost in in_ledger())
    dry, fake, tracked, meta = (statistics.median(times) for times in (ours, fake, tracked, meta))
    return [
        Row("dry run: ResNet-50 step, batch 120", 1e3 * dry, "ms", "", True),
        Row("dry run: FakeTensorMode alone over ours", fake / dry, "x", ">= 1 x", fake >= dry),
        Row("dry run: FakeTensorMode and MemTracker over ours", tracked / dry, "x", ">= 6 x", tracked >= 6 * dry),
        Row("dry run: plain meta tensors over ours", meta / dry, "x", "", True),
        Row("real numbers: added to each operation", 1e6 * added, "us", "< 40 us", added < 40e-6),
        Row("real numbers: operations in that step", operations, "", "", True),
        Row("real numbers: of which an empty dispatch mode", 1e6 * empty_mode(), "us", "", True),
        Row("PyTorch's own share of a launch (hardware/data/hosts.toml)", 1e6 * addition, "us", "", True),
        *(
            Row(f"the same through modules and autograd: {way}", 1e6 * cost, "us", "", True)
            for way, cost in zip(("forward", "backward"), through_modules(), strict=True)
        ),
        Row("runner: what a process holds is noted, over a small addition", note, "x", "< 1 x", note < 1),
        Row("runner: how busy a GPU was is noted, over a small addition", moment, "x", "< 1 x", moment < 1),
    ]


def through_modules() -> tuple[float, float]:
    """Seconds of the host for each operation, forward and backward, of layers that compute next to nothing."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(50)])
    x = torch.randn(4, 8)
    forward = min(timed(lambda: model(x)) for _ in range(30))
    both = min(timed(lambda: model(x).sum().backward()) for _ in range(30))
    return forward / 150, (both - forward) / 250  # a layer: three operations, and five of their gradients


def step_of_resnet(device: str) -> float:
    """Seconds of one training step, the second one: the first fills every cache."""
    with torch.device(device):
        model = resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    x, y = torch.empty(120, 3, 128, 128, device=device), torch.empty(120, 1000, device=device)
    return timed(lambda: train(model, optimizer, nn.functional.mse_loss, x, y))


def with_mem_tracker() -> float:
    with FakeTensorMode():
        model = resnet50()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
        x, y = torch.empty(120, 3, 128, 128), torch.empty(120, 1000)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)

        def step():
            tracker.reset_mod_stats()
            train(model, optimizer, nn.functional.mse_loss, x, y)

        with tracker:
            return timed(step)


def with_numbers() -> tuple[float, int]:
    """Seconds that a virtual GPU adds to each operation of a small CNN's step, and how many there are."""

    def on_virtual_gpu(plain) -> float:
        with virtualgpu.gpus(1):
            return timed(small_cnn("cuda"), 30)

    return added_by(on_virtual_gpu)


def empty_mode() -> float:
    def in_empty_mode(plain) -> float:
        with Empty():
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


def small_addition() -> float:
    x = torch.ones(8)
    return min(timed(lambda: torch.add(x, x), 10_000) for _ in range(5))


def in_ledger() -> tuple[float, float]:
    """Seconds of a note of bytes and of one of time."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(folder, 8)
        calls = (lambda: ledger.note(7, 5, 6, 7)), (lambda: ledger.time(7, 5.0, 6.0))
        note, moment = (min(timed(call, 10_000) for _ in range(5)) for call in calls)
        ledger.end()
    return note, moment


class Counter(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


class Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
