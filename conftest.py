"""For notebooks and tests alike: the environment that the stored outputs were made in, how much memory a lesson may take, and a
closing count of what was compared."""

import os
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import nbval.kernel
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

import run
import series

from tests.processes import peak_memory

os.environ.update(run.ENVIRONMENT)
run.share_cores(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
os.environ.setdefault(
    "HELPERS_GPUS", "virtual"
)  # also where there are real GPUs: stored outputs are those of virtual ones


def executed_as_by_a_reader(kernel, source, allow_stdin=None):
    """With history, as everywhere but in nbval: without one IPython does not see the semicolon that ends a cell, and shows its value."""
    return kernel.kc.execute(source, allow_stdin=allow_stdin, stop_on_error=False)


def stop_as_a_reader_does(running):
    """nbval kills its kernels, and each would leave its temporary folders (notebook 01 alone 270 MB)."""
    running.kc.stop_channels()
    running.km.shutdown_wait_time = 10  # seconds, not five: beside other tests the end of Python takes longer
    running.km.shutdown_kernel()
    del running.km


def start_forked_kernel(*args, start=nbval.kernel.start_new_kernel, **options):
    """nbval's, but that the kernel and the programs that its cells start are without the seconds in which each imports PyTorch."""
    from tests import forks  # it notes the environment, which is set by now

    with mock.patch("jupyter_client.launcher.Popen", forks.Popen):
        return start(*args, **options)


nbval.kernel.RunningKernel.execute_cell_input = executed_as_by_a_reader
nbval.kernel.RunningKernel.stop = stop_as_a_reader_does
nbval.kernel.start_new_kernel = start_forked_kernel

HOST_MEMORY = 4 << 30  # bytes: a lesson's kernel takes no more, so that it runs on a small laptop


def pytest_collection_modifyitems(items):
    """Of the notebooks the longest first, so that at the end no processor waits for one."""
    places = {path: place for place, path in enumerate(series.longest_first(series.notebooks()))}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """After each cell: the kernel's peak so far."""
    result = yield
    if hasattr(item, "cell") and sys.platform == "linux":
        item.peak = peak_memory(item.parent.kernel.km.provisioner.pid)
        assert item.peak <= HOST_MEMORY, f"the kernel took {item.peak / 2**30:.2f} GiB of this machine's memory"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A report says what became of a cell's output, also where another process ran it (pytest-xdist)."""
    report = yield
    if hasattr(item, "cell") and call.when == "call":
        kind = "compared" if item.cell.outputs else "silent"
        if item.cell.outputs and "nbval-ignore-output" in series.tags(item.cell):
            kind = "ignored"
        pictures = sum("image/png" in output.get("data", {}) for output in item.cell.outputs)
        report.user_properties.append(("nbval", (kind, pictures, getattr(item, "peak", 0))))
    return report


def pytest_terminal_summary(terminalreporter, config):
    """Say what strict nbval compared, so that a green line cannot hide that nothing was."""
    passed = [(report, dict(report.user_properties)) for report in terminalreporter.stats.get("passed", [])]
    cells = [(report.nodeid.split("::")[0], *told["nbval"]) for report, told in passed if "nbval" in told]
    if not cells:
        return
    kinds = Counter(kind for _, kind, *_ in cells)
    terminalreporter.write_line(
        f"nbval: {len({name for name, *_ in cells})} notebook(s), {len(cells)} cells ran as stored: {kinds['compared']} outputs "
        f"compared, {kinds['ignored']} ignored by tag, {kinds['silent']} without output; "
        f"{sum(pictures for *_, pictures, _ in cells)} pictures compared by their words; at most "
        f"{max(peak for *_, peak in cells) / 2**30:.1f} GiB of memory in a kernel"
    )


def pytest_ignore_collect(collection_path, config):
    """tests/browser takes minutes and needs chromium: only when it is asked for by name."""
    asked = any("browser" in str(argument) for argument in config.invocation_params.args)
    return True if collection_path == series.ROOT / "tests" / "browser" and not asked else None
