"""A fake nvidia-smi for the tests, and which of them are slow."""

import gc
import itertools
import os
import re
import signal
import stat

import pytest
from hypothesis import HealthCheck, Phase, settings

# The same programs on each run, so that a red test is not luck; HYPOTHESIS_PROFILE=deep looks for new ones.
COMMON = {
    "deadline": None,
    "phases": [Phase.reuse, Phase.generate, Phase.shrink],
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("ci", max_examples=60, derandomize=True, database=None, **COMMON)
settings.register_profile("deep", max_examples=1500, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Where tests start processes or train. What is left, `pytest -m "not slow" tests`, answers in half a minute.
SLOW = re.compile(
    r"tests/(virtualgpu/(run|engine|distributed|sanitizer|timing/test_(clock|streams)|memory/test_(events|out_of_memory)|torch_api/test_(data_parallel|hooks|files)|session/test_session|test_programs)"
    r"|notebooks/test_(checks|notebook|train)|helpers/test_(faults|tuning|predictions|cells)|tools/test_(classroom|run)|virtualgpu/test_package)"
)

MARKERS = [
    "slow: starts processes or trains (SLOW says which)",
    "judge: judges the whole by many programs; left to the nightly workflow",
]

GOOD_LINES = "\n".join(
    f"GPU-{i}{i}, {10 * (i + 1)}, {1000 * (i + 1)}" for i in range(3)
)  # uuid, utilization, memory.used


UNLESS_IGNORED = {signal.SIGINT: signal.default_int_handler}
if os.name == "posix":
    UNLESS_IGNORED |= {signal.SIGHUP: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL}


def pytest_configure(config):
    """Files in our order: pytest-xdist would begin with those of many tests, which are the quick ones. And signals as a terminal has them:
    what a shell starts in the background ignores Ctrl-C, and so would the programs that tests interrupt."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    for number, handler in UNLESS_IGNORED.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items):
    """Mark the slow ones, and begin with them (the notebooks first), so that at the end no processor waits for a long one."""
    for item in items:
        if SLOW.search(item.path.as_posix()):
            item.add_marker("slow")
    items.sort(key=lambda item: 0 if item.path.suffix == ".ipynb" else 1 if item.get_closest_marker("slow") else 2)


@pytest.fixture(autouse=True, scope="module")
def garbage_of_these_tests_alone():
    """Collections need not walk through PyTorch's million objects: with all that the tests import, a quarter of their time."""
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # Triton's bindings print what is not taken apart at the end


@pytest.fixture
def gpu(monkeypatch):
    """A virtual GPU of 256 MB, the only one there is."""
    import virtualgpu

    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    (device,) = virtualgpu.gpus(1, memory="256 MB")
    yield device
    virtualgpu.reset()


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt, also where Ray Tune has left its own handler in this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def open_files_left():
    """open_files_left(20): this process may open so many files more, until the test ends. (Windows has no such limit.)"""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(number: int):
        free = (n for n in range(soft) if not os.path.exists(f"/dev/fd/{n}"))  # whatever tests before have left open
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, number, None)), hard))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a fake nvidia-smi first on the PATH: nvidia_smi("shell commands"), or nothing for three healthy GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(commands: str = f"cat <<'END'\n{GOOD_LINES}\nEND"):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{commands}\n")
        script.chmod(script.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return install
