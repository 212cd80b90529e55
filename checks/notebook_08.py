"""The graders of notebook 08, when DDP goes wrong: a loss that is one big batch's, and who keeps the others waiting."""

import copy
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from checks.grader import alone, grader, launched_on_gpus, plain
from checks.notebook_04 import RANKS, draw, on_own_gpu

IGNORED, WORDS, LENGTH = -100, 30, 16
LENGTHS = {  # in words: of each rank, how many labels of each of its texts count
    "where texts differ in length": ((16, 16, 16, 16), (2, 2, 2, 2), (9, 1, 5, 3)),
    "where all texts have the same length": ((16, 16),) * 3,
    "where rank 1 has nothing but padding": ((16, 3), (0, 0), (7, 12)),
}
NAN = ": is anything divided by a number of labels that may be zero?"
ASK = "do all ranks call all_reduce, whatever their labels are?"


@grader
def weighs_tokens_alike(token_mean: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str | None:
    """token_mean(scores, labels), called by each of three ranks with its own tokens, is a loss whose gradients, averaged by DDP, are
    those of one big batch. Labels of -100 do not count, and a rank may have no others."""
    found = launched_on_gpus(_gradients, token_mean, draw(), nprocs=RANKS, ask=ASK)
    if isinstance(found, str):
        if calls := re.findall(r"came to (\w+) of ([\d,]+)", found):  # whichever rank was the first to see it
            return "the ranks do not call the same collectives: one is in " + ", another in ".join(
                f"{call} of {count} {'number' if count == '1' else 'numbers'}" for call, count in sorted(calls, key=str)
            )
        return found
    for rank, cases in enumerate(found):
        for words, got, wanted in cases:
            if complaint := got if isinstance(got, str) else _apart(got, wanted):
                return f"{words} {complaint.format(rank=rank)}"
    return None


def _apart(got: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """What is wrong with a gradient, beside one big batch's."""
    if got.isnan().any():
        return "the gradients are nan" + NAN
    off, ratio = float((got - wanted).norm() / wanted.norm()), float(got.norm() / wanted.norm())
    if off < 1e-3:
        return None
    if float((got / max(ratio, 1e-9) - wanted).norm() / wanted.norm()) > 1e-3:
        return "the gradients point elsewhere than those of one big batch: over whose labels is the mean?"
    times = f"the gradients are {ratio:.2f} times those of one big batch"
    if abs(ratio * RANKS - 1) < 1e-3:
        return f"{times}: DDP adds up the ranks' gradients and divides by {RANKS}; what makes up for that?"
    return f"{times}: by which number is the sum of the losses divided?"


def _gradients(token_mean: Callable, seed: int) -> list[tuple[str, torch.Tensor | str, torch.Tensor]]:
    """Of each case: its words, DDP's gradient with the reader's loss (or a complaint), and one big batch's."""
    on_own_gpu()
    numbers, found = torch.Generator().manual_seed(seed), []
    for words, lengths in LENGTHS.items():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)).cuda()
        batches = [_texts(own, numbers) for own in lengths]
        own = batches[dist.get_rank()]
        found.append((words, _with_ddp(token_mean, model, *own), _of_one_batch(model, batches)))
    return found


def _texts(lengths: tuple[int, ...], numbers: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [texts, LENGTH]; labels beyond a text's length are padding."""
    x, y = (torch.randint(WORDS, (len(lengths), LENGTH), generator=numbers) for _ in range(2))
    for labels, end in zip(y, lengths, strict=True):
        labels[end:] = IGNORED
    return x.cuda(), y.cuda()


def _flat(model: nn.Module) -> torch.Tensor:
    """Its gradient, which it no longer has then."""
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).cpu()
    model.zero_grad()
    return gradient


