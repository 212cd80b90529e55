"""What makes a check a grader (its answers are in the package's docstring), and how it runs the reader's code in other processes."""

import contextlib
import functools
import os
import re
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import virtualgpu
from virtualgpu.run.ranks import WorkerError, launch
from virtualgpu.session import suspended

LONGEST = 2000  # characters of a complaint: an error's text may have megabytes


class NotYet(AssertionError):
    """What a grader raises under CHECKS=strict where the answer is not right; the message is the complaint."""


class Skipped(NotYet, unittest.SkipTest):
    """What it raises there where it cannot run on this machine: for pytest and unittest a test that was skipped."""


def grader(check: Callable) -> Callable:
    """Turn a check that returns a complaint (or None) into one that prints it and returns whether there was none; the reader's own error
    becomes a complaint too."""

    @functools.wraps(check)
    def graded(*args, **kwargs) -> bool | None:
        state = torch.get_rng_state()
        verdict: type[NotYet] = NotYet
        try:
            complaint = check(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except Skipped as error:
            complaint, verdict = str(error), Skipped
        except BaseException as error:  # SystemExit, too
            complaint = f"your code raised {type(error).__name__}: {error}"
        finally:
            torch.set_rng_state(state)  # grading changes nothing in the cells that follow
        if complaint and len(complaint) > LONGEST:
            complaint = f"{complaint[:LONGEST]} ... ({len(complaint) - LONGEST:,} characters more)"
        if complaint and os.environ.get("CHECKS") == "strict":
            raise verdict(complaint)
        skipped = verdict is Skipped
        print(f"[{'skipped' if skipped else 'not yet'}] {complaint}" if complaint else "[passed] well done")
        return None if skipped else not complaint

    return graded


def launched(
    worker: Callable,
    *args,
    nprocs: int = 2,
    timeout: float = 20,
    ask: str = "do all ranks call the same collectives?",
) -> list | str:
    """What the ranks return, in a list; or the complaint, which ends in the question `ask` where they wait for each other."""
    try:
        return launch(worker, *args, nprocs=nprocs, timeout=timeout)
    except WorkerError as error:
        if error.rank is None:
            waits = [re.sub("stands in .*, which ", "", place) for place in error.places]
            return f"after {timeout} seconds {' and '.join(waits)}: {ask}"
        return f"rank {error.rank} {_how(error)}"


def launched_on_gpus(
    worker: Callable, *args, nprocs: int = 2, gpus: int | None = None, like: str | None = None, **options
) -> list | str:
    """As `launched`, on so many virtual GPUs, by default one a rank: the notebook's, or others for as long as it takes. Real ones are
    left alone. like: of this card in any case."""
    gpus = gpus or nprocs
    with contextlib.ExitStack() as stack:
        machine = virtualgpu.machine()
        if machine is None or len(machine.gpus) < gpus or like:
            stack.enter_context(mock.patch.dict(os.environ, HELPERS_GPUS="virtual"))
            stack.enter_context(suspended())  # the notebook's own come back, also those that play real ones
            with contextlib.redirect_stdout(None):
                stack.enter_context(virtualgpu.gpus(gpus, like=like or "T4"))
        return launched(worker, *args, nprocs=nprocs, **options)


def alone_on_t4(worker: Callable, *args, ask: str, timeout: float = 60) -> str | None:
    """What worker(*args) says in a process of its own on a virtual T4; or what went wrong there, ending in the question `ask` where
    it does not come to an end."""
    found = launched_on_gpus(worker, *args, nprocs=1, like="T4", timeout=timeout, ask=ask)
    return found.replace("rank 0", "your code") if isinstance(found, str) else found[0]


def alone(worker: Callable, *args, timeout: float = 60) -> Any:
    """What worker(*args) says in a process of its own, so that an endless loop ends with it; or what went wrong there."""
    try:
        return launch(worker, *args, nprocs=1, timeout=timeout)[0]
    except WorkerError as error:
        if error.rank is None:
            return f"after {timeout:g} seconds your code has not come to an end: is there a loop without one?"
        how = _how(error)
        return f"your code {how}" if how.startswith("raised") else f"your code's process {how}"


def _how(error: WorkerError) -> str:
    """What the rank that failed first raised, or how its process ended without a word."""
    first, *more = str(error).splitlines()
    if first.endswith("failed first:"):
        return f"raised {more[-1].strip()}"
    return first.removeprefix(f"rank {error.rank} ").removesuffix(" Its last words:").rstrip(".")


def plain(value: Any) -> Any:
    """A number of NumPy's or PyTorch's as Python's own; all else as it is."""
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError):
        return value


class Computing(TorchFunctionMode):
    """Notes where the code in this block computes what backward will go through. (Copies and single numbers do not count.)"""

    def __init__(self):
        super().__init__()
        self.places: set[str] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        node = result.grad_fn if isinstance(result, torch.Tensor) and result.numel() > 1 else None
        if node is not None and "Copy" not in node.name():
            self.places.add(str(result.device))
        return result
