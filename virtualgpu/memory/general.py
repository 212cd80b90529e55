"""The allocator, all of it: streams that share blocks, settings, history. `CachingAllocator` adds short ways for the
common case.

The order of things is that of DeviceCachingAllocator::malloc, alloc_found_block, free and free_block
(CUDACachingAllocator.cpp).
"""

from bisect import insort
from collections.abc import Iterable

from virtualgpu.errors import gpu_full
from virtualgpu.memory.blocks import SMALL, Block, FreeList
from virtualgpu.memory.config import Config, caches
from virtualgpu.memory.expandable import absorb, choose
from virtualgpu.memory.segments import Segments
from virtualgpu.memory.statistics import SPLITS


class GeneralAllocator(Segments):
    """malloc and free for every case. `special`: something is on that only they know."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self._waiting: list[tuple[float, int, Block]] = []  # freed, and used by other streams until that moment
        self._waited = 0
        self._shared = self._recorded = False  # some block was used by another stream, or knows where it was made
        self.caching, self._past_cache = caches(), 0  # see `cache`; bytes
        self._choose_way()

    def malloc_generally(self, nbytes: int, stream: int) -> Block | None:
        """As `CachingAllocator.malloc`."""
        if not nbytes:
            return None
        if not self.caching:
            return self._take_uncached(nbytes, stream)
        if self.history is not None:
            self._context = self.history.gather()
        try:
            if self._waiting:
                self._finish(self.timeline.now())
            size = self.config.round_size(nbytes)
            free = self._free_list(size, stream)
            if self.collects_garbage:
                free.pool.searches += 1
            block = choose(free, size, self.config) or self._grow(free, size)
            self._use(block, size, nbytes)
            return block
        finally:
            self._context = None

    def free_generally(self, block: Block, ends: dict[int, float] | None, context) -> None:
        """As `CachingAllocator.free`."""
        assert block.used and not block.waiting, "freed twice"
        if block.uncached:
            self._free_uncached(block)
            return
        if self.history is not None:
            self._context = context if context is not None else self.history.gather(freeing=True)
        counts = block.free_list.pool.counts
        counts.next_peak[0] += 1
        counts.next_peak[1] += block.size
        if self.history is not None or self.listeners:
            origin = self._context or block.context
            self.tell("free_requested", block.address, block.requested, block.stream, origin, block)
        if block.size >= self.config.max_split_size:
            self.statistics.oversize_allocations.decrease(1)
        if block.streams:
            if ends is None:
                ends = {stream: self.timeline.ready(stream) for stream in block.streams}
            block.waiting, block.streams = True, None
            counts.waiting[0] += 1
            counts.waiting[1] += block.size
            self._waited += 1
            insort(self._waiting, (max(ends.values()), self._waited, block))
        else:
            self._complete(block)
        self._context = None

    def hold_pool(self, id: tuple[int, int], no_split: bool = False) -> None:
        """Somebody has made a MemPool; see private.py."""
        self.private.hold(id).no_split = no_split
        self._choose_way()

    def enter_pool(self, id: tuple[int, int]) -> None:
        """This thread allocates in that pool, until `private.end`."""
        self.private.begin(id)
        self._choose_way()

    def drop_pool(self, id: tuple[int, int]) -> None:
        """A MemPool has gone: what is free of it goes back to the GPU, the rest when its tensors have gone."""
        self.private.let_go(id)
        self._wait_for_streams()
        for pool in reversed(self.private.known[id].pools):
            self.release_free(pool)

    def record_stream(self, block: Block | None, stream: int) -> None:
        """`stream` uses the block too: when it is freed, it waits until that stream has come past the moment of the
        free."""
        if block is not None and stream != block.free_list.stream and not block.uncached:
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

    def cache(self, on: bool) -> None:
        """torch.cuda.caching_allocator_enable: while off, blocks come from the GPU and go back to it, and no figure counts
        them but what is free."""
        self.caching = on
        self._choose_way()

    def require_uncached(self, sizes: Iterable[int]) -> None:
        """Raises CUDA's own error where the GPU has no room for these blocks."""
        if sum(map(self.config.round_size, sizes)) > self.free_on_gpu:
            raise gpu_full()

    def _take_uncached(self, nbytes: int, stream: int) -> Block:
        size = self.config.round_size(nbytes)
        with self.exclusive():
            self.require_uncached([nbytes])
            block = Block(self.next_address(size), size, self._free_list(size, stream), None, None)
            block.used, block.requested, block.uncached = True, nbytes, True
            self._past_cache += size
            self._hold(size)
        return block

    def _free_uncached(self, block: Block) -> None:
        self.timeline.wait_until(self.timeline.ready(block.stream))
        block.used = False
        self._past_cache -= block.size
        self._hold(-block.size)
        self._choose_way()

    def _hold(self, size: int) -> None:
        self.context += size
        if self.on_reserved is not None:
            self.on_reserved(self)

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
        """Is anything on that the short ways of malloc and free do not know?"""
        self.special = bool(
            self._shared
            or self._waiting
            or self._past_cache
            or not self.caching
            or self.private.known
            or self._recorded
            or self.listeners
            or self.expandable
            or self.collects_garbage
            or not self.config.plain
        )

    def _free_list(self, size: int, stream: int) -> FreeList:
        private = self.private.current()
        pool = (self.pools if private is None else private.pools)[size > SMALL]
        if stream not in pool.lists:
            pool.lists[stream] = FreeList(pool, stream)
        return pool.lists[stream]

    def _use(self, block: Block, size: int, nbytes: int) -> None:
        """A free block, in no list, is allocated: so much of it as is needed."""
        free, config, statistics = block.free_list, self.config, self.statistics
        total, next_peak, was_whole = free.total, free.next_peak, block.whole
        rest = block.size - size
        private = self.private.known.get(free.pool.id)
        if private is not None and private.no_split:
            split = False
        elif free.pool.small or config.expandable_segments:
            split = rest > 0
        else:
            split = size < config.max_split_size and rest > free.min_remainder
        if split:
            piece = Block(block.address + size, rest, free, block, block.after)
            piece.segment, block.after, block.size = block.segment, piece, size
            if piece.after is not None:
                piece.after.before = piece
            free.insert(piece)
        if block.segment is None:  # PyTorch leaves expandable ones out of these two figures
            if split and was_whole:
                total[3] += 1
                total[4] += rest
            elif not was_whole:
                next_peak[3] += not split
                next_peak[4] += block.size
        block.used, block.requested, block.context = True, nbytes, self._context
        total[0] += 1
        total[1] += block.size
        total[2] += nbytes
        if (
            total[0] > next_peak[0]
            or total[1] > next_peak[1]
            or total[2] > next_peak[2]
            or total[3] > next_peak[3]
            or total[4] > next_peak[4]
        ):
            statistics.note_peaks()
        if self._waiting:
            statistics.note_active()
        if block.size >= config.max_split_size:
            statistics.oversize_allocations.increase(1)
        if self.history is not None or self.listeners:
            self.tell("alloc", block.address, nbytes, free.stream, self._context, block)

    def _complete(self, block: Block) -> None:
        """Nobody uses the block any more: into the cache with it."""
        free, size = block.free_list, block.size
        total, next_peak = free.total, free.next_peak
        if self.history is not None or self.listeners:
            context = self._context or block.context
            self.tell("free_completed", block.address, block.requested, free.stream, context, block)
        next_peak[2] += block.requested
        block.used, block.context = False, None
        joined = 0
        for other in (block.before, block.after):
            if other is not None and not other.used and other.mapped:
                free.remove(other)
                absorb(self, block, other)
                joined += 1
        free.insert(block)
        if block.segment is None:
            if block.whole:
                next_peak[3] += joined
                next_peak[4] += block.size - size
            else:
                total[4] += size
                total[3] += not joined
                next_peak[3] += joined == 2
                if total[3] > next_peak[3] or total[4] > next_peak[4]:
                    self.statistics.note_peaks(SPLITS)

    def _finish(self, now: float) -> None:
        """The blocks that waited until now, or less long, are free."""
        while self._waiting and self._waiting[0][0] <= now:
            block = self._waiting.pop(0)[2]
            counts = block.free_list.pool.counts
            counts.waiting[0] -= 1
            counts.waiting[1] -= block.size
            block.waiting = False
            self._complete(block)

    def _wait_for_streams(self) -> None:
        if self._waiting:
            self.timeline.wait_until(self._waiting[-1][0])
            self._finish(self._waiting[-1][0])
