"""What watching costs: our monitor against GPUtil.getGPUs() in every iteration, both over a fake nvidia-smi of three GPUs."""

import os
import statistics
import tempfile
import time
from pathlib import Path

from helpers.monitor import CPUSource, Monitor, SMISource
from tests.bench.row import Row

# What GPUtil asks for, and what we do
LINES = (
    "{0}, GPU-{0}, 10, 15360, 1000, 14360, 550.54, Tesla T4, 0, Disabled, Disabled, 40",
    "GPU-{0}, 10, 1000",
)
STEP = 0.010  # seconds: the training step that design section 7 speaks of


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "nvidia-smi"
        gputil, ours = ("; ".join(f"echo '{line.format(i)}'" for i in range(3)) for line in LINES)
        script.write_text(f'#!/bin/sh\ncase "$*" in *query-gpu=uuid*) {ours};; *) {gputil};; esac\n')
        script.chmod(0o755)
        path, os.environ["PATH"] = os.environ["PATH"], f"{folder}:{os.environ['PATH']}"
        try:
            return measured()
        finally:
            os.environ["PATH"] = path


def measured() -> list[Row]:
    import GPUtil

    assert len(GPUtil.getGPUs()) == 3, "the fake nvidia-smi answers"
    gputil, ours, cpu = [], [], []
    for _ in range(15):  # in turn, so that a busy moment hits both
        gputil.append(timed(GPUtil.getGPUs, 1))
        ours.append(per_iteration(SMISource()))
        cpu.append(per_iteration(CPUSource()))
    per_call, cost, cost_cpu = (statistics.median(values) for values in (gputil, ours, cpu))
    return [
        Row(
            "monitor: GPUtil.getGPUs() per iteration over ours", per_call / cost, "x", ">= 20 x", per_call / cost >= 20
        ),
        Row("monitor over nvidia-smi: an iteration", 1e3 * cost, "ms", "< 0.1 ms", cost < 1e-4),
        Row("monitor over the CPU: an iteration", 1e3 * cost_cpu, "ms", "< 0.1 ms", cost_cpu < 1e-4),
        Row("monitor over nvidia-smi: share of a 10 ms step", 100 * cost / STEP, "%", "< 1 %", cost < STEP / 100),
    ]


def per_iteration(source) -> float:
    """Seconds of work that watching adds to a 10 ms step: the stamp itself, and the thread's reading, shared out."""
    with Monitor(source) as monitor:
        stamp = timed(monitor.step, 1000)
    return stamp + timed(type(source)().read, 3) * STEP / source.interval


def timed(call, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
