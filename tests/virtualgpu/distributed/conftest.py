import pytest

import virtualgpu
from virtualgpu.run.ranks import launch


@pytest.fixture
def on_gpus(capfd):
    """on_gpus(function, *args, n=2): what each rank returns, on virtual GPUs."""

    def run(function, *args, n=2, like="T4", **options):
        virtualgpu.gpus(n, like=like)
        return launch(function, *args, nprocs=n, **options)

    return run


@pytest.fixture
def on_cpus(capfd):
    """The same on CPUs, by gloo."""

    def run(function, *args, n=2, **options):
        virtualgpu.reset()
        return launch(function, *args, nprocs=n, **options)

    return run
