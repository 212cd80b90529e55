"""Programs of every kind on one card, as we timed them on two H100s (80 GB) and an H200 (PyTorch 2.11, CUDA 13, cuDNN 9.19; November 2026).

First visit, group `one_card`: 41 programs on an H100. That card's kernels and its host's operations were measured one by one in the same
hours, and are what the clock has of them; no program was an input. Programs with the package transformers (BERT, T5, Llama) were timed as
well, and are left out: it is no part of this project's set-up. The second visit's H200 was asked for 21 of the 41.

Second visit, group `unseen`: 37 programs that were written and simulated before a card was asked, then timed on another H100, and 17 of them
on an H200. Commit 8be4985 has what the clock said before: on the H100 13 of 37 times within 15 %, 21 within 30 %, measured over simulated 1.22
at the median (on the H200 6 and 12 of 17, and 1.18); memory within 5 % wherever it is judged. The table has what the clock says now, with
what chains of operations cost the host in that visit (tests/gpu/h100_host.csv, mixed_host.csv); still no program is an input. One more, a
mixture of experts, was timed and is left out: its shapes depend on values.

Settings: a row of published.csv each, random data; the programs are in `programs/`, and plain models of torchvision in vision.py (SGD with
momentum). The time is that of steps one after the other, without a wait between them, at the median of five stretches. The memory is the
most allocated. It is not judged where convolutions or LSTMs are in a program: what they borrow was looked at in the first visit's, and the
second's with pictures, clips, points or sound are left out alike. On the second visit a program found 65 MiB of cuBLAS's workspaces left by
the one before: there memory is judged of training with `nn.Linear` alone, which needs them itself.

How far the host of such a rented machine may be trusted: to a factor of two, where a step waits for it. Beside the H200 one loop of plain
Python took 7.4 to 14.9 ms at different moments of two minutes, and the host's part of a ResNet-50's step 13.9 to 28 ms; processor time was
as long as wall time, so the processor was slower, and nothing waited. Nor do chains of one operation tell all: they took seven tenths
(forward; three quarters backward) of what the same operations took in mixed order.

Third visit, another H100 and an H200, 2026-11-27: of 75 of the programs, and 70 of these, how long their kernels ran in a step (torch.profiler,
copies from the host left out), which no slow host changes. Which kinds of kernels differed most from the simulated ones was looked at; their times are from kernels of
other shapes, measured in the same hour on the H100 (tests/gpu/h100_profiled.csv); nothing of the H200 was an input.

    python -m tests.accuracy.one_card      on a machine with a GPU: the same there, each program once, beside the table's cards
"""

import contextlib
import gc
import os
import statistics
import time
from typing import NamedTuple
from unittest import mock

import torch

import virtualgpu
from tests.accuracy import vision
from tests.accuracy.programs import PROGRAMS
from tests.accuracy.programs.pictures import loaded
from tests.accuracy.published import Published, Row, program, published

# cuBLAS's workspaces are kept, as PyTorch had it before 2.15
KEPT = mock.patch.dict(os.environ, TORCH_CUBLAS_WORKSPACE_CACHE="1")
TOLD = {"memory": ": most allocated", "kernels": ": kernels"}
WARM, STEPS = 3, 3  # of the simulation, where one step is as long as the next


@contextlib.contextmanager
def precision(row: Published):
    """TF32 as the row says: "ieee" has none, "float32" that of convolutions, "tf32" both; and cuDNN's search where it asks for it."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32, matmul.allow_tf32 = row.precision != "ieee", row.precision == "tf32"
    cudnn.benchmark = "search" in row.options
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


def prepare(row: Published) -> vision.Step:
    """A step of the program. Call it in `precision(row)`."""
    if "loader" in row.options:
        return loaded(row)
    return PROGRAMS[row.model](row) if row.model in PROGRAMS else vision.prepare(row)[1]


class Step(NamedTuple):
    """Seconds of a step, and of its kernels; most bytes allocated."""

    seconds: float
    kernels: float
    most: int


def measure(row: Published) -> Step:
    """Simulated."""
    with KEPT, virtualgpu.dry_run(1, like=row.card, host=row.host), precision(row):
        step, clock = prepare(row), virtualgpu.machine().clock
        for _ in range(WARM):
            step()
        torch.cuda.synchronize()
        start, before = clock.host, clock.computing[0]
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        seconds, kernels = (clock.host - start) / STEPS, (clock.computing[0] - before) / STEPS
        return Step(seconds, kernels, torch.cuda.max_memory_allocated())


def called(row: Published) -> str:
    """The program and its settings, whatever the card."""
    settings = f", {row.settings}" if row.settings else ""
    return f"{row.model}, {row.mode}, {row.precision}{' channels last' * (row.layout == 'last')}, batch {row.batch}{settings}"


def name(row: Published) -> str:
    return f"{called(row)}, {row.card}"


@program("measured here")
def one_card() -> list[Row]:
    """As the module says."""
    results, taken = [], {}
    for row in published("one_card"):
        if row.run not in taken:
            taken[row.run] = measure(row)
        step = taken[row.run]
        figures = {"memory": step.most / 2**20, "time": 1000 * step.seconds, "kernels": 1000 * step.kernels}
        results.append(row.beside(f"{name(row)}{TOLD.get(row.kind, '')}", figures[row.kind]))
    return results


def on_this_gpu(row: Published, seconds: float = 0.5) -> tuple[float, int]:
    """Measured seconds of a step on cuda:0, at the median of five stretches, and most bytes allocated."""
    with precision(row):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # 65 MiB of the program before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = prepare(row)
        stretches, steps = [], 10
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            stretches.append((time.perf_counter() - start) / steps)
            steps = max(3, round(seconds / stretches[-1] / 5))
        return statistics.median(stretches[1:]), torch.cuda.max_memory_allocated()


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: `python -m tests.accuracy one_card` simulates these programs")
    programs, cards = {}, {}
    for row in published("one_card"):
        programs.setdefault(row._replace(card="").run, []).append(row)
        cards[row.card] = None
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; beside it the table's {', '.join(cards)}")
    for alike in programs.values():
        taken, most = on_this_gpu(alike[0])
        for kind, here in (("time", f"{1000 * taken:.3f}"), ("memory", f"{most / 2**20:.1f}")):
            if known := {row.card: row for row in alike if row.kind == kind}:
                beside = "".join(f" {known[card].figure if card in known else '':>9}" for card in cards)
                print(f"{called(alike[0]):<100} {here:>9}{beside} {next(iter(known.values())).unit}", flush=True)


if __name__ == "__main__":
    main()
