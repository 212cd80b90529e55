"""`make doctor`: one line per package and device, [ OK ] or [FAIL], and the cure of each failure."""

import contextlib
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from helpers import data
from virtualgpu import monitor

ROOT = Path(__file__).resolve().parent.parent
IMPORTED_AS = {"nvidia-ml-py": "pynvml", "ray": None, "jupyterlab": None}  # None: slow to import, its version is enough

Line = tuple[bool, str, str]  # fine?, what, what was found or how to cure it


def packages() -> Iterator[Line]:
    """Each line of requirements.txt: installed, new enough, and importable."""
    for text in (ROOT / "requirements.txt").read_text("utf-8").splitlines():
        if not text or text.startswith("#"):
            continue
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        try:
            found = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            yield False, wanted.name, f"not installed. Cure: pip install '{text.split(';')[0]}'"
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield False, wanted.name, f"{found} is too old. Cure: pip install '{text.split(';')[0]}'"
            continue
        module = IMPORTED_AS.get(wanted.name, wanted.name)
        try:
            if module:
                importlib.import_module(module)
            yield True, wanted.name, found
        except Exception as error:
            cure = (
                "pip install setuptools"
                if "distutils" in str(error)
                else f"pip install --force-reinstall '{wanted.name}'"
            )
            yield False, wanted.name, f"{found} does not import ({error}). Cure: {cure}"


def devices() -> Iterator[Line]:
    """CPU, memory, GPUs by each way of asking, the disk, and the shipped data."""
    yield True, "cpu", f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    yield from gpus()
    free = shutil.disk_usage(ROOT).free / 1e9
    yield (
        free > 2,
        "disk",
        f"{free:.0f} GB free" + ("" if free > 2 else ". Cure: free some; checkpoints and downloads need about 2 GB"),
    )
    try:
        yield True, "data", f"{len(data.digits()[1]):,} handwritten digits"
    except Exception as error:
        yield False, "data", str(error)


def gpus() -> Iterator[Line]:
    """A machine without a GPU is fine. A GPU that only some of the ways find is not."""
    import torch

    on_path = shutil.which("nvidia-smi") is not None
    seen = {"NVML": 0, "nvidia-smi": len(listed()) if on_path else 0}
    with contextlib.suppress(monitor.NoSource):
        reader = monitor.NVMLSource()
        seen["NVML"] = len(reader.devices)
        reader.close()
    counts = ", ".join(f"{name} {count}" for name, count in {**seen, "torch": torch.cuda.device_count()}.items())
    if not on_path and not any(seen.values()) and not torch.cuda.is_available():
        yield True, "gpu", "none: the lessons use the CPU and virtual GPUs"
    elif torch.cuda.is_available():
        yield True, "gpu", f"{torch.cuda.get_device_name(0)} (seen by {counts})"
    elif any(seen.values()) and torch.version.cuda is None:
        yield (
            False,
            "gpu",
            f"seen by {counts}, but this torch is built without CUDA. Cure: install a CUDA build, pytorch.org/get-started",
        )
    elif any(seen.values()):
        yield (
            False,
            "gpu",
            f"seen by {counts}, but CUDA does not start. Cure: a driver new enough for CUDA {torch.version.cuda}",
        )
    else:
        yield (
            False,
            "gpu",
            "nvidia-smi is there but reports no GPU. Cure: run it by hand; restart the machine or reinstall the driver",
        )


def listed() -> list[str]:
    """The GPUs that nvidia-smi lists; none where it fails or hangs."""
    try:
        ran = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in ran.stdout.decode(errors="replace").splitlines() if line.startswith("GPU")]


def main() -> int:
    failed = 0
    for fine, what, found in (*packages(), *devices()):
        failed += not fine
        print(f"{'[ OK ]' if fine else '[FAIL]'} {what:<14} {found}")
    print(f"{failed} of these want a cure." if failed else "Everything is ready.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
