"""A notebook's function in several processes: the engine starts them (`virtualgpu/run/ranks.py`)."""

from virtualgpu.run.ranks import WorkerError, launch

__all__ = ["WorkerError", "launch"]
