"""68 models of libraries on one card: kernels of a step, the step, most bytes allocated and reserved, measured and simulated.

    python -m tests.judges card [--card H200] [--host 2024] [name ...]     simulated, beside measured.csv
    python -m tests.judges card --measure FILE [name ...]                  on a machine with a GPU: JSON lines

They were written and simulated before a card was asked (commit 2d44fea), then run on an H100, and 29 of them on an H200 (PyTorch 2.11, CUDA 13,
transformers 5.17, timm 1.0.31; 2026-11-27). None is an input of the engine: what they showed to be wrong was mended by kernels of other
shapes, measured in the same hour (tests/gpu/h100_profiled.csv). Versions of the libraries change what a model does: measured.csv is of these.
Kernels are those of one step by torch.profiler, copies from the host left out; the step is the median of three stretches. Memory is of
steps after the third. An H100's host took 1.3 times what the clock's "2026" takes, where a step waits for it.
"""

import argparse
import csv
import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import torch

import virtualgpu
from tests.accuracy import kernels, runner
from tests.judges.card.programs import PROGRAMS, Step

MEASURED = Path(__file__).with_name("measured.csv")
FIGURES = ("kernels_ms", "ms", "allocated_mib", "reserved_mib")
# cuBLAS's workspaces are kept, as PyTorch had it before 2.15
KEPT = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1", "HF_HUB_OFFLINE": "1"}
WARM, STEPS, STRETCHES = 3, 2, 4
COPIES = ("HtoD", "DtoH")


def simulate(name: str, card: str, host: str) -> dict[str, float]:
    with virtualgpu.dry_run(1, like=card, host=host):
        step = PROGRAMS[name]()
        _warm(step)
        took = runner.measured(step, steps=1, mean=STEPS)
        return {"kernels_ms": 1000 * took.kernels, "ms": 1000 * took.seconds} | _memory()


def measure(name: str, seconds: float = 0.35) -> dict[str, float]:
    """On cuda:0, in about so many seconds of steps."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    step, steps, stretches = PROGRAMS[name](), 2, []
    _warm(step)
    for _ in range(STRETCHES):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        stretches.append((time.perf_counter() - start) / steps)
        steps = max(2, round(seconds / stretches[-1] / STRETCHES))
    memory = _memory()
    return {"kernels_ms": _profiled(step), "ms": 1000 * statistics.median(stretches[1:])} | memory


def _warm(step: Step) -> None:
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()


def _memory() -> dict[str, float]:
    most = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {f"{kind}_mib": nbytes / 2**20 for kind, nbytes in most.items()}


def _profiled(step: Step) -> float:
    """Milliseconds of a step's kernels."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in on_gpu if not any(way in event.name for way in COPIES)) / 1000


def measured(card: str) -> dict[str, dict[str, float]]:
    """The table's rows of that card, by program."""
    with open(MEASURED, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["card"] == card]
    return {row["program"]: {key: float(row[key]) for key in FIGURES} for row in rows}


def within(factors: list[float], percent: float) -> float:
    """The share of them within so many percent, either way."""
    return kernels.within(map(math.log, factors), percent)


def _compare(card: str, host: str, only: list[str]) -> int:
    """The exit status: 1 where a program fails."""
    factors: dict[str, list[float]] = {key: [] for key in FIGURES}
    failed = []
    print(f"measured over simulated, {card:<28} {'kernels':>9} {'step':>9} {'allocated':>9} {'reserved':>9}")
    for name, row in measured(card).items():
        if only and not any(word in name for word in only):
            continue
        try:
            simulated = simulate(name, card, host)
        except ImportError as error:
            print(f"{name:<53} left out: {error}")
            continue
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        for key in FIGURES:
            factors[key].append(row[key] / simulated[key])
        print(f"{name:<53} " + " ".join(f"{factors[key][-1]:9.2f}" for key in FIGURES), flush=True)
    for key in FIGURES if factors["ms"] else ():
        shares = ", ".join(f"{within(factors[key], percent):.0%} within {percent} %" for percent in (1, 5, 15, 30))
        print(f"{key:<14} {len(factors[key])} programs: {statistics.median(factors[key]):.2f} at the median; {shares}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def _measure(path: str, only: list[str]) -> int:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: `python -m tests.judges card` simulates these programs")
    with open(path, "a", encoding="utf-8") as file:
        for name in PROGRAMS:
            if not only or any(word in name for word in only):
                line = {"program": name, "card": torch.cuda.get_device_name(), **measure(name)}
                print(json.dumps(line), file=file, flush=True)
                print(line, flush=True)
    return 0


def main(arguments: list[str], judge: str = "card") -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges card", description=__doc__.splitlines()[0])
    parser.add_argument("--card", default="H100")
    parser.add_argument("--host", default="2026", help="a name in hardware/data/hosts.toml (%(default)s)")
    parser.add_argument("--measure", metavar="FILE", help="on this machine's GPU; a JSON line a program")
    parser.add_argument("only", nargs="*", metavar="name", help="part of a program's name")
    options = parser.parse_args(arguments)
    with mock.patch.dict(os.environ, KEPT):
        if options.measure:
            return _measure(options.measure, options.only)
        return _compare(options.card, options.host, options.only)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
