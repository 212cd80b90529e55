"""Replace attributes of other modules, also of those that are not imported yet, and put each one back."""

import functools
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from virtualgpu.environment import UnsupportedPyTorch

# -- Replace attributes of other modules, and put each one back.

MISSING = object()


class Patches:
    """What was replaced, in order. An attribute that the owner only inherited is removed again, not copied into it.

    `add` is for what a wheel without CUDA lacks (test_surface.py notices any other name that is not there); `replace` demands that there
    is something to replace. What stands in for a function is made of it by `wrap`, or calls it (`stand_in`).
    """

    def __init__(self):
        self.replaced: list[tuple[Any, str, Any, Any]] = []
        self.others: list[Callable[[], object]] = []
        self.everywhere: list[tuple[str, Any, Any]] = []  # (name, original, stand-in)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Raises UnsupportedPyTorch where there is nothing of that name."""
        if not hasattr(owner, name):
            where = getattr(owner, "__name__", type(owner).__name__)
            raise UnsupportedPyTorch(f"has no {where}.{name}, in whose place they work")
        self.add(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """As `replace`, by wrapper(what is there)."""
        self.replace(owner, name, wrapper(getattr(owner, name, None)))

    def stand_in(self, owner: Any, name: str, function: Callable, *bound: Any) -> None:
        """As `replace`, by what calls function(*bound, original, ...) and passes for the original."""
        self.wrap(owner, name, lambda original: standing_in(original, function, *bound))

    def stand_in_everywhere(self, owner: Any, name: str, function: Callable, *bound: Any) -> None:
        """As `stand_in`, in the way of `replace_everywhere`."""
        self.replace_everywhere(owner, name, standing_in(getattr(owner, name), function, *bound))

    def stand_in_builtin(self, owners: Sequence[Any], name: str, function: Callable, *bound: Any) -> None:
        """As `stand_in`, by one function in all owners, for which TorchScript knows the builtin aten::name."""
        from virtualgpu import _compat

        value = standing_in(getattr(owners[0], name), function, *bound)
        self.undo(_compat.register_as_builtin(value, f"aten::{name}"))
        for owner in owners:
            self.replace(owner, name, value)

    def replace_everywhere(self, owner: Any, name: str, value: Any) -> None:
        """Also, from `spread` on, in modules that have imported it by name: those of torch, and a notebook."""
        self.everywhere.append((name, getattr(owner, name), value))
        self.replace(owner, name, value)

    def spread(self) -> None:
        """One walk through all modules for all of them: there are thousands."""
        exchange(self.everywhere)

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Whether there is something of that name or not; `restore` removes what was not there."""
        self.replaced.append((owner, name, vars(owner).get(name, MISSING), value))  # first: Ctrl-C may come between
        setattr(owner, name, value)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """A variable, which others may change meanwhile; it gets its old value back all the same."""
        before = getattr(owner, name)
        self.undo(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def undo(self, step: Callable[[], object]) -> None:
        """Something else that was done, and how to take it back."""
        self.others.append(step)

    def restore(self) -> None:
        """What somebody else has replaced meanwhile stays theirs. Cut short by Ctrl-C, it can be called again."""
        while self.others:
            try:
                self.others[-1]()
            except Exception:
                self.others.pop()
                raise
            self.others.pop()
        while self.replaced:
            owner, name, original, value = self.replaced[-1]
            now = vars(owner).get(name, MISSING)
            if now is value:
                if original is MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
            elif now is not original:
                where = getattr(owner, "__name__", type(owner).__name__)
                warnings.warn(f"{where}.{name} was replaced while virtual GPUs were on, and is left so", stacklevel=2)
            self.replaced.pop()
        # modules that have imported a stand-in by name meanwhile, too
        exchange([(name, value, original) for name, original, value in reversed(self.everywhere)])
        self.everywhere.clear()


def standing_in(original: Callable, function: Callable, *bound: Any) -> Callable:
    """What calls function(*bound, original, ...), with the name, the signature and the documentation of the original."""

    @functools.wraps(original)
    def stand_in(*args, **kwargs):
        __tracebackhide__ = True
        return function(*bound, original, *args, **kwargs)

    return stand_in


def exchange(values: list[tuple[str, Any, Any]]) -> None:
    """(name, old, new): in every module in which that name is the old value, it is the new one from now on; in a program by any name."""
    known, news = {name for name, _, _ in values}, {id(old): new for _, old, new in values}
    for main in (sys.modules.get(name) for name in ("__main__", "__mp_main__") if known):
        for name, value in list(vars(main).items()) if main is not None else ():
            if id(value) in news:
                setattr(main, name, news[id(value)])
    for module in list(sys.modules.values()) if known else ():
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and (there := names.keys() & known):  # in this order: it walks through ours
            for name, old, new in values:
                if name in there and names[name] is old:
                    setattr(module, name, new)


# -- What is done to a module that may not be imported yet, and takes seconds to import.


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
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                self.remove()
                self.then(module)

        loader.exec_module = exec_module
        return spec
