"""PyTorch's caching allocator, in Python: which bytes of one GPU are allocated, which are only reserved, and when it is
full.

What is modelled is `c10/cuda/CUDACachingAllocator.cpp`, whose order of things and whose names these are: requests are
rounded to 512 bytes; small ones (up to 1 MiB) share segments of 2 MiB; larger ones come from segments of 20 MiB or, from
10 MiB on, of their own size rounded to 2 MiB; the smallest free block of the same stream that fits is used, and split
where enough would be left over; a freed block joins its free neighbours and stays reserved until `empty_cache`, or until
memory runs out. A block that other streams use is free when they are done. Not modelled: the pools of CUDA graphs.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

import torch

from virtualgpu.memory.blocks import ADDRESS_BITS, SMALL, Block, FreeList, allocation_size, format_size, round_size
from virtualgpu.memory.config import Config
from virtualgpu.memory.segments import Segments
from virtualgpu.memory.statistics import ALLOCATED_BYTES, ALLOCATION, RESERVED_BYTES

__all__ = ["Block", "CachingAllocator", "format_size", "round_size"]


class CachingAllocator(Segments):
    """The memory of one GPU. For the arguments see `Segments`; not safe among threads, so its owner holds a lock."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self._waiting: list[tuple[float, int, Block]] = []  # freed, and used by other streams until that moment
        self._waited = 0
        self._look()

    # -- figures

    @property
    def allocated(self) -> int:
        """torch.cuda.memory_allocated: bytes of the blocks that somebody has, as rounded."""
        return self.statistics.now(ALLOCATED_BYTES)

    @property
    def peak_allocated(self) -> int:
        """torch.cuda.max_memory_allocated, in bytes: since the start, or `reset_peaks`."""
        return self.statistics.peak[ALLOCATED_BYTES]

    @property
    def peak_reserved(self) -> int:
        """torch.cuda.max_memory_reserved, in bytes: since the start, or `reset_peaks`."""
        return self.statistics.peak[RESERVED_BYTES]

    # -- malloc and free

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """A block of at least `nbytes` for use on `stream`; None for no bytes at all, as PyTorch gives a null pointer.

        Raises torch.OutOfMemoryError, in PyTorch's words, where neither free blocks nor the GPU can serve it, even
        after the cache was given back.
        """
        if not nbytes:
            return None
        usual = self._usual
        size = (nbytes + 511) & -512 if usual else self._begin(nbytes)
        try:
            free = self.pools[size > SMALL].lists[stream]
        except KeyError:
            free = self.pools[size > SMALL].free_list(stream)
        keys, least = free.keys, free.min_remainder
        if usual:
            index = bisect_left(keys, size << ADDRESS_BITS)
        else:
            if self.collects_garbage:
                free.pool.searches += 1
            index, least = self._find_free(free, size), self._least_rest(free, size)
        if index < len(keys):
            del keys[index]
            block = free.blocks.pop(index)
        else:
            block = self._grow(free, size)
        # the figures by their numbers: see statistics.py
        counts = free.pool.counts
        now, went, peak, other, both = counts.now, counts.went, counts.peak, counts.other, counts.both
        rest, after = block.size - size, block.next
        whole = after is None and block.prev is None
        if rest > least:
            block.size = size
            if free.spare:
                piece = free.spare.pop()
                piece.address, piece.size, piece.prev, piece.next = block.address + size, rest, block, after
            else:
                piece = Block(block.address + size, rest, free, block, after)
            block.next = piece
            if after is not None:
                after.prev = piece
            piece.segment, piece.mark = block.segment, free.pool.searches
            key = rest << ADDRESS_BITS | piece.address
            index = bisect_left(keys, key)
            keys.insert(index, key)
            free.blocks.insert(index, piece)
            if block.segment is not None:  # PyTorch counts no pieces of expandable ones
                pass
            elif whole:
                now[5] += 1
                now[6] += rest
                if now[5] > peak[5] or now[6] > peak[6] or now[5] + other[5] > both[5] or now[6] + other[6] > both[6]:
                    counts.note_peaks()
            else:
                now[6] -= size
                went[6] += size
        else:
            size = block.size
            if not whole and block.segment is None:
                now[5] -= 1
                went[5] += 1
                now[6] -= size
                went[6] += size
        block.used, block.requested = True, nbytes
        now[0] += 1
        now[1] += size
        now[2] += nbytes
        now[3] += 1
        now[4] += size
        if (
            now[0] > peak[0]
            or now[1] > peak[1]
            or now[2] > peak[2]
            or now[0] + other[0] > both[0]
            or now[1] + other[1] > both[1]
            or now[2] + other[2] > both[2]
            or not usual  # with streams to wait for, more is active than is allocated
        ):
            counts.note_peaks()
        if not usual:
            if size >= self.config.max_split_size:
                self.statistics.oversize.increase(ALLOCATION, 1)
            block.context, self._context = self._context, None
            self.tell("alloc", block.address, nbytes, stream, block.context, block)
        return block

    def _begin(self, nbytes: int) -> int:
        """The size that malloc looks for."""
        self._context = self.history.gather() if self.history is not None else None
        if self._waiting:
            self._process_events(self.timeline.now())
        return self.config.round_size(nbytes)

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
        assert block.used and block.waiting is waited, "freed twice"
        free, size, usual = block.free_list, block.size, self._usual
        counts = free.pool.counts
        now, went = counts.now, counts.went
        if not waited:
            now[0] -= 1
            went[0] += 1
            now[1] -= size
            went[1] += size
            if not usual:
                if size >= self.config.max_split_size:
                    self.statistics.oversize.decrease(ALLOCATION, 1)
                if self.history is not None:
                    self._context = context if context is not None else self.history.gather(freeing=True)
                origin = self._context or block.context
                self.tell("free_requested", block.address, block.requested, block.stream, origin, block)
            if block.streams:
                self._insert_events(block, ends)
                return
        if not usual:
            context = self._context or block.context
            self.tell("free_completed", block.address, block.requested, block.stream, context, block)
            if not waited:  # otherwise who waits goes on, and has called from elsewhere
                self._context = None
        now[2] -= block.requested
        went[2] += block.requested
        now[3] -= 1
        went[3] += 1
        now[4] -= size
        went[4] += size
        block.used, block.waiting, block.context = False, False, None
        keys, blocks, joined = free.keys, free.blocks, 0
        before, after = block.prev, block.next
        if before is not None and not before.used and before.mapped:
            index = bisect_left(keys, before.size << ADDRESS_BITS | before.address)
            del keys[index], blocks[index]
            before.size += size
            before.next = after
            if after is not None:
                after.prev = before
            block, before, joined = before, before.prev, 1
        if after is not None and not after.used and after.mapped:
            index = bisect_left(keys, after.size << ADDRESS_BITS | after.address)
            del keys[index], blocks[index]
            block.size += after.size
            free.spare.append(after)
            block.next = after = after.next
            if after is not None:
                after.prev = block
            joined += 1
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(keys, key)
        keys.insert(index, key)
        blocks.insert(index, block)
        block.mark = free.pool.searches
        if block.segment is not None:
            return
        if before is None and after is None:
            now[5] -= joined
            went[5] += joined
            now[6] -= block.size - size
            went[6] += block.size - size
            return
        now[6] += size
        if not joined:
            now[5] += 1
        elif joined == 2:
            now[5] -= 1
            went[5] += 1
        peak, other, both = counts.peak, counts.other, counts.both
        if now[5] > peak[5] or now[6] > peak[6] or now[5] + other[5] > both[5] or now[6] + other[6] > both[6]:
            counts.note_peaks()

    def _insert_events(self, block: Block, ends: dict[int, float] | None) -> None:
        if ends is None:
            ends = {stream: self.timeline.ready(stream) for stream in block.streams or ()}
        block.waiting, block.streams, self._context = True, None, None
        self._waited += 1
        insort(self._waiting, (max(ends.values()), self._waited, block))
        self._look()

    def _process_events(self, now: float) -> None:
        """The blocks that waited until now, or less long, are free."""
        while self._waiting and self._waiting[0][0] <= now:
            self.free(self._waiting.pop(0)[2], waited=True)
        self._look()

    def _synchronize_and_free_events(self) -> None:
        if self._waiting:
            self.timeline.wait_until(self._waiting[-1][0])
            self._process_events(self._waiting[-1][0])

    def _least_rest(self, free: FreeList, size: int) -> float:
        """A block is split where more than so many bytes are left over."""
        if self.config.expandable_segments:
            return 0
        return free.min_remainder if free.pool.small or size < self.config.max_split_size else math.inf

    # -- would there be room?

    def require(self, nbytes: int | Iterable[int], stream: int = 0) -> None:
        """Raises torch.OutOfMemoryError where `malloc` of so much, or of these sizes one after the other, would.

        What malloc would give back to make room is given back; nothing is taken, and it is no malloc in the figures. A
        failure is one, with all that belongs to it.
        """
        sizes = [size for size in ([nbytes] if isinstance(nbytes, int) else nbytes) if size]
        if len(sizes) == 1 and not self._waiting:
            size = self.config.round_size(sizes[0])
            free = self.pools[size > SMALL].free_list(stream)
            if self._find_free(free, size) < len(free.keys):
                return
        if not self.fits(sum(self._most_taken(self.config.round_size(size)) for size in sizes)):
            self._try(sizes, stream)

    def _most_taken(self, size: int) -> int:
        """No more than this is taken from the GPU for a rounded request."""
        segment = allocation_size(size, self.config.large_segment)
        if self.config.expandable_segments:
            page = self.page(self.pools[size > SMALL])
            return -(-segment // page) * page
        return segment

    def _try(self, sizes: list[int], stream: int) -> None:
        """Allocate all of it, and take that back."""
        blocks: list[Block] = []
        before, self.silent = self.silent, True
        try:
            for size in sizes:
                block = self.malloc(size, stream)
                assert block is not None, "no bytes"
                blocks.append(block)
        except torch.OutOfMemoryError:
            for block in blocks:
                self.free(block)
            raise
        else:
            for block in reversed(blocks):
                counts, amounts = block.free_list.pool.counts, (1, block.size, block.requested, 1, block.size)
                self.free(block)
                for i, amount in enumerate(amounts, ALLOCATION):
                    counts.went[i] -= amount
        finally:
            self.silent = before

    # -- what is on

    def record_stream(self, block: Block | None, stream: int) -> None:
        """`stream` uses the block too: when it is freed, it waits until that stream has come past the moment of the
        free."""
        if block is not None and stream != block.free_list.stream:
            block.streams = {stream, *(block.streams or ())}

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
        self._look()

    def watch(self, listener, on: bool = True) -> None:
        """Let `listener` hear of all events, or no more; see `tell`."""
        if on:
            self.listeners = [*self.listeners, listener]
        else:
            self.listeners = [other for other in self.listeners if other != listener]
        self._look()

    def record(self, history) -> None:
        """Let a `History` write down what happens, or None."""
        self.history, self._context = history, None
        self._look()

    def _look(self) -> None:
        """Is nothing on that malloc and free ask for besides? They look at one flag, not at each of these."""
        rare = self._waiting or self.expandable or self.history is not None or self.listeners
        self._usual = self.config.plain and not rare
