import pytest
import torch

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
    """The same on CPUs, by gloo, also where there is a real GPU."""

    def run(function, *args, n=2, **options):
        virtualgpu.reset()
        return launch(_without_real_gpus, function, *args, nprocs=n, **options)

    return run


def _without_real_gpus(function, *args, **options):
    """In a rank, which is a process of its own: functions look here for what they shall work on."""
    torch.cuda.is_available = lambda: False
    return function(*args, **options)
