"""What makes a check a grader, and how a grader runs the reader's code in two processes."""

import contextlib
import functools
import os
import re
from collections.abc import Callable
from unittest import mock

import torch

import virtualgpu
from virtualgpu.run.ranks import WorkerError, launch
from virtualgpu.session import aside


def grader(check: Callable) -> Callable:
    """Turn a check that returns a complaint (or None) into one that prints; the reader's own error becomes a complaint too."""

    @functools.wraps(check)
    def graded(*args, **kwargs) -> None:
        state = torch.get_rng_state()
        try:
            complaint = check(*args, **kwargs)
        except Exception as error:
            complaint = f"your code raised {type(error).__name__}: {error}"
        finally:
            torch.set_rng_state(state)  # grading changes nothing in the cells that follow
        print(f"[not yet] {complaint}" if complaint else "[passed] well done")

    return graded


def launched(
    worker: Callable, *args, timeout: float = 20, ask: str = "do both ranks call the same collectives?"
) -> list | str:
    """What two ranks return, in a list; or the complaint, which ends in the question `ask` where they wait for each other."""
    try:
        return launch(worker, *args, nprocs=2, timeout=timeout)
    except WorkerError as error:
        if error.rank is None:
            waits = [re.sub("stands in .*, which ", "", place) for place in error.places]
            return f"after {timeout} seconds {' and '.join(waits)}: {ask}"
        return f"rank {error.rank} raised {str(error).splitlines()[-1]}"


def launched_on_gpus(worker: Callable, *args, **options) -> list | str:
    """As `launched`, each rank on a virtual GPU: the notebook's, or two for as long as it takes. Real ones are left alone."""
    with contextlib.ExitStack() as stack:
        machine = virtualgpu.machine()
        if machine is None or len(machine.gpus) < 2:
            stack.enter_context(mock.patch.dict(os.environ, HELPERS_GPUS="virtual"))
            stack.enter_context(aside())  # the notebook's own come back, also those that play real ones
            with contextlib.redirect_stdout(None):
                stack.enter_context(virtualgpu.gpus(2))
        return launched(worker, *args, **options)


def alone(worker: Callable, *args, timeout: float = 60) -> str | None:
    """What worker(*args) says in a process of its own, so that an endless loop ends with it; or what went wrong there."""
    try:
        return launch(worker, *args, nprocs=1, timeout=timeout)[0]
    except WorkerError as error:
        if error.rank is None:
            return f"after {timeout:g} seconds your code has not come to an end: is there a loop without one?"
        return f"your code raised {str(error).splitlines()[-1]}"
