"""A function in another's place."""

import functools
from collections.abc import Callable


def stand_in(function: Callable, original: Callable, *state) -> Callable:
    """function(original, *state, ...), in the original's place and by its name."""

    @functools.wraps(original, updated=())
    def replacement(*args, **kwargs):
        return function(original, *state, *args, **kwargs)

    return replacement
