"""The graders of notebook 11: a runner for a pipeline's order of work, with small messages and with large ones."""

import random
import re
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from checks.grader import grader, launched_on_gpus, plain
from checks.notebook_03 import held
from checks.notebook_04 import draw, on_own_gpu

WIDTH, LAYERS = 8, 6
LARGE = 2 << 20  # bytes of a micro-batch: NCCL's buffer between two T4s has room for half of that
Run = Callable[[list[str], nn.Module, Sequence[torch.Tensor], Sequence[torch.Tensor]], int]
NO_GRADIENT = "sends None: what it receives has a .grad only where requires_grad_() was called on it before the forward"
ASK = "which message does each of them wait for, and who sends it?"


@grader
def runs_in_order(run: Run) -> str | None:
    """run(order, part, inputs, targets), on each rank: it does the order's work, leaves one GPU's gradients of the mean squared error in
    the part's parameters, and returns how many micro-batches it held at most. Messages have a few bytes."""
    return _graded(run, rows=lambda drawn: drawn.randint(2, 5), words="")


@grader
def runs_large(run: Run) -> str | None:
    """As `runs_in_order`, with messages that NCCL's buffer has no room for."""
    return _graded(run, rows=lambda drawn: LARGE // (4 * WIDTH), words=f" of {LARGE >> 20} MiB")


def _graded(run: Run, rows: Callable[[random.Random], int], words: str) -> str | None:
    """What is wrong with a runner, in the first of a few pipelines where something is. rows: of a micro-batch. words: how large it is."""
    drawn = random.Random(draw())
    p, m = drawn.choice(((2, 5), (2, 3), (3, 5)))
    several = ((3, 4, "GPipe", 0), (3, 4, "1F1B", 0), (p, m, "1F1B", 0), (3, 5, "another order", 1))
    for p, m, name, sooner in several:
        here = f"with {p} stages, {m} micro-batches{words} and {'the order of ' * (not sooner)}{name}, "
        orders = _gpipe(p, m) if name == "GPipe" else _one_f_one_b(p, m, sooner)
        found = launched_on_gpus(
            _on_rank, run, orders, rows(drawn), drawn.getrandbits(30), nprocs=p, like="T4", timeout=20, ask=ASK
        )
        if isinstance(found, str):  # which of the waiting ranks was the first to see it does not matter
            found = re.sub(r"^(rank \d) raised but got <class 'NoneType'> instead", rf"\1 {NO_GRADIENT}", found)
            return here + re.sub(r"^rank \d raised \S+DistBackendError: [^:]*: ", "", found)
        for rank, (order, one) in enumerate(zip(orders, found, strict=True)):
            if complaint := _complaint(order, m, *one):
                return f"{here}rank {rank} {complaint}"
    return None


def _complaint(order: list[str], m: int, returned, did: str, got: list, wanted: list[torch.Tensor]) -> str | None:
    """What is wrong on one rank. did: "FFBB", its passes as they came. got, wanted: gradients; None where there is none."""
    asked = "".join(work[0] for work in order)
    if did != asked:
        return f"does {' '.join(did) or 'nothing'}; its order says {' '.join(asked)}"
    if any(gradient is None for gradient in got):
        return "has parameters without a gradient: does backward() reach them?"
    gradient, right = (torch.cat([g.flatten() for g in gradients]) for gradients in (got, wanted))
    if gradient.isnan().any():
        return "has gradients that are nan: only the first rank's inputs are numbers, and only the last rank's targets"
    off, ratio = float((gradient - right).norm() / right.norm()), float(gradient.norm() / right.norm())
    if off > 1e-3:
        if abs(ratio - m) < 1e-2 * m:
            return f"has gradients {m} times one GPU's: the loss is the mean over the whole batch, and each micro-batch adds its own"
        return f"has other gradients than one GPU: they differ by {100 * off:.0f} %"
    if plain(returned) != (most := held(did)):
        return f"returns {returned!r}; it held {most} micro-batches at most, between their forward and their backward"
    return None


def _gpipe(p: int, m: int) -> list[list[str]]:
    return [[f"{kind}{i}" for kind in "FB" for i in range(m)] for _ in range(p)]


def _one_f_one_b(p: int, m: int, sooner: int) -> list[list[str]]:
    """sooner: so many forwards more before the first backward than 1F1B needs."""
    orders = []
    for s in range(p):
        ahead = min(p - 1 - s + sooner, m)
        turns = [work for i in range(ahead, m) for work in (f"F{i}", f"B{i - ahead}")]
        orders.append([f"F{i}" for i in range(ahead)] + turns + [f"B{i}" for i in range(m - ahead, m)])
    return orders


class _Noted(torch.autograd.Function):
    """Passes numbers and gradients through, and notes a letter for each; none for a forward that is only computed again."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, notes: list[str], seen: set[float]) -> torch.Tensor:
        ctx.notes, known = notes, x.double().sum().item()
        notes.extend("F" * (known not in seen))
        seen.add(known)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.notes.append("B")
        return gradient, None, None


class _Part(nn.Sequential):
    """A rank's layers, which note their passes."""

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers)
        self.notes: list[str] = []
        self.seen: set[float] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Noted.apply(super().forward(x), self.notes, self.seen)


def _on_rank(run: Run, orders: list[list[str]], rows: int, seed: int) -> tuple:
    """What run returned, the passes it did, its gradients, and one GPU's of the same layers."""
    on_own_gpu()
    torch.manual_seed(seed)
    rank, p = dist.get_rank(), dist.get_world_size()
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    m = len(orders[0]) // 2
    x, y = torch.randn(2, m * rows, WIDTH)
    F.mse_loss(nn.Sequential(*layers)(x), y).backward()
    own = slice(rank * LAYERS // p, (rank + 1) * LAYERS // p)
    part = _Part(*layers[own])
    wanted = [parameter.grad for parameter in part.parameters()]
    part.zero_grad()
    inputs = (x if rank == 0 else torch.full_like(x, torch.nan)).cuda()
    targets = (y if rank == p - 1 else torch.full_like(y, torch.nan)).cuda()
    returned = run(list(orders[rank]), part.cuda(), inputs.chunk(m), targets.chunk(m))
    got = [None if parameter.grad is None else parameter.grad.cpu() for parameter in part.parameters()]
    return plain(returned), "".join(part.notes), got, wanted
