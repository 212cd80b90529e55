"""Virtual GPUs off after each test, whatever it left."""

import pytest

import virtualgpu


@pytest.fixture(autouse=True)
def off_afterwards(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    for name in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    yield
    virtualgpu.reset()


@pytest.fixture
def gpus():
    """Two T4s."""
    virtualgpu.gpus(2)
    return virtualgpu.machine()
