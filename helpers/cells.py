"""What a cell needs beside PyTorch: a bar, and an error's frames forgotten."""

import gc
import os
import sys
import traceback
from collections.abc import Iterable


def progress(iterable: Iterable, description: str) -> Iterable:
    """tqdm's bar; none where TQDM_DISABLE is set (its notebook bar does not ask), as when outputs are compared."""
    from tqdm.auto import tqdm

    return tqdm(iterable, desc=description, disable=bool(os.environ.get("TQDM_DISABLE")))


def forget_error() -> None:
    """Free what the last uncaught error keeps alive: the local variables of every function it passed through. Python keeps it for its
    debugger (`sys.last_value` and its kind), IPython its traceback once more, and the error in the result of the last cell."""
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        _clear(vars(sys).pop(name, None))
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.InteractiveTB.tb = None
        shell.last_execution_result = None  # clearing frames is not enough: a shown frame has a copy of its variables
    gc.collect()  # frames and errors refer to each other


def _clear(error: object) -> None:
    seen = set()
    while isinstance(error, BaseException) and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
