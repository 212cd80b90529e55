"""The graders of notebook 04: DataParallel and DDP."""

import os
import unittest.mock
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import virtualgpu
from checks.grader import grader, launched_on_gpus
from virtualgpu.timing.clock import Span

RANKS = 3  # with two, a half would do for one by world_size


@grader
def averages(average_gradients: Callable[[nn.Module], None]) -> str | None:
    """After average_gradients(model) in each of three processes, the gradients are DDP's."""
    found = launched_on_gpus(_gradients_both_ways, average_gradients, draw(), nprocs=RANKS)
    if isinstance(found, str):
        return found
    *both, untouched = zip(*found, strict=True)
    if all(untouched):
        return "the gradients are as backward left them: was a copy averaged, and not `parameter.grad` itself?"
    return _differ(zip(*both, strict=True))


@grader
def talks_early(talk_early: Callable[[nn.Module], Callable[[], None]]) -> str | None:
    """talk_early(model) has the gradients of each step averaged once the function that it returns has been called, and sends
    most of them while backward still computes (simulated)."""
    found = launched_on_gpus(_steps_that_talk, talk_early, draw(), nprocs=RANKS)
    if isinstance(found, str):
        return found
    gradients, hidden, unwaited = zip(*found, strict=True)
    if None in gradients:
        return "talk_early should return a function, which is called after backward: what is there to wait for then?"
    for step, both in enumerate(zip(*gradients, strict=True)):
        if complaint := _differ(both):
            if unwaited[0]:
                return f"in step {step}, {complaint}: a work that all_reduce(..., async_op=True) returned was never waited for"
            sums = f"{RANKS:.2f} times" in complaint
            return f"in step {step}, {complaint}" + sums * ": is a sum left undivided?"
    if min(hidden) < 0.5:
        return f"right, but only {min(hidden):.0%} of the talking is beside backward's computing (simulated); most of it could be"
    return None


def draw() -> int:
    """A seed that nobody knows before."""
    return int.from_bytes(os.urandom(4), "little")


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()


def own_batches(count: int, seed: int) -> list:
    """This rank's (x [16, 8], y [16])."""
    numbers = torch.Generator().manual_seed(seed + dist.get_rank())
    return [
        (torch.randn(16, 8, generator=numbers).cuda(), torch.randint(4, (16,), generator=numbers).cuda())
        for _ in range(count)
    ]


def on_own_gpu() -> None:
    """In a rank: its GPU is the current one."""
    torch.cuda.set_device(dist.get_rank())


def _differ(found) -> str | None:
    """What differs in each rank's (gradients by the reader, gradients by DDP)."""
    for rank, (own, by_ddp) in enumerate(found):
        for mine, theirs in zip(own, by_ddp, strict=True):
            if mine is None or not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6):
                ratio = 0.0 if mine is None else float(mine.norm() / theirs.norm())
                return f"on rank {rank} a gradient is {ratio:.2f} times as long as DDP's"
    return None


def _gradients(model: nn.Module) -> list:
    return [None if p.grad is None else p.grad.cpu() for p in model.parameters()]


def _gradients_both_ways(average_gradients: Callable, seed: int) -> tuple[list, list, bool]:
    """Gradients by the reader and by DDP, and whether the reader's are what they were before."""
    on_own_gpu()
    ((x, y),) = own_batches(1, seed)
    model, wrapped = small_model(seed), DistributedDataParallel(small_model(seed))
    for network in (model, wrapped):
        nn.functional.cross_entropy(network(x), y).backward()
    before = _gradients(model)
    average_gradients(model)
    own = _gradients(model)
    untouched = all(a is not None and torch.equal(a, b) for a, b in zip(own, before, strict=True))
    return own, _gradients(wrapped), untouched


class _Work:
    """What all_reduce returned, and whether it has been asked for anything: to wait, for its future."""

    def __init__(self, work):
        self._work, self.asked = work, False

    def __getattr__(self, name: str):
        self.asked = True
        return getattr(self._work, name)


def _steps_that_talk(talk_early: Callable, seed: int) -> tuple[list | None, float, bool]:
    """Gradients of two steps by the reader and by DDP (None: there is nothing to call), the share of a wide model's talking that hides,
    and whether a work was never waited for."""
    on_own_gpu()
    model, wrapped = small_model(seed), DistributedDataParallel(small_model(seed))
    all_reduce, works, steps = dist.all_reduce, [], []

    def noted(*args, **kwargs):
        if (work := all_reduce(*args, **kwargs)) is not None:
            works.append(work := _Work(work))
        return work

    with unittest.mock.patch.object(dist, "all_reduce", noted):
        finish = talk_early(model)
        if not callable(finish):
            return None, 0.0, False
        for x, y in own_batches(2, seed):
            for network in (model, wrapped):
                network.zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()
            finish()
            steps.append((_gradients(model), _gradients(wrapped)))
    return steps, _hidden(talk_early), not all(work.asked for work in works)


def _hidden(talk_early: Callable) -> float:
    """The share of a wide model's communication during which this GPU computes; on shapes alone, in simulated seconds."""
    with virtualgpu.dry_run():
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
        finish, x = talk_early(model), torch.randn(4096, 2048, device="cuda")
        with virtualgpu.recording() as spans:
            model(x).sum().backward()
            finish()
            torch.cuda.synchronize()
    talking, beside, _ = hidden([span for span in spans if span.kind == "communication"], spans)
    return beside / talking if talking else 0.0


def hidden(messages: Sequence[Span], spans: Iterable[Span]) -> tuple[float, float, int]:
    """Seconds of these messages, how many of them backward computes, and how many messages there are."""
    computing = [span for span in spans if span.kind == "backward"]
    beside = sum(max(0.0, min(m.end, c.end) - max(m.start, c.start)) for m in messages for c in computing)
    return sum(message.end - message.start for message in messages), beside, len(messages)
