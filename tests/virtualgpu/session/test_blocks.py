"""Another process on the GPU, for as long as a block lasts."""

import os

import pytest
import torch

import virtualgpu
from virtualgpu.memory.ledger import PLAYED_PID
from virtualgpu.session.blocks import other_process
from virtualgpu.torch_api import nvml

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


@pytest.mark.parametrize("container", [False, True], ids=["host", "container"])
def test_the_other_process_has_a_pid_of_its_own(gpu, container):
    held = torch.zeros(MIB, device=gpu)
    other, own = PLAYED_PID, PLAYED_PID + 1 if container else os.getpid()
    who = f"Process {own}" if container else "Including non-PyTorch memory, this process"
    with other_process(leave="20 MB", container=container):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(20 * MIB, device=gpu)
        told = dict(nvml.OfProcess(virtualgpu.machine()).processes(0))
    words = (
        f"20.00 MiB is free. Process {other} has 216.00 MiB memory in use. {who} has 20.00 MiB memory in use. Of the"
    )
    assert words in str(caught.value)
    assert told == {other: 216 * MIB, own: 20 * MIB} and held.nbytes


def test_two_other_processes_at_once(gpu):
    """Also where what others hold is asked of a function, as under the runner."""
    virtualgpu.machine().gpus[0].memory.others = lambda: 50 * MIB
    assert torch.cuda.mem_get_info()[0] == 206 * MIB
    with other_process(leave="100 MB"):
        with other_process(leave="20 MB"):
            assert torch.cuda.mem_get_info()[0] == 20 * MIB
        assert torch.cuda.mem_get_info()[0] == 100 * MIB
    assert torch.cuda.mem_get_info()[0] == 206 * MIB
