"""Programs of every kind on one card, as we timed them on two H100s and an H200: sources.toml says when, and with what.

python -m tests.accuracy.one_card      on a machine with a GPU: the same there, each program once, beside the table's cards
"""

import gc
import os
import statistics
import time
from unittest import mock

import torch

from tests.accuracy.programs import PROGRAMS
from tests.accuracy.programs.pictures import loaded
from tests.accuracy.published import Published, Row, published
from tests.accuracy.runner import Measured, Step, beside, dry_run, measured, precision
from tests.accuracy.vision import prepare

# cuBLAS's workspaces are kept, as PyTorch had it before 2.15
KEPT = mock.patch.dict(os.environ, TORCH_CUBLAS_WORKSPACE_CACHE="1")
TOLD = {"memory": ": most allocated", "kernels": ": kernels"}


def step_of(row: Published) -> Step:
    """Of the program. Call it in `precision(row)`."""
    if "loader" in row.options:
        return loaded(row)
    return PROGRAMS[row.model](row) if row.model in PROGRAMS else prepare(row)[1]


def measure(row: Published) -> Measured:
    """Simulated."""
    with KEPT, dry_run(row):
        return measured(step_of(row), steps=4, mean=3)


def called(row: Published) -> str:
    """The program and its settings, whatever the card."""
    settings = f", {row.settings}" if row.settings else ""
    return f"{row.model}, {row.mode}, {row.precision}{' channels last' * (row.layout == 'last')}, batch {row.batch}{settings}"


def name(row: Published) -> str:
    return f"{called(row)}, {row.card}"


def one_card() -> list[Row]:
    return beside("one_card", measure, lambda row: f"{name(row)}{TOLD.get(row.kind, '')}")


def on_this_gpu(row: Published, seconds: float = 0.5) -> tuple[float, int]:
    """Measured seconds of a step on cuda:0, at the median of five stretches, and most bytes allocated."""
    with precision(row):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # 65 MiB of the program before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = step_of(row)
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
