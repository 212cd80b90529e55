"""torch._dynamo, the front of PyTorch's compiler, imported when it is needed.

Each optimizer's step, DDP's constructor and init_process_group call it, and torchvision names it, which means nothing to a program that runs
eagerly, as all do on virtual GPUs. Its import brings FSDP, DTensor and SymPy along: 0.9 s in each process. Until something else of it is asked for, these calls are answered here.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

DYNAMO = "torch._dynamo"
SETTINGS = "torch._inductor.config"
CONFIG, UTILS, RULES = f"{DYNAMO}.config", f"{DYNAMO}.utils", f"{DYNAMO}.trace_rules"


def import_compiler() -> None:
    """Now. DDP's constructor and optimizers do, where no virtual GPUs are on; FSDP and pipelines everywhere."""
    importlib.import_module(DYNAMO)


def compiler_has_settings() -> bool:
    """Is what comes after the front there, and would be told of a setting? Its import brings all of it along, 4 s in each process."""
    return SETTINGS in sys.modules


def import_when_needed() -> Callable[[], None]:
    """From here on, unless it is there already. Returns what undoes it."""
    if DYNAMO in sys.modules:
        return lambda: None
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return finder.remove


def graph_break(msg: str = "") -> None:
    """In a program that nobody compiles there is nothing to break."""


def disable(fn: Any = None, recursive: bool = True, **options) -> Callable:
    """fn itself, for as long as nothing can be compiled."""
    if fn is None:
        return functools.partial(disable, recursive=recursive, **options)
    if not isinstance(fn, FunctionType):
        return _real(DYNAMO, "disable")(fn, recursive, **options)
    real = functools.cache(lambda: _real(DYNAMO, "disable")(fn, recursive, **options))

    @functools.wraps(fn)
    def run(*args, **kwargs):
        return (fn if _waits(DYNAMO) else real())(*args, **kwargs)

    return run


def compiled_later(fn: Callable, compile: Callable[[], Callable], runs_eagerly: Callable[[], bool]) -> Callable:
    """What torch.compile makes of a function, which is made when it is first to be compiled: never, where all runs eagerly. Many a program
    decorates what it does not call, and the decorator alone imports the whole compiler, 4 s in each process."""
    compiled = functools.cache(compile)

    @functools.wraps(fn)
    def run(*args, **kwargs):
        return (fn if runs_eagerly() else compiled())(*args, **kwargs)

    run._torchdynamo_orig_callable = fn  # type: ignore[attr-defined]
    return run


def allow_in_graph(fn: Any) -> Any:
    """einops and einx say it of their functions, when they are imported; the compiler is told when it is there."""
    if not callable(fn):  # several, or an error
        return _real(DYNAMO, "allow_in_graph")(fn)
    _allowed.append(fn)
    return fn


def inductor(module, inputs) -> Callable:
    """The compiler's backend, which torch.compile would import to ask for its settings; what runs eagerly never comes here."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs)


def get_optimize_ddp_mode() -> str:
    """DDP asks for it; settings can be changed before the rest is there."""
    if importlib.import_module(CONFIG).optimize_ddp is True:
        return "ddp_optimizer"
    return _real(UTILS, "get_optimize_ddp_mode")()


def is_compile_supported(device_type: Any) -> Any:
    """torchvision takes it at its import, for an operation that few programs call."""
    return _real(UTILS, "is_compile_supported")(device_type)


def clear_lru_cache() -> None:
    """What is not there has kept nothing."""


ANSWERS: dict[str, dict[str, Callable]] = {
    DYNAMO: {"graph_break": graph_break, "disable": disable, "allow_in_graph": allow_in_graph},
    UTILS: {"get_optimize_ddp_mode": get_optimize_ddp_mode, "is_compile_supported": is_compile_supported},
    RULES: {"clear_lru_cache": clear_lru_cache},
}


class _Waiting(ModuleType):
    """A module before its code has run, which whatever else is asked of it makes it do; from then on it is as all modules are."""

    def __getattr__(self, name: str) -> Any:
        if not _dunder(name):  # those are the importer's
            if name in ANSWERS[self.__name__] and not _loading:
                return ANSWERS[self.__name__][name]
            if f"{self.__name__}.{name}" in (CONFIG, *ANSWERS) and not _loading:
                return importlib.import_module(f"{self.__name__}.{name}")
            self.run()
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not _dunder(name) and not isinstance(value, ModuleType):  # the importer sets parts of a package
            self.run()
        ModuleType.__setattr__(self, name, value)  # not super(): the class may be another now

    def run(self) -> None:
        """The package's code, in which its parts are imported as ever. Once, and other threads wait; what that code asks for meanwhile is there
        or is not, as in any import."""
        with _lock:
            if _loading:
                return
            _loading.append(True)
            try:
                if _waits(DYNAMO):
                    _run_package(sys.modules[DYNAMO])
                if isinstance(self, _Waiting):
                    importlib.import_module(self.__name__)
            finally:
                _loading.clear()


_lock = threading.RLock()
_loading: list[bool] = []
_allowed: list[Callable] = []  # in the graphs of the compiler, to be told to it
_parts: dict[str, _Waiting] = {}  # those that waited when the package's code began


def _run_package(package: ModuleType) -> None:
    for name in ANSWERS:
        if name != DYNAMO and _waits(name):
            _parts[name] = sys.modules.pop(name)  # type: ignore[assignment]
            vars(package).pop(name.rpartition(".")[2], None)
    package.__spec__.loader.exec_module(package)  # type: ignore[union-attr]
    package.__class__ = ModuleType
    while _allowed:
        package.allow_in_graph(_allowed.pop())


class _Finder:
    """Finds what waits; and parts of the package, whose code comes before theirs."""

    def remove(self) -> None:
        """What waits still is forgotten, and the next import finds the module itself; unless there is something to tell it."""
        if _allowed:
            return
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if _waits(DYNAMO):
            vars(sys.modules["torch"]).pop(DYNAMO.rpartition(".")[2], None)
            for name in ANSWERS:
                sys.modules.pop(name, None)

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name in _parts or (name in ANSWERS and not _loading):
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, _parts.pop(name, None))
            return spec
        if name.startswith(f"{DYNAMO}.") and name != CONFIG and _waits(DYNAMO) and not _loading:
            sys.modules[DYNAMO].run()  # type: ignore[attr-defined]
            if name in sys.modules and (spec := sys.modules[name].__spec__) is not None:
                # the importer, which takes this spec, must not run it twice
                spec.loader = _Loader(spec.loader, sys.modules[name])
                return spec
        return None


class _Loader(Loader):
    """Of a new module, which waits; of a part that waited, which is executed; or of one that has been, and is what it is."""

    def __init__(self, loader, module: ModuleType | None):
        self._loader, self._module = loader, module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module or _Waiting(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        if self._module is not None and isinstance(module, _Waiting):
            setattr(module, "__class__", ModuleType)  # noqa: B010  its type, as that of no attribute
            self._loader.exec_module(module)


def _dunder(name: str) -> bool:
    return name.startswith("__")


def _waits(name: str) -> bool:
    return isinstance(sys.modules.get(name), _Waiting)


def _real(module: str, name: str) -> Any:
    if _waits(module):
        sys.modules[module].run()  # type: ignore[attr-defined]
    return getattr(importlib.import_module(module), name)
