"""While `fit` and `--explain` run: how far they are. A line on a terminal, or in a notebook's cell; gone at the end."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def line() -> Iterator[Callable[[str], None]]:
    """What to call with the words that stand there now. Nothing is shown where TQDM_DISABLE is set, or nobody looks on."""
    if os.environ.get("TQDM_DISABLE"):
        yield lambda words: None
    elif sys.stderr is not None and sys.stderr.isatty():

        def show(words: str) -> None:
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

        try:
            yield show
        finally:
            show("")
    elif (shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) and hasattr(shell, "kernel"):
        from IPython.display import display

        shown = display({"text/plain": ""}, raw=True, display_id=True)
        try:
            yield lambda words: shown.update({"text/plain": words}, raw=True)
        finally:
            shown.update({"text/plain": ""}, raw=True)
    else:
        yield lambda words: None
