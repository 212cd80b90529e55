"""What would distract in a lesson: data, plots, progress, predictions. (The virtual GPUs are `virtualgpu`, a package of its own.)"""

import importlib

from helpers.cells import forget_error, progress
from helpers.predictions import reveal  # at once: it listens to the cells that follow

__all__ = ["data", "forget_error", "plots", "progress", "reveal"]


def __getattr__(name: str):
    if name in ("data", "plots"):  # when first used: matplotlib takes half a second
        return importlib.import_module(f"helpers.{name}")
    raise AttributeError(f"module 'helpers' has no attribute {name!r}")
