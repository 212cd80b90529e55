import pytest

import virtualgpu
from virtualgpu import session
from virtualgpu.run.ranks import launch


@pytest.fixture(autouse=True)
def virtual(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    before = session.looks_for_races()
    yield
    virtualgpu.reset()
    session.look_for_races(before)


@pytest.fixture
def sanitize():
    """Two T4s on which races are looked for."""
    virtualgpu.gpus(2)
    with virtualgpu.sanitize():
        yield virtualgpu.machine()


@pytest.fixture
def on_gpus(capfd):
    """on_gpus(function, *args): what each of two ranks returns, while races are looked for."""

    def run(function, *args, **options):
        virtualgpu.gpus(2)
        with virtualgpu.sanitize():
            return launch(function, *args, nprocs=2, **options)

    return run
