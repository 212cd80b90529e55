"""Numbers that threads add to memory by atomic operations: the second-level cache adds, and to one line one after the other.

All figures of an H100, PyTorch 2.11 (tests/gpu/h100_profiled.csv: backward passes of bilinear and bicubic resizing and of adaptive pools).
"""

from typing import NamedTuple

LINE = 128  # bytes
WARP = 32
# Where fewer than four threads meet at a number, a line takes a part of the time (images made twice as large beside eight times and more)
MEETING, FEW_MEET = 0.25, 0.65


class Adding(NamedTuple):
    """A way to add. line: cycles from one addition to a line to its next. warp: cycles in which a multiprocessor does one for 32 threads,
    for each line that they meet. all: cycles of a multiprocessor for each addition, where all of them are at work: what the cache bears."""

    line: float
    warp: float
    all: float

    def seconds(self, kernels, count: float, size: int, lines: float, blocks: float, apart: float) -> float:
        """Of `count` additions by threads of so many blocks, to numbers of `size` bytes in so many lines at a time. apart: how many numbers
        lie from a thread's to its neighbour's; a part of one where they meet at one."""
        processors = kernels.spec.processors
        met = max(1.0, WARP * apart * size / LINE)
        line = self.line * (1.0 if apart <= MEETING else FEW_MEET)
        cycles = max(
            count * line / max(1.0, lines),
            count * self.warp * met / WARP / min(max(1.0, blocks), processors),
            count * self.all / processors,
        )
        return kernels.took(cycles)


# red.add.f32; two numbers of 16 bits at once, where the code asks for it (fastAtomicAdd in KernelUtils.cuh); else they are compared and
# swapped until nobody came between (gpuAtomicAddNoReturn of Atomic.cuh)
SINGLE = Adding(2.6, 8.0, 0.75)
PAIRS = Adding(4.4, 8.0, 1.3)
SWAPPED = Adding(22.0, 55.0, 1.7)


def fast(tensor) -> Adding:
    """fastAtomicAdd to numbers of that tensor."""
    return PAIRS if tensor.itemsize == 2 else SINGLE


def plain(tensor) -> Adding:
    """gpuAtomicAddNoReturn to numbers of that tensor."""
    return SWAPPED if tensor.itemsize == 2 else SINGLE
