"""Files that a dry run did not write, having no values: a checkpoint is written beside the old one and then renamed, linked or copied."""

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
        self.lock = threading.Lock()

    def warn(self, file: str | os.PathLike, stacklevel: int) -> None:
        """That it stays as it is, or is not there."""
        with self.lock:
            if not self.paths:
                for functions, stand_in in ((MOVES, self._move), (COPIES, self._copy), (REMOVALS, self._remove)):
                    for owner, name in functions:
                        self.patches.stand_in(owner, name, stand_in)
            self.paths.add(os.path.abspath(file))
        words = f"a dry run has no values to save: {os.fspath(file)} is not written"
        warnings.warn(words, stacklevel=stacklevel + 1)

    def _is_one(self, path) -> bool:
        return isinstance(path, (str, os.PathLike)) and self.machine.dry and os.path.abspath(path) in self.paths

    def _move(self, original: Callable, src, dst, *args, **kwargs):
        if not self._is_one(src) or os.path.lexists(src):
            return original(src, dst, *args, **kwargs)
        self.paths.add(os.path.abspath(dst))  # which stays as it is, too

    def _copy(self, original: Callable, src, dst, *args, **kwargs):
        if not self._is_one(src) or os.path.lexists(src):
            return original(src, dst, *args, **kwargs)
        copy = os.path.join(dst, os.path.basename(src)) if os.path.isdir(dst) else dst
        self.paths.add(os.path.abspath(copy))
        return copy

    def _remove(self, original: Callable, path, *args, **kwargs):
        if not self._is_one(path) or os.path.lexists(path):
            return original(path, *args, **kwargs)
