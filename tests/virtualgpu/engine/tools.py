"""What these tests share: tables of calls, small tensors on a GPU, and the same step with numbers and in a dry run.

A row of a table is a line of text, its cells between ` | `; the first is a call as a program writes it, which `eval` carries out
among the names of its test file.
"""

import contextlib

import torch
from torch import nn  # noqa: F401
from torch.nn import functional as F  # noqa: F401

import virtualgpu

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
LONG, INT, BYTE, BOOL = torch.int64, torch.int32, torch.uint8, torch.bool
ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
MIB = 1 << 20
HERE_AND_THERE = [(CPU, ONE), (ONE, CPU), (ZERO, ONE)]  # from where, and to where
SAME_DEVICE = "Expected all tensors to be on the same device"
MODES = [virtualgpu.gpus, virtualgpu.dry_run]


def table(text: str) -> list:
    """A row's cells, where it has several; lines that begin with # say what the rows below have in common."""
    lines = [line.strip() for line in text.strip().splitlines()]
    rows = [tuple(cell.strip() for cell in line.split(" | ")) for line in lines if line and not line.startswith("#")]
    return [row if len(row) > 1 else row[0] for row in rows]


def ones(*shape, dtype=SINGLE, device="cuda", learns=False):
    return torch.ones(shape, dtype=dtype, device=device, requires_grad=learns)


def halves(*shape):
    return ones(*shape, dtype=HALF)


def whole(*shape, dtype=LONG, device="cuda"):
    """Zeros."""
    return torch.zeros(shape, dtype=dtype, device=device)


def rand(*shape, dtype=SINGLE, learns=True):
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(learns)


def perhaps_dry(dry: bool):
    """Around a test of GPUs that are on already."""
    return virtualgpu.dry_run() if dry else contextlib.nullcontext()


def figures() -> tuple:
    """Bytes allocated now and at the peak, and the simulated seconds of the host once the GPU is done."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), virtualgpu.machine().clock.host


def described(tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.untyped_storage().nbytes()


def same_when_dry(step, like="T4"):
    """The tensors that `step` returns lie alike with numbers and in a dry run, which has the same bytes and seconds. Returns those."""
    both = []
    for run in MODES:
        with run(1, like=like):
            results = [described(tensor) for tensor in step()]
            both.append((results, figures()))
    assert both[0] == both[1]
    return both[0]


def used(function) -> tuple:
    """(its result, [bytes allocated after it, at the peak])"""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    return result, [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]


def used_backward(out, leaves) -> list[int]:
    gradient = torch.ones_like(out).detach()
    return used(lambda: torch.autograd.grad(out, leaves, gradient))[1]


def gradients(function, *tensors, device="cpu", slope=None) -> list:
    """[the result, the gradient of each], on the CPU: of copies there."""
    leaves = [tensor.detach().to(device, copy=True).requires_grad_() for tensor in tensors]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out) if slope is None else slope.to(device, out.dtype))
    return [result.detach().cpu() for result in (out, *grads)]
