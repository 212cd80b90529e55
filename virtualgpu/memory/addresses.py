"""Where segments lie: the addresses that cudaMalloc gives, by which the allocator chooses among free blocks of one size.

A new range lies below all others; one that was given back is taken again from its lowest address on. So it is on a real
GPU, as far as blocks tell: sharding a fresh model of 12 blocks by FSDP2 leaves 91,563,008 bytes on rank 0 of 8 with new
segments of 20 MiB each below the last, and 97,068,032 with each above it (which is so in a process that gave segments
back before). Measured on an H100, PyTorch 2.11, driver 580, 2026-11-26.
"""

from bisect import bisect_left, insort

from virtualgpu.memory.blocks import DEVICE_BITS, ROUND_LARGE


class Addresses:
    """One GPU's, in bytes, each a multiple of 2 MiB."""

    def __init__(self, device: int):
        self.device = device
        self.lowest = (device + 1 << DEVICE_BITS) + ROUND_LARGE
        self.holes: list[tuple[int, int]] = []  # (first, end) of what was given back, no two of them side by side

    def take(self, size: int) -> int:
        """The first of `size` addresses."""
        size = -(-size // ROUND_LARGE) * ROUND_LARGE
        for index, (first, end) in enumerate(self.holes):
            if end - first >= size:
                self.holes[index : index + 1] = [(first + size, end)] if end - first > size else []
                return first
        self.lowest -= size
        return self.lowest

    def give_back(self, first: int, size: int) -> None:
        """What `take` gave for so many."""
        end = first - (-size // ROUND_LARGE) * ROUND_LARGE
        index = bisect_left(self.holes, (first, end))
        if index < len(self.holes) and self.holes[index][0] == end:
            end = self.holes.pop(index)[1]
        if index and self.holes[index - 1][1] == first:
            first = self.holes.pop(index - 1)[0]
        insort(self.holes, (first, end))
