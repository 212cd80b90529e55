"""Utilities for the notebooks: the names that they use, imported when first used, so that some work without matplotlib."""

import importlib

_FROM = {
    "Monitor": "virtualgpu",
    "Timeline": "virtualgpu",
    "WorkerError": "virtualgpu.run.ranks",
    "dry_run": "virtualgpu",
    "forget_error": "helpers.cells",
    "gpus": "virtualgpu",
    "kinds": "virtualgpu.memory.phases",
    "launch": "virtualgpu.run.ranks",
    "other_process": "virtualgpu.session.blocks",
    "progress": "helpers.cells",
    "record": "virtualgpu.run.ranks.recorded",
    "reveal": "helpers.cells",
}
_MODULES = ("checkpoint", "data", "plots", "tuning")

__all__ = [*_FROM, *_MODULES]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"helpers.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    raise AttributeError(f"module 'helpers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
