"""A training step on several virtual GPUs: the engine records it (`virtualgpu/run/recorded.py`)."""

from virtualgpu.run.recorded import Recorded, record

__all__ = ["Recorded", "record"]
