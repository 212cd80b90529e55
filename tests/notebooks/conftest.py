"""What the graders' tests share."""

import pytest

import virtualgpu
from tests.processes import HURRY
from virtualgpu.run import ranks


@pytest.fixture
def no_gpus_before(monkeypatch):
    """As in a notebook before its first cell: virtual GPUs when somebody asks for some, and none is left."""
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    yield
    virtualgpu.reset()


@pytest.fixture
def hurried(monkeypatch):
    """The time limit of graders, shortened: for code that does not end."""
    monkeypatch.setattr(
        "checks.grader.launch", lambda *args, timeout, **more: ranks.launch(*args, timeout=HURRY, **more)
    )
