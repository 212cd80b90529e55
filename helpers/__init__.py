"""What a reader should not have to read in a lesson. The names that notebooks use, and nothing else.

Most are imported when they are first used, so that `helpers.gpus` works without matplotlib and the rest. The two functions
whose modules are called like them are bound first: importing a module later would bind its name to the module.
"""

import importlib

from helpers.launch import launch
from helpers.progress import progress

_FROM = {
    "Monitor": "monitor",
    "Recorder": "timeline",
    "Timeline": "timeline",
    "dry_run": "virtualgpu",
    "forget_error": "oom",
    "gpus": "virtualgpu",
    "other_process": "oom",
}
_MODULES = ("checkpoint", "data", "oom", "plots", "tuning")

__all__ = [*_FROM, *_MODULES, "launch", "progress"]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"helpers.{name}")
    if name in _FROM:
        home = _FROM[name]
        return getattr(importlib.import_module(home if home == "virtualgpu" else f"helpers.{home}"), name)
    raise AttributeError(f"module 'helpers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
