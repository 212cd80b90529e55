"""torch.cuda.set_sync_debug_mode: who waits for a GPU is told so, or stopped."""

import warnings

import pytest
import torch

import virtualgpu

MESSAGE = "called a synchronizing CUDA operation"


@pytest.fixture(autouse=True)
def gpus():
    return virtualgpu.gpus(1)


@pytest.fixture
def x():
    return torch.arange(4.0, device="cuda")


WAITING = {
    "item": lambda x: x[0].item(),
    "if": lambda x: bool(x[0] > 1),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: repr(x),
    "to the GPU, not pinned": lambda x: torch.ones(3).cuda(),
    "copy_": lambda x: torch.empty(4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 1],
    "x[mask] = a GPU's number": lambda x: x.__setitem__(x > 1, x.sum()),
    "unique": lambda x: x.unique(),
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long()),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda")),
    "indices on the host": lambda x: x[torch.tensor([1, 0])],
    "Stream.synchronize": lambda x: torch.cuda.current_stream().synchronize(),
}
GOING_ON = {
    "a kernel": lambda x: x.exp().sum(),
    "pinned": lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "to pinned": lambda x: x.to("cpu", non_blocking=True),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "x[mask] = 1": lambda x: x.__setitem__(x > 1, 1.0),
    "indices": lambda x: x[torch.zeros(2, dtype=torch.long, device="cuda")],
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long(), num_classes=4),
    "randperm": lambda x: torch.randperm(20000, device="cuda"),
    "repeat_interleave, its size told": lambda x: x.repeat_interleave(
        torch.ones(4, dtype=torch.long, device="cuda"), output_size=4
    ),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "Event.synchronize": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("what", WAITING)
def test_waiting(what, x):
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match=MESSAGE) as said:
        WAITING[what](x)
    assert {warning.filename for warning in said} == {__file__}
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match=MESSAGE):
        WAITING[what](x)
    torch.cuda.set_sync_debug_mode("default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WAITING[what](x)


@pytest.mark.parametrize("what", GOING_ON)
def test_going_on(what, x):
    torch.cuda.set_sync_debug_mode("error")
    GOING_ON[what](x)


def test_the_mode_is_read_back_and_new_gpus_have_none(x):
    torch.cuda.set_sync_debug_mode(1)
    assert torch.cuda.get_sync_debug_mode() == 1
    virtualgpu.reset()
    virtualgpu.gpus(1)
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.ones(1, device="cuda").item()
