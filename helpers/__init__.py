"""What a reader should not have to read in a lesson. The names that notebooks use, and nothing else.

Each is imported when it is first used, so that `helpers.virtual` works without matplotlib and the rest.
"""

import importlib

_FROM = {"Monitor": "monitor", "Timeline": "timeline", "progress": "progress", "gpus": "virtual", "dry_run": "virtual"}
_MODULES = ("checkpoint", "checks", "data", "plots", "virtual")

__all__ = [*_FROM, *_MODULES]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"helpers.{name}")
    if name in _FROM:
        found = getattr(importlib.import_module(f"helpers.{_FROM[name]}"), name)
        globals()[name] = found  # after the import, which binds a module of that name
        return found
    raise AttributeError(f"module 'helpers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
