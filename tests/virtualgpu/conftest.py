"""What several of these folders share."""

import pytest


@pytest.fixture
def without_workspaces(monkeypatch):
    """cuBLAS works without memory of its own: for figures that are about something else. causes/test_workspaces.py has it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
