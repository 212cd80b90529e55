"""What malloc and free ask besides while something special is on: streams that share blocks, settings, who listens, where calls come from.

The order of things is that of DeviceCachingAllocator::malloc, alloc_found_block, free and free_block
(CUDACachingAllocator.cpp).
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

import torch

from virtualgpu.memory.blocks import (
    ADDRESS_BITS,
    SMALL,
    Block,
    FreeList,
    Timeline,
    Untimed,
    allocation_size,
    format_size,
    round_size,
)
from virtualgpu.memory.config import Config
from virtualgpu.memory.expandable import get_free_block
from virtualgpu.memory.segments import Segments
from virtualgpu.memory.statistics import BLOCKS, SPLITS


class SpecialCases(Segments):
    """Of a `CachingAllocator`. special: something is on that its malloc and free ask for here."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self._waiting: list[tuple[float, int, Block]] = []  # freed, and used by other streams until that moment
        self._waited = 0
        self._shared = self._recorded = False  # some block was used by another stream, or knows where it was made
        self._choose_way()

    # -- within malloc

    def _begin(self, nbytes: int) -> int:
        """The size that is looked for."""
        self._context = self.history.gather() if self.history is not None else None
        if self._waiting:
            self._process_events(self.timeline.now())
        return self.config.round_size(nbytes)

    def _get_free_block(self, free: FreeList, size: int) -> Block | None:
        """A free block, out of its list."""
        if self.collects_garbage:
            free.pool.searches += 1
        return get_free_block(free, size, self.config)

    def _least_rest(self, free: FreeList, size: int) -> float:
        """A block is split where more than so many bytes are left over."""
        if free.pool.small or self.config.expandable_segments:
            return 0
        return free.min_remainder if size < self.config.max_split_size else math.inf

    def _note_used(self, block: Block) -> None:
        block.context, self._context = self._context, None
        if self._waiting:
            self.statistics.note_active()
        if block.size >= self.config.max_split_size:
            self.statistics.oversize_allocations.increase(1)
        if self.history is not None or self.listeners:
            self.tell("alloc", block.address, block.requested, block.stream, block.context, block)

    # -- within free

    def _insert_events(self, block: Block, ends: dict[int, float] | None, context) -> bool:
        """A free was asked for: does the block have to wait for streams?"""
        assert not block.waiting, "freed twice"
        if self.history is not None:
            self._context = context if context is not None else self.history.gather(freeing=True)
        if self.history is not None or self.listeners:
            origin = self._context or block.context
            self.tell("free_requested", block.address, block.requested, block.stream, origin, block)
        if block.size >= self.config.max_split_size:
            self.statistics.oversize_allocations.decrease(1)
        if not block.streams:
            return False
        if ends is None:
            ends = {stream: self.timeline.ready(stream) for stream in block.streams}
        block.waiting, block.streams = True, None
        waiting = block.free_list.pool.counts.waiting
        waiting[0] += 1
        waiting[1] += block.size
        self._waited += 1
        insort(self._waiting, (max(ends.values()), self._waited, block))
        self._context = None
        return True

    def _note_free(self, block: Block, waited: bool) -> None:
        if self.history is not None or self.listeners:
            context = self._context or block.context
            self.tell("free_completed", block.address, block.requested, block.stream, context, block)
        block.context = None
        if not waited:  # otherwise who waits goes on, and has called from elsewhere
            self._context = None

    def free(self, block: Block | None, *, waited: bool) -> None:
        """`CachingAllocator.free`."""
        raise NotImplementedError

    # -- what is on

    def record_stream(self, block: Block | None, stream: int) -> None:
        """`stream` uses the block too: when it is freed, it waits until that stream has come past the moment of the
        free."""
        if block is not None and stream != block.free_list.stream:
            block.streams = {stream, *(block.streams or ())}
            self._shared = True
            self._choose_way()

    def empty_cache(self) -> int:
        """Return each segment that is wholly free to the GPU; how many bytes that were."""
        before = self.reserved
        if self.history is not None:
            self._context = self.history.gather(freeing=True)
        self.release_cached_blocks()
        self._context = None
        return before - self.reserved

    def configure(self, config: Config) -> None:
        """Other settings from now on, as torch.cuda.memory._set_allocator_settings does; memory_fraction counts only at
        the start."""
        self.config = config
        self._choose_way()

    def watch(self, listener, on: bool = True) -> None:
        """Let `listener` hear of all events, or no more; see `tell`."""
        if on:
            self.listeners = [*(self.listeners or ()), listener]
        else:
            self.listeners = [other for other in self.listeners or () if other != listener] or None
        self._choose_way()

    def record(self, history) -> None:
        """Let a `History` write down what happens, or None."""
        self.history = history
        self._recorded = self._recorded or history is not None
        self._choose_way()

    def _choose_way(self) -> None:
        """Is anything on that malloc and free ask for here?"""
        self.special = bool(
            self._shared
            or self._waiting
            or self._recorded
            or self.listeners
            or self.expandable
            or self.collects_garbage
            or not self.config.plain
        )

    def _free_list(self, size: int, stream: int) -> FreeList:
        pool = self.pools[size > SMALL]
        if stream not in pool.lists:
            pool.lists[stream] = FreeList(pool, stream)
        return pool.lists[stream]

    def _process_events(self, now: float) -> None:
        """The blocks that waited until now, or less long, are free."""
        while self._waiting and self._waiting[0][0] <= now:
            block = self._waiting.pop(0)[2]
            counts = block.free_list.pool.counts
            counts.waiting[0] -= 1
            counts.waiting[1] -= block.size
            block.waiting = False
            self.free(block, waited=True)

    def _synchronize_and_free_events(self) -> None:
        if self._waiting:
            self.timeline.wait_until(self._waiting[-1][0])
            self._process_events(self._waiting[-1][0])


