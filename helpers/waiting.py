"""A bar while something takes its time."""

import os
from collections.abc import Iterable


def progress(iterable: Iterable, description: str) -> Iterable:
    """tqdm's bar; none where TQDM_DISABLE is set (its notebook bar does not ask), as when outputs are compared."""
    from tqdm.auto import tqdm

    return tqdm(iterable, desc=description, disable=bool(os.environ.get("TQDM_DISABLE")))
