"""What these folders share."""

import pytest

import virtualgpu
from virtualgpu.engine.machine import GPU


@pytest.fixture(autouse=True)
def off_afterwards(monkeypatch):
    """Virtual GPUs off after each test, whatever it left."""
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


@pytest.fixture
def without_workspaces(monkeypatch):
    """Kernels work without memory of their own: for figures that are about something else. engine/test_scratch_memory.py
    has it."""
    monkeypatch.setattr(GPU, "lend", lambda *args, **options: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
