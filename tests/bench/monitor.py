"""What watching costs: our monitor against GPUtil.getGPUs() in every iteration. GPUtil asks a fake nvidia-smi of three GPUs, the
monitor NVML, which three virtual GPUs answer."""

import os
import statistics
import tempfile
import time
from pathlib import Path

import virtualgpu
from tests.bench.tools import Row, below
from virtualgpu.monitor import CPUSource, Monitor, NVMLSource

LINE = "{0}, GPU-{0}, 10, 15360, 1000, 14360, 550.54, Tesla T4, 0, Disabled, Disabled, 40"  # what GPUtil asks for
STEP = 0.010  # seconds of a training step


def rows() -> list[Row]:
    gputil, cpu = [], []
    for _ in range(15):  # in turn, so that a busy moment hits both
        gputil.append(by_gputil())
        cpu.append(per_iteration(CPUSource()))
    with virtualgpu.gpus(3):
        nvml = [per_iteration(NVMLSource()) for _ in range(15)]
    per_call, cost, cost_cpu = (statistics.median(values) for values in (gputil, nvml, cpu))
    ratio = per_call / cost
    return [
        Row("monitor: GPUtil.getGPUs() per iteration over ours", ratio, "x", ">= 20 x", ratio >= 20),
        below("monitor over NVML: an iteration", 1e3 * cost, "ms", 0.1),
        below("monitor over the CPU: an iteration", 1e3 * cost_cpu, "ms", 0.1),
    ]


def by_gputil() -> float:
    """Seconds of a call, which starts a fake nvidia-smi."""
    import GPUtil

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "nvidia-smi"
        script.write_text("#!/bin/sh\n" + "; ".join(f"echo '{LINE.format(i)}'" for i in range(3)) + "\n")
        script.chmod(0o755)
        path, os.environ["PATH"] = os.environ["PATH"], f"{folder}:{os.environ['PATH']}"
        try:
            assert len(GPUtil.getGPUs()) == 3, "the fake nvidia-smi answers"
            return timed(GPUtil.getGPUs, 1)
        finally:
            os.environ["PATH"] = path


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
