"""For what the host waits: its simulated time says so, and torch.cuda.set_sync_debug_mode where PyTorch knows of it (engine/operations.py)."""

import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import virtualgpu
from virtualgpu import _compat

MESSAGE = "called a synchronizing CUDA operation"


@pytest.fixture(autouse=True)
def gpus():
    return virtualgpu.gpus(1)


@pytest.fixture
def x():
    return torch.arange(4.0, device="cuda")


def matrix(*batch: int) -> torch.Tensor:
    return torch.eye(4, device="cuda").mul_(2).expand(*batch, 4, 4)


def whole(*numbers: int) -> torch.Tensor:
    """On the GPU without a copy, which the host would wait for."""
    return torch.stack([torch.full((), number, device="cuda") for number in numbers])


def gradient(function, x: torch.Tensor):
    """Of a function whose forward pass lets the host go on."""
    (out := function(leaf := x.clone().requires_grad_())).backward(torch.ones_like(out))
    return leaf.grad


def clip(x: torch.Tensor, **options):
    x.grad = x.clone()
    torch.nn.utils.clip_grad_norm_([x], 1.0, **options)


def sparse(x: torch.Tensor, *size: tuple) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.stack([x, x]).long(), x, *size, check_invariants=False)


def run(line: str, x: torch.Tensor) -> None:
    names = {"x": x, "linalg": torch.linalg, "F": torch.nn.functional}
    exec(compile(line, __file__, "exec"), globals() | names)


def runs_ahead(line: str, x: torch.Tensor) -> bool:
    """Does the host go on before the GPU has come to what was queued before?"""
    clock = virtualgpu.machine().clock
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    end = clock.ready(0)
    run(line, x)
    return clock.host < end


ROWS = tomllib.loads(Path(__file__).with_name("host_waits.toml").read_text("utf-8"))
# combinations selects by a mask before 2.15
GOING_ON = ROWS["going_on"] + ["gradient(torch.combinations, x)"] * (_compat.VERSION >= (2, 15))


@pytest.mark.parametrize("line", ROWS["decomposed"] + ROWS["waiting"])
def test_waiting(line, x):
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match=MESSAGE) as said:
        run(line, x)
    assert {warning.filename for warning in said} == {__file__}
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match=MESSAGE):
        run(line, x)
    torch.cuda.set_sync_debug_mode("default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_ahead(line, x)


@pytest.mark.parametrize("line", GOING_ON)
def test_going_on(line, x):
    torch.cuda.set_sync_debug_mode("error")
    assert runs_ahead(line, x)


@pytest.mark.parametrize("line", ROWS["silent"])
def test_waiting_of_which_pytorch_does_not_know(line, x):
    torch.cuda.set_sync_debug_mode("error")
    assert not runs_ahead(line, x)


@pytest.mark.parametrize("line", ROWS["decomposed"])
def test_a_dry_run_waits_as_well(line):
    with virtualgpu.dry_run():
        assert not runs_ahead(line, torch.arange(4.0, device="cuda"))


def test_the_mode_is_read_back_and_new_gpus_have_none(x):
    torch.cuda.set_sync_debug_mode(1)
    assert torch.cuda.get_sync_debug_mode() == 1
    virtualgpu.reset()
    virtualgpu.gpus(1)
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.ones(1, device="cuda").item()
