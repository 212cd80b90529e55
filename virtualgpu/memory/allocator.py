"""PyTorch's caching allocator, in Python: which bytes of one GPU are allocated, which are only reserved, and when it is full.

What is modelled is the default of `c10/cuda/CUDACachingAllocator.cpp` on one stream, as its opening comment and
`c10/core/AllocatorConfig.h` describe it: requests are rounded to 512 bytes; small ones (up to 1 MiB) share segments of
2 MiB; larger ones come from segments of 20 MiB or, from 10 MiB on, of their own size rounded to 2 MiB; the smallest free
block that fits is used, and split where enough would be left over; a freed block joins its free neighbours and stays
reserved until `empty_cache`. Not modelled: expandable segments, several streams, and PYTORCH_CUDA_ALLOC_CONF.

All sizes are in bytes.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import torch

# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kRoundLarge; the default of 20 MiB
MIN_BLOCK = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment. Its neighbours in the same segment are `before` and `after`."""

    address: int
    size: int
    pool: list = field(repr=False)  # the free blocks it belongs to when it is free
    used: bool = False
    requested: int = 0  # bytes asked for, before rounding
    before: "Block | None" = field(default=None, repr=False)
    after: "Block | None" = field(default=None, repr=False)


class CachingAllocator:
    """The memory of one GPU: its `capacity`, of which this process's CUDA `context` and `others` on the GPU hold a part."""

    def __init__(self, capacity: int, device: int = 0, context: int = 0, others: int = 0):
        self.capacity, self.device, self.context, self.others = capacity, device, context, others
        self.limit = capacity  # torch.cuda.set_per_process_memory_fraction
        self.allocated = self.reserved = 0
        self.requested = 0  # as allocated, before rounding
        self.peak_allocated = self.peak_reserved = self.peak_requested = 0
        self.retries = self.ooms = 0  # num_alloc_retries and num_ooms of torch.cuda.memory_stats
        self._small: list[tuple[int, int, Block]] = []  # free blocks, by size, then by address
        self._large: list[tuple[int, int, Block]] = []
        self._next_address = ROUND_LARGE

    def malloc(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`; None for no bytes at all, as PyTorch gives a null pointer.

        Raises torch.OutOfMemoryError, in PyTorch's words, where neither free blocks nor the GPU can serve it, even after
        the cache was given back.
        """
        if nbytes == 0:
            return None
        size = round_size(nbytes)
        pool = self._small if size <= SMALL else self._large
        block = self._smallest_fitting(pool, size) or self._new_segment(pool, size)
        if self._worth_splitting(block, size):
            self._split(block, size)
        block.used, block.requested = True, nbytes
        self.allocated += block.size
        self.requested += nbytes
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back to the cache: it joins its free neighbours, and stays reserved."""
        if block is None:
            return
        assert block.used, "freed twice"
        block.used = False
        self.allocated -= block.size
        self.requested -= block.requested
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._take(other)
                block = self._join(block, other)
        insort(block.pool, (block.size, block.address, block))

    def empty_cache(self) -> int:
        """Return each segment that is wholly free to the GPU; how many bytes that were."""
        returned = 0
        for pool in (self._small, self._large):
            whole = [entry for entry in pool if entry[2].before is None and entry[2].after is None]
            pool[:] = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]
            returned += sum(size for size, _, _ in whole)
        self.reserved -= returned
        return returned

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved, self.peak_requested = self.allocated, self.reserved, self.requested

    @property
    def free_on_gpu(self) -> int:
        """What torch.cuda.mem_get_info calls free: neither reserved here nor held otherwise."""
        return self.capacity - self.others - self.context - self.reserved

    def _smallest_fitting(self, pool: list, size: int) -> Block | None:
        at = bisect_left(pool, (size,))
        return pool.pop(at)[2] if at < len(pool) else None

    def _new_segment(self, pool: list, size: int) -> Block:
        segment = segment_size(size)
        if not self._fits(segment) and self.reserved:
            self.retries += 1
            self.empty_cache()
        if not self._fits(segment):
            self.ooms += 1
            raise torch.OutOfMemoryError(self._message(segment))
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = Block(self._next_address, segment, pool)
        self._next_address += -(-segment // ROUND_LARGE) * ROUND_LARGE
        return block

    def _fits(self, segment: int) -> bool:
        return segment <= self.free_on_gpu and self.reserved + segment <= self.limit

    def _worth_splitting(self, block: Block, size: int) -> bool:
        rest = block.size - size
        return rest >= MIN_BLOCK if block.pool is self._small else rest > SMALL

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        insort(rest.pool, (rest.size, rest.address, rest))

    def _take(self, block: Block) -> None:
        """Out of the free blocks, of which it is one."""
        del block.pool[bisect_left(block.pool, (block.size, block.address))]

    @staticmethod
    def _join(one: Block, other: Block) -> Block:
        """Two free neighbours become the one with the lower address."""
        first, second = (one, other) if one.address < other.address else (other, one)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _message(self, segment: int) -> str:
        allowed = f"{format_size(self.limit)} allowed; " if self.limit < self.capacity else ""
        return (
            f"CUDA out of memory. Tried to allocate {format_size(segment)}. "
            f"GPU {self.device} has a total capacity of {format_size(self.capacity)} "
            f"of which {format_size(self.free_on_gpu)} is free. "
            f"Including non-PyTorch memory, this process has {format_size(self.reserved + self.context)} memory in use. "
            f"{allowed}Of the allocated memory {format_size(self.allocated)} is allocated by PyTorch, and "
            f"{format_size(self.reserved - self.allocated)} is reserved by PyTorch but unallocated. If reserved but "
            "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
            "fragmentation.  See documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )


def round_size(nbytes: int) -> int:
    """A request rounded up to whole 512-byte blocks."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """What is asked of the GPU when a rounded request of `size` finds no free block."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def format_size(size: int) -> str:
    """Bytes as PyTorch's message prints them."""
    if size <= 1 << 10:
        return f"{size} bytes"
    for unit, power in (("KiB", 10), ("MiB", 20)):
        if size <= 1 << (power + 10):
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size / (1 << 30):.2f} GiB"
