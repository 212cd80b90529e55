"""Another process on the GPU, for as long as a block lasts."""

import pytest
import torch

import virtualgpu
from virtualgpu.session.blocks import other_process

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("gpu")


def test_another_process_leaves_what_it_is_told_to_and_goes(gpu):
    held = torch.zeros(MIB, device=gpu)
    free = torch.cuda.mem_get_info()[0]
    with other_process(leave="20 MB"):
        assert torch.cuda.mem_get_info() == (20 * MIB, 256 * MIB)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"of which 20.00 MiB is free. Process \d+ has .*this process has 20.00 MiB"
        ):
            torch.zeros(20 * MIB, device=gpu)
    assert torch.cuda.mem_get_info()[0] == free
    with pytest.raises(KeyError), other_process(leave="20 MB"):
        raise KeyError
    assert torch.cuda.mem_get_info()[0] == free
    with other_process(leave="1 GB"):  # there is less: it takes nothing
        assert torch.cuda.mem_get_info()[0] == free
    assert held.nbytes == torch.cuda.memory_allocated()


def test_two_other_processes_at_once(gpu):
    """Also where what others hold is asked of a function, as under the runner."""
    virtualgpu.machine().gpus[0].memory.others = lambda: 50 * MIB
    assert torch.cuda.mem_get_info()[0] == 206 * MIB
    with other_process(leave="100 MB"):
        with other_process(leave="20 MB"):
            assert torch.cuda.mem_get_info()[0] == 20 * MIB
        assert torch.cuda.mem_get_info()[0] == 100 * MIB
    assert torch.cuda.mem_get_info()[0] == 206 * MIB
