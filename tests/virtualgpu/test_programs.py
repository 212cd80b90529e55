"""Code from tutorials runs unchanged on virtual GPUs, and to the last bit as on the CPU."""

import pytest
import torch

import virtualgpu
from tests.virtualgpu.programs import PROGRAMS
from tests.virtualgpu.rounded import RoundedProducts


def one_generator_for_all() -> None:
    """A GPU has a generator of its own; a program compared with the CPU's must draw from the CPU's."""
    torch.cuda.init()  # seeds the GPUs, as torch.manual_seed above asked
    torch.cuda.default_generators = (torch.default_generator,) * torch.cuda.device_count()


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_numbers_as_on_the_cpu(name):
    torch.manual_seed(0)
    with RoundedProducts():
        plain = PROGRAMS[name]("cpu", "cpu")
    torch.manual_seed(0)
    with virtualgpu.gpus(2):
        one_generator_for_all()
        on_gpus = PROGRAMS[name]("cuda:0", "cuda:1")
        clock = virtualgpu.machine().clock
        assert sum(clock.busy) > 0  # it did run there
    assert len(plain) == len(on_gpus) > 0
    for a, b in zip(plain, on_gpus, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()
