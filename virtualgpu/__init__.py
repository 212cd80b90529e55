"""Virtual GPUs: multi-GPU PyTorch on a machine without a GPU.

    cuda0, cuda1 = gpus(2)                 # from here on, plain PyTorch
    model.to("cuda:0"); x.to("cuda:1"); torch.cuda.memory_allocated(0)

Numbers are computed on the CPU. Places, memory and time are kept account of: tensors on two devices do not mix, a GPU that is
full says so, and each has a simulated clock. `docs/contributing.md` says what is in which folder.
"""

import importlib

__version__ = "0.2.0"  # the engine's own; the series has another one (pyproject.toml)

# Found when first used: the runner and the pytest plugin do without PyTorch until a program imports it
_FROM = {
    "Monitor": "monitor",
    "SPECS": "hardware.specs",
    "Spec": "hardware.specs",
    "Timeline": "timeline",
    "WorkerError": "run.ranks",
    "dry_run": "session.blocks",
    "fit": "run.fit.cli",
    "gpus": "session",
    "kinds": "memory.snapshot",
    "launch": "run.ranks",
    "machine": "session",
    "other_process": "session.blocks",
    "record": "run.ranks.recorded",
    "recording": "session.blocks",
    "reset": "session",
    "sanitize": "session.blocks",
    "timers": "session",
}

__all__ = sorted(_FROM)


def __getattr__(name: str):
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
