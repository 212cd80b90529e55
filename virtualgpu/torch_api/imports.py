"""What is done to a module that may not be imported yet, and takes seconds to import."""

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType

from virtualgpu.torch_api.registry import Patches


def when_imported(name: str, then: Callable[[ModuleType], None], patches: Patches) -> None:
    """`then(module)` once it has been imported: now, or later, unless the patches have been taken back by then."""
    if name in sys.modules:
        then(sys.modules[name])
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    patches.undo(finder.remove)


class _Finder:
    """First of those that look for modules; acts on one name alone, and once."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self.name, self.then = name, then

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in later)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del spec.loader.exec_module
            execute(module)
            if self in sys.meta_path:
                self.remove()
                self.then(module)

        spec.loader.exec_module = exec_module
        return spec