# -- PyTorch's caching allocator, in Python: which bytes of one GPU are allocated, which are only reserved, and when it is
# full.
#
# What is modelled is `c10/cuda/CUDACachingAllocator.cpp`: requests are rounded to 512 bytes; small ones (up to 1 MiB)
# share segments of 2 MiB; larger ones come from segments of 20 MiB or, from 10 MiB on, of their own size rounded to 2
# MiB; the smallest free block of the same stream that fits is used, and split where enough would be left over; a freed
# block joins its free neighbours and stays reserved until `empty_cache`, or until memory runs out. A block that other
# streams use is free when they are done. Not modelled: the pools of CUDA graphs.
#
# `malloc` and `free` are written out for speed. special.py has what they ask besides while something special is on
# (streams that share blocks, settings, a recorded history). blocks.py, segments.py, expandable.py: what they work with;
# statistics.py: the figures; history.py: what happened. All sizes are in bytes, times in seconds.


__all__ = ["Block", "CachingAllocator", "Timeline", "Untimed", "format_size", "round_size"]


class CachingAllocator(SpecialCases):
    """The memory of one GPU. For the arguments see `Segments`; not safe among threads, so its owner holds a lock."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self._small, self._large = (pool.lists for pool in self.pools)

    # -- figures

    @property
    def allocated(self) -> int:
        """torch.cuda.memory_allocated: bytes of the blocks that somebody has, as rounded."""
        return self.statistics.now(1)

    @property
    def peak_allocated(self) -> int:
        """torch.cuda.max_memory_allocated, in bytes: since the start, or `reset_peaks`."""
        return self.statistics.peak_of(1)

    @property
    def peak_reserved(self) -> int:
        """torch.cuda.max_memory_reserved, in bytes: since the start, or `reset_peaks`."""
        return self.statistics.reserved_bytes.peak

    # -- malloc and free

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """A block of at least `nbytes` for use on `stream`; None for no bytes at all, as PyTorch gives a null pointer.

        Raises torch.OutOfMemoryError, in PyTorch's words, where neither free blocks nor the GPU can serve it, even
        after the cache was given back.
        """
        if not nbytes:
            return None
        special = self.special
        size = self._begin(nbytes) if special else (nbytes + 511) & -512
        try:
            free = (self._small if size <= SMALL else self._large)[stream]
        except KeyError:
            free = self._free_list(size, stream)
        keys = free.keys
        if special:
            block = self._get_free_block(free, size) or self._grow(free, size)
            least = self._least_rest(free, size)
        else:
            index = bisect_left(keys, size << ADDRESS_BITS)
            if index < len(keys):
                del keys[index]
                block = free.blocks.pop(index)
            else:
                block = self._grow(free, size)
            least = free.min_remainder
        # 0, 1, 2: blocks, their bytes, those asked for; 3, 4: free pieces of segments, their bytes (see statistics.py)
        total, next_peak = free.total, free.next_peak
        rest = block.size - size
        after = block.next
        whole = after is None and block.prev is None
        if rest > least:
            block.size = size
            address = block.address + size
            if free.free_objects:
                piece = free.free_objects.pop()
                piece.address = address
                piece.size = rest
                piece.prev = block
                piece.next = after
            else:
                piece = Block(address, rest, free, block, after)
            block.next = piece
            if after is not None:
                after.prev = piece
            key = rest << ADDRESS_BITS | address
            index = bisect_left(keys, key)
            keys.insert(index, key)
            free.blocks.insert(index, piece)
            if special:
                piece.segment, piece.mark = block.segment, free.pool.searches
            if block.segment is not None:  # PyTorch leaves expandable ones out of the last two figures
                pass
            elif whole:
                total[3] += 1
                total[4] += rest
                if total[3] > next_peak[3] or total[4] > next_peak[4]:
                    self.statistics.note_peaks(SPLITS)
            else:
                next_peak[4] += size
        else:
            size = block.size
            if not whole and block.segment is None:
                next_peak[3] += 1
                next_peak[4] += size
        block.used, block.requested = True, nbytes
        total[0] += 1
        total[1] += size
        total[2] += nbytes
        if total[0] > next_peak[0] or total[1] > next_peak[1] or total[2] > next_peak[2]:
            self.statistics.note_peaks(BLOCKS)
        if special:
            self._note_used(block)
        return block

    def free(
        self, block: Block | None, ends: dict[int, float] | None = None, context=None, waited: bool = False
    ) -> None:
        """Give a block back to the cache: it joins its free neighbours, and stays reserved.

        A block that other streams use (`record_stream`) waits for them first: `ends` says when each is done with it, as
        it was at the moment of the free; by default that is now. context: where the free was asked for
        (`history.gather`); by default here. waited: it has waited for them, and is free now.
        """
        if block is None:
            return
        assert block.used, "freed twice"
        free, size, special = block.free_list, block.size, self.special
        before, after = block.prev, block.next
        keys, blocks, next_peak = free.keys, free.blocks, free.next_peak
        if not waited:
            next_peak[0] += 1
            next_peak[1] += size
        if special:
            if not waited and self._insert_events(block, ends, context):
                return
            self._note_free(block, waited)
        block.used = False
        next_peak[2] += block.requested
        joined_size, joined = size, 0
        if before is not None and not before.used and before.mapped:
            index = bisect_left(keys, before.size << ADDRESS_BITS | before.address)
            del keys[index], blocks[index]
            before.size = joined_size = size + before.size
            before.next = after
            if after is not None:
                after.prev = before
            block, before, joined = before, before.prev, 1
        if after is not None and not after.used and after.mapped:
            index = bisect_left(keys, after.size << ADDRESS_BITS | after.address)
            del keys[index], blocks[index]
            block.size = joined_size = joined_size + after.size
            if not special:
                free.free_objects.append(after)
            block.next = after = after.next
            if after is not None:
                after.prev = block
            joined += 1
        key = joined_size << ADDRESS_BITS | block.address
        index = bisect_left(keys, key)
        keys.insert(index, key)
        blocks.insert(index, block)
        if special:
            block.mark = free.pool.searches
            if block.segment is not None:
                return
        if before is None and after is None:
            next_peak[3] += joined
            next_peak[4] += joined_size - size
        else:
            total = free.total
            total[4] += size
            if not joined:
                total[3] += 1
            elif joined == 2:
                next_peak[3] += 1
            if total[3] > next_peak[3] or total[4] > next_peak[4]:
                self.statistics.note_peaks(SPLITS)

    def lend(self, nbytes: int, stream: int = 0) -> None:
        """`malloc` and `free` at once: memory for the length of one call. Raises torch.OutOfMemoryError as malloc does.

        Where a free block serves and no peak is new, nothing changes but the counts of what came and went.
        """
        size = (nbytes + 511) & -512
        free = None if self.special else (self._small if size <= SMALL else self._large).get(stream)
        if free is not None and nbytes:
            index = bisect_left(free.keys, size << ADDRESS_BITS)
            if index < len(free.keys):
                total, next_peak, block = free.total, free.next_peak, free.blocks[index]
                rest = block.size - size
                if rest <= free.min_remainder:
                    size, rest = block.size, 0
                # a whole segment leaves a piece where it is split; of a piece, there is one less or a smaller one
                is_segment = block.prev is None and block.next is None
                pieces, left = (rest > 0, rest) if is_segment else (not rest, size)
                if (
                    total[0] < next_peak[0]
                    and total[1] + size <= next_peak[1]
                    and total[2] + nbytes <= next_peak[2]
                    and (not is_segment or (total[3] + pieces <= next_peak[3] and total[4] + rest <= next_peak[4]))
                ) or not self.statistics.is_peak(free.pool.counts, size, nbytes, is_segment and pieces, rest):
                    total[0] += 1
                    next_peak[0] += 1
                    total[1] += size
                    next_peak[1] += size
                    total[2] += nbytes
                    next_peak[2] += nbytes
                    total[3] += pieces
                    next_peak[3] += pieces
                    total[4] += left
                    next_peak[4] += left
                    return
        self.free(self.malloc(nbytes, stream))

    def require(self, nbytes: int | Iterable[int], stream: int = 0) -> None:
        """Raises torch.OutOfMemoryError where `malloc` of so much, or of these sizes one after the other, would.

        What malloc would give back to make room is given back; nothing is taken, and it is no malloc in the figures. A
        failure is one, with all that belongs to it.
        """
        if isinstance(nbytes, int):
            size = self.config.round_size(nbytes)
            if not self.special:
                free = (self._small if size <= SMALL else self._large).get(stream)
                if free is not None and free.at_least(size) < len(free.keys):
                    return
            if nbytes and not self.fits(self._most_taken(size)):
                self._try([nbytes], stream)
        else:
            sizes = [size for size in nbytes if size]
            if not self.fits(sum(self._most_taken(self.config.round_size(size)) for size in sizes)):
                self._try(sizes, stream)

    def _most_taken(self, size: int) -> int:
        """No more than this is taken from the GPU for a rounded request."""
        segment = allocation_size(size, self.config.large_segment)
        if self.config.expandable_segments:
            page = self.expandable.page(self.pools[size > SMALL])
            return -(-segment // page) * page
        return segment

    def _try(self, sizes: list[int], stream: int) -> None:
        """Allocate all of it, and take that back."""
        blocks: list[Block] = []
        before, self.silent = self.silent, True
        try:
            for size in sizes:
                block = self.malloc(size, stream)
                if block is not None:
                    blocks.append(block)
        except torch.OutOfMemoryError:
            for block in blocks:
                self.free(block)
            raise
        else:
            for block in reversed(blocks):
                total, next_peak, size, requested = (
                    block.free_list.total,
                    block.free_list.next_peak,
                    block.size,
                    block.requested,
                )
                self.free(block)
                for i, amount in enumerate((1, size, requested)):
                    total[i] -= amount
                    next_peak[i] -= amount
        finally:
            self.silent = before
