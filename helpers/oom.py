"""What lesson 06 needs beside PyTorch: an error's frames forgotten."""

import gc
import sys
import traceback


def forget_error() -> None:
    """Free what the last uncaught error keeps alive: the local variables of every function it passed through.

    Python keeps such an error for its debugger (`sys.last_value` and its kind), IPython keeps its traceback once more, and the error
    itself in the result of the cell that ran last.
    """
    for name in ("last_exc", "last_value"):
        _clear(getattr(sys, name, None))
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        vars(sys).pop(name, None)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.InteractiveTB.tb = None
        shell.last_execution_result = None  # clearing frames is not enough: a shown frame has a copy of its variables
    gc.collect()  # frames and errors refer to each other


def _clear(error: BaseException | None) -> None:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
