"""Files that a dry run did not write, having no values: a checkpoint is written beside the old one and then renamed, linked or copied.

What a program opened itself is there, and empty: it may go to a new name, but not in the place of what is there already.
"""

import os
import shutil
import threading
import warnings
from collections.abc import Callable

from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches

MOVES = [(os, "replace"), (os, "rename")]
COPIES = [(os, "link"), (shutil, "copyfile"), (shutil, "copy"), (shutil, "copy2")]
REMOVALS = [(os, "remove"), (os, "unlink")]


class Unwritten:
    """Their names. From the first on, functions of `os` and `shutil` know them; all others have no stand-in."""

    def __init__(self, machine: Machine, patches: Patches):
        self.machine, self.patches = machine, patches
        self.paths: set[str] = set()
        self.empty: set[str] = set()  # those of them that a program opened
        self.lock = threading.Lock()

    def warn(self, file: str | os.PathLike, stacklevel: int, is_open: bool = False) -> None:
        """That it stays as it is, or is not there; or, where the program opened it, that it is left empty."""
        with self.lock:
            if not self.paths:
                for functions, stand_in in ((MOVES, self._move), (COPIES, self._copy), (REMOVALS, self._remove)):
                    for owner, name in functions:
                        self.patches.stand_in(owner, name, stand_in)
            self.paths.add(os.path.abspath(file))
            if is_open:
                self.empty.add(os.path.abspath(file))
        state = "is left empty" if is_open else "is not written"
        words = f"a dry run has no values to save: {os.fspath(file)} {state}"
        warnings.warn(words, stacklevel=stacklevel + 1)

    def _is_one(self, path) -> bool:
        return isinstance(path, (str, os.PathLike)) and self.machine.dry and os.path.abspath(path) in self.paths

    def _is_left_empty(self, path) -> bool:
        return os.path.abspath(path) in self.empty and os.path.isfile(path) and not os.path.getsize(path)

    def _move(self, original: Callable, src, dst, *args, **kwargs):
        empty = self._is_one(src) and self._is_left_empty(src)
        if not self._is_one(src) or (os.path.lexists(src) and not empty):
            return original(src, dst, *args, **kwargs)
        self.paths.add(os.path.abspath(dst))  # which stays as it is, too, or is new and empty
        if empty and os.path.lexists(dst):
            os.remove(src)
        elif empty:
            self.empty.add(os.path.abspath(dst))
            return original(src, dst, *args, **kwargs)

    def _copy(self, original: Callable, src, dst, *args, **kwargs):
        copy = os.path.join(dst, os.path.basename(src)) if os.path.isdir(dst) else dst
        keeps = self._is_one(src) and self._is_left_empty(src) and os.path.lexists(copy)
        if not keeps and (not self._is_one(src) or os.path.lexists(src)):
            return original(src, dst, *args, **kwargs)
        self.paths.add(os.path.abspath(copy))
        return copy

    def _remove(self, original: Callable, path, *args, **kwargs):
        if not self._is_one(path) or os.path.lexists(path):
            return original(path, *args, **kwargs)
