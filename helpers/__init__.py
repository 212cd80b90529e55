"""What a reader should not have to read in a lesson. The names that notebooks use, and nothing else."""

from helpers import checkpoint, checks, data, plots
from helpers.monitor import Monitor
from helpers.progress import progress

__all__ = ["Monitor", "checkpoint", "checks", "data", "plots", "progress"]
