"""How long a dry run of one rank of many takes: Llama 3.1 8B under FSDP2 on 8 and on 512 GPUs, the first step and four more.

Not a figure that others published: the target is the project's own (20 seconds and 4 GiB on a laptop). Seconds are the processor's,
measured, so that a busy machine tells the same; the peak of host memory is the whole process's, both runs and PyTorch included.
"""

import resource
import sys
import time

from tests.accuracy.llama import LLAMA3_8B, train
from tests.accuracy.row import Row

URL = "measured here"


def peak_memory() -> float:
    """The most memory that this process has had, in GiB (Linux counts in KiB, macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def rows() -> list[Row]:
    found = []
    for world_size in (8, 512):
        begin = time.process_time()
        train(LLAMA3_8B, 2, 8192, world_size, expandable=True, steps=5)
        seconds = time.process_time() - begin
        found.append(Row(f"dry run, 1 of {world_size} ranks, 5 steps: seconds of a core", "cost", "s", 20, seconds))
    return [*found, Row("its host memory", "cost", "GiB", 4, peak_memory())]
