"""What an allocator's memory is made of: blocks, the lists of free ones, their addresses, and the sizes that PyTorch
rounds to. Sizes and addresses are in bytes.

Sources: c10/core/AllocatorConfig.h (the constants), c10/cuda/CUDACachingAllocator.cpp.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

MIN_BLOCK = 512  # kMinBlockSize
SMALL = 1 << 20  # kSmallSize: the largest request that counts as small
SMALL_SEGMENT = 2 << 20  # kSmallBuffer: what small blocks share
LARGE_SEGMENT = 20 << 20  # the default of large_segment_size
MIN_LARGE = 10 << 20  # kMinLargeAlloc: from here on a request gets a segment of its own size
ROUND_LARGE = 2 << 20  # kRoundLarge

ADDRESS_BITS = 56  # of the key by which free blocks are sorted: its size, then its address
DEVICE_BITS = 48  # a GPU's addresses go down from (its index + 1) << 48: no tool takes one GPU's for another's


class Timeline:
    """What the allocator asks about time, in seconds: blocks that a stream still uses are not free yet. Here all is done
    at once; a GPU's own knows what its streams are given."""

    def now(self) -> float:
        """As the host sees it."""
        return 0.0

    def ready(self, stream: int) -> float:
        """When the stream is done with all that is queued on it so far."""
        return 0.0

    def wait_until(self, moment: float) -> None:
        """The host waits."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment. Its neighbours in the same segment are `prev` and `next`.

    used: somebody has it, or streams still work on it (`waiting`). requested: bytes asked for, before rounding.
    streams: other streams that use it, by record_stream. mapped: has memory behind it; an expandable segment has pieces
    that do not.
    """

    address: int
    size: int
    free_list: "FreeList"
    prev: "Block | None"
    next: "Block | None"
    used: bool = field(default=False, init=False)
    requested: int = field(default=0, init=False)
    streams: set[int] | None = field(default=None, init=False)
    waiting: bool = field(default=False, init=False)
    mapped: bool = field(default=True, init=False)
    segment: tuple[int, int] | None = field(default=None, init=False)  # of an expandable segment: its address and page
    context: tuple | None = field(default=None, init=False)  # where it was allocated, if that is recorded
    segment_context: tuple | None = field(default=None, init=False)  # and its segment
    mark: int = field(default=0, init=False)  # the pool's count of searches when it became free
    accesses: Any = field(default=None, init=False)  # who used it, while races are looked for (virtualgpu.sanitizer)

    @property
    def stream(self) -> int:
        """The stream that it was allocated on."""
        return self.free_list.stream

    @property
    def whole(self) -> bool:
        """Is it a segment by itself?"""
        return self.prev is None and self.next is None

    def split(self, size: int) -> "Block":
        """What is left of it after its first `size` bytes, as a block of its own."""
        rest = Block(self.address + size, self.size - size, self.free_list, self, self.next)
        rest.segment = self.segment
        if rest.next is not None:
            rest.next.prev = rest
        self.size, self.next = size, rest
        return rest

    def join(self) -> None:
        """The block behind it becomes part of it."""
        joined = self.next
        assert joined is not None
        self.size += joined.size
        self.next = joined.next
        if self.next is not None:
            self.next.prev = self


class FreeList:
    """The free blocks of one stream in one pool, the smallest first; of equal size, the one with the lowest address.

    `keys` and `blocks` run in parallel: a list of plain numbers is found through faster. min_remainder: as much is left
    with a block rather than split off.
    """

    def __init__(self, pool: "BlockPool", stream: int):
        self.pool, self.stream = pool, stream
        self.min_remainder: float = 0 if pool.small else SMALL
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.spare: list[Block] = []  # that were joined to others, to be used again
        self.unmapped: list[Block] = []  # of expandable segments, by address

    def at_least(self, size: int) -> int:
        """The place of the smallest block of at least that size; the length of the list where there is none."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def insert(self, block: Block) -> None:
        """Sorted in, and marked with the pool's count of searches, by which garbage collection knows its age."""
        if not block.mapped:
            insort(self.unmapped, block, key=lambda other: other.address)
            return
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)
        block.mark = self.pool.searches

    def remove(self, block: Block) -> None:
        """Take out a block that is in the list; it is found by its size and address."""
        if not block.mapped:
            self.unmapped.remove(block)
            return
        index = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[index], self.blocks[index]

    def pop(self, index: int) -> Block:
        """Take out the block at that place (see `at_least`), and return it."""
        del self.keys[index]
        return self.blocks.pop(index)


class BlockPool:
    """The small blocks of a GPU, or the large ones. searches: how often it was searched while garbage collection was
    on."""

    def __init__(self, small: bool, counts):
        self.small, self.counts, self.searches = small, counts, 0
        self.lists: dict[int, FreeList] = {}  # by stream

    def free_list(self, stream: int) -> FreeList:
        """Of that stream."""
        if stream not in self.lists:
            self.lists[stream] = FreeList(self, stream)
        return self.lists[stream]

    def free_blocks(self) -> list[Block]:
        """As PyTorch's set holds them: by stream, then size, then address."""
        return [block for stream in sorted(self.lists) for block in self.lists[stream].blocks]


def round_size(nbytes: int) -> int:
    """A request rounded up to whole 512-byte blocks."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def allocation_size(size: int, large_segment: int = LARGE_SEGMENT) -> int:
    """What is asked of the GPU when a rounded request of `size` finds no free block."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return large_segment
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def format_size(size: int) -> str:
    """Bytes as PyTorch's message prints them."""
    if size <= 1 << 10:
        return f"{size} bytes"
    for unit, power in (("KiB", 10), ("MiB", 20)):
        if size <= 1 << (power + 10):
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size / (1 << 30):.2f} GiB"


class Addresses:
    """Where one GPU's segments lie, each at a multiple of 2 MiB: what cudaMalloc gives, by which the allocator chooses
    among free blocks of one size.

    A new range lies below all others; one that was given back is taken again from its lowest address on. So it is on a
    real GPU, as far as blocks tell: sharding a fresh model of 12 blocks by FSDP2 leaves 91,563,008 bytes on rank 0 of 8
    with new segments of 20 MiB each below the last, and 97,068,032 with each above it (which is so in a process that
    gave segments back before). Measured on an H100, PyTorch 2.11, driver 580, 2026-11-26.
    """

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