def _with_ddp(token_mean: Callable, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | str:
    ddp = DistributedDataParallel(model)  # it averages as long as it is there
    loss = token_mean(ddp(x).flatten(0, 1), y.flatten())
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"a tensor of {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        return f"token_mean returns {got}: one number is wanted, on which backward() can be called"
    loss.backward()
    return "the loss of rank {rank} is nan" + NAN if loss.isnan() else _flat(model)


def _of_one_batch(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    return _flat(model)


EIGHT, KEPT = 8, 6  # ranks; entries of a recorder that has begun to forget
Call = tuple[str, list[list[int]]]  # a collective's name, and the sizes of what it takes


@grader
def names_the_culprit(who_hangs: Callable[[list[dict]], int | None]) -> str | None:
    """who_hangs(traces), with the flight recorder's JSON of eight ranks: the rank that has not called what the others wait in, or called
    something else; None where all have called the same."""
    return alone(_culprits_said, who_hangs, draw(), timeout=20)


def _culprits_said(who_hangs: Callable, seed: int) -> str | None:
    for words, traces, culprit, hint in _cases(random.Random(seed)):
        try:
            found = plain(who_hangs(copy.deepcopy(traces)))
        except Exception as error:
            return f"{words} who_hangs raised {type(error).__name__}: {error}"
        if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
            return f"{words} who_hangs returned {found!r}: a rank's number is wanted, or None"
        if found != culprit:
            wanted = "nobody waits" if culprit is None else "the others wait for one rank"
            wanted = f"it is rank {culprit}" if None not in (found, culprit) else wanted
            return f"{words} who_hangs returned {found}; {wanted}{hint}"
    return None


def _cases(numbers: random.Random) -> Iterator[tuple[str, list[dict], int | None, str]]:
    """In words, traces, the culprit, and what to think of where the answer is another."""
    buckets: list[Call] = [("all_reduce", [[4160]]), ("all_reduce", [[650]])]
    steps = numbers.randrange(4, 9)
    calls: list[Call] = [*buckets * steps, ("all_reduce", [[1]])]
    for rank in (numbers.randrange(1, EIGHT), 0):
        traces = _traces(calls)
        traces[rank] = _trace(calls[:-1])
        yield "where one rank has not made the last call,", traces, rank, ""
    yield "where all have called the same,", _traces(calls), None, ""
    for rank, other in itertools.product((numbers.randrange(1, EIGHT), 0), _others(calls[-1])):
        traces = _traces(calls)
        traces[rank] = _trace([*calls[:-1], other])
        words = f"where seven ranks are in all_reduce of [[1]], and rank {rank} is in {other[0]} of {other[1]},"
        yield words, traces, rank, ": compare names and sizes, with most of the ranks"
    rank = numbers.randrange(EIGHT)
    alike = [calls[0]] * (2 * KEPT + steps)
    traces = _traces(alike, KEPT)
    traces[rank] = _trace(alike[:-1], KEPT)
    hint = ": its list is as long and looks the same, but the numbers of its calls do not"
    yield (
        f"where each trace has only the last {KEPT} calls, and one rank has not made the last one,",
        traces,
        rank,
        hint,
    )
    traces = _traces(calls[:1])
    traces[rank] = _trace([])
    yield "where one rank has called nothing yet,", traces, rank, ""


def _others(call: Call) -> list[Call]:
    return [("broadcast", call[1]), (call[0], [[2]])]


def _traces(calls: list[Call], kept: int = 2000) -> list[dict]:
    return [_trace(calls, kept) for _ in range(EIGHT)]


def _trace(calls: list[Call], kept: int = 2000) -> dict:
    """As PyTorch's recorder writes it for gloo: the last `kept` calls, the newest of which has not ended."""
    entries = [_entry(number, *call, ended=number < len(calls)) for number, call in enumerate(calls, 1)]
    counts = {"last_completed_collective": len(calls) - 1, "last_enqueued_collective": len(calls)}
    return {
        "comm_lib_version": "",
        "entries": entries[-kept:],
        "nccl_comm_state": {},
        "pg_config": {"": {"desc": "", "name": "", "ranks": str([*range(EIGHT)])}},
        "pg_status": {"1": {name: str(max(0, count)) for name, count in counts.items()}},
        "version": "2.10",
    }


def _entry(number: int, call: str, sizes: list[list[int]], ended: bool) -> dict:
    types = ["Float"] * len(sizes)
    entry: dict[str, Any] = {
        "collective_seq_id": number,
        "op_id": number,
        "record_id": number - 1,
        "p2p_seq_id": 0,
        "is_p2p": False,
    }
    entry |= {"profiling_name": f"gloo:{call}", "process_group": ["1", "undefined"], "pg_id": 1, "retired": ended}
    entry |= {"input_sizes": sizes, "output_sizes": sizes, "input_dtypes": types, "output_dtypes": types}
    entry |= {"time_created_ns": 1_764_000_000_000_000_000 + number * 1_000_000, "time_discovered_started_ns": 0}
    entry |= {"state": "scheduled", "time_discovered_completed_ns": 0, "timeout_ms": 1_800_000}
    return entry | {"thread_id": "139837256637312", "thread_name": "python"}
