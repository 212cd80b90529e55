"""What malloc and free ask besides while something special is on: streams that share blocks, settings, who listens, where calls come from.

The order of things is that of DeviceCachingAllocator::malloc, alloc_found_block, free and free_block
(CUDACachingAllocator.cpp).
"""

import math
from bisect import insort

from virtualgpu.memory.blocks import SMALL, Block, FreeList
from virtualgpu.memory.config import Config
from virtualgpu.memory.expandable import choose
from virtualgpu.memory.segments import Segments


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
            self._finish(self.timeline.now())
        return self.config.round_size(nbytes)

    def _choose(self, free: FreeList, size: int) -> Block | None:
        """A free block, out of its list."""
        if self.collects_garbage:
            free.pool.searches += 1
        return choose(free, size, self.config)

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

    def _waits(self, block: Block, ends: dict[int, float] | None, context) -> bool:
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
        self.release_cached()
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

    def _finish(self, now: float) -> None:
        """The blocks that waited until now, or less long, are free."""
        while self._waiting and self._waiting[0][0] <= now:
            block = self._waiting.pop(0)[2]
            counts = block.free_list.pool.counts
            counts.waiting[0] -= 1
            counts.waiting[1] -= block.size
            block.waiting = False
            self.free(block, waited=True)

    def _wait_for_streams(self) -> None:
        if self._waiting:
            self.timeline.wait_until(self._waiting[-1][0])
            self._finish(self._waiting[-1][0])
