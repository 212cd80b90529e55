"""The figures of `torch.cuda.memory_stats()`: each with its present value, its peak, and all that ever came and went.

Nine figures, each for the small pool, the large pool and both, are kept at every malloc and free, so keeping them has
to cost little. Five of them change there. A pool counts them as two numbers that only grow:

    total[i]      what came, in all
    next_peak[i]  what `total` may become before some peak could be a new one; it moves along with all that is freed

so one addition serves each change, and one comparison says whether a peak has to be looked at (`note_peaks`, rare).
`slack[i]` is how far next_peak is above what was freed; hence freed = next_peak - slack, and now = total - freed. The
slacks of the two pools are chosen so that while neither passes its own, neither the pools' peaks nor that of both
together is passed.

The others follow: a block is active while it is allocated or waits for streams; segments change rarely and are counted
plainly.

Source: c10/core/CachingDeviceAllocator.h (DeviceStats) and the places where CUDACachingAllocator.cpp changes them.
"""

from typing import Any

# The five, by their place in `total`, `next_peak`, `slack` and the peaks. malloc and free (allocator.py) write the numbers out.
ALLOCATION, ALLOCATED_BYTES, REQUESTED_BYTES, INACTIVE_SPLIT, INACTIVE_SPLIT_BYTES = FIVE = range(5)
NAMES = ("allocation", "allocated_bytes", "requested_bytes", "inactive_split", "inactive_split_bytes")
BLOCKS, SPLITS = range(3), range(3, 5)


class Stat:
    """A figure that changes rarely."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self):
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        """So much came; a new peak is noted."""
        self.current += amount
        self.allocated += amount
        if self.current > self.peak:
            self.peak = self.current

    def decrease(self, amount: int) -> None:
        """So much went."""
        self.current -= amount
        self.freed += amount

    def reset_peak(self) -> None:
        """The peak is what there is now."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """What came and what went are counted from 0 again; present value and peak stay."""
        self.allocated = self.freed = 0

    def as_dict(self) -> dict[str, int]:
        """By PyTorch's names: current, peak, allocated (all that came) and freed."""
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": self.freed}


class Counts:
    """Those of one pool. waiting: blocks and bytes that are freed, and that streams still work on."""

    def __init__(self):
        self.total, self.next_peak, self.slack, self.peak = ([0] * 5 for _ in range(4))
        self.total_at_reset, self.freed_at_reset = [0] * 5, [0] * 5  # at the last reset_accumulated
        self.active_freed_at_reset = [0, 0]
        self.waiting = [0, 0]
        self.active_peak = [0, 0]  # seen while something waited; otherwise active is allocated
        self.segment, self.reserved_bytes = Stat(), Stat()

    def now(self, i: int) -> int:
        """The present value of figure `i` of the FIVE."""
        return self.total[i] - self.next_peak[i] + self.slack[i]

    def freed(self, i: int) -> int:
        """All that ever went of figure `i` of the FIVE; `reset_accumulated` changes nothing about it."""
        return self.next_peak[i] - self.slack[i]


class Statistics:
    """All of one GPU's figures in this process. The plain counters are PyTorch's num_* figures without their `num_`."""

    def __init__(self, max_split_size: int | None = None):
        self.small, self.large = self.pools = Counts(), Counts()
        self.peak = [0] * 5  # of both pools together
        self.active_peak = [0, 0]
        self.segment, self.reserved_bytes = Stat(), Stat()
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.retries = self.ooms = self.syncs = self.device_allocs = self.device_frees = 0
        self.max_split_size = -1 if max_split_size is None else max_split_size  # SIZE_MAX, as a signed number

    def now(self, i: int) -> int:
        """The present value of figure `i` of the FIVE, both pools together."""
        return self.small.now(i) + self.large.now(i)

    def note_peaks(self, which=FIVE) -> None:
        """Bring the peaks up to date, and set the levels that may be reached before this is needed again."""
        small, large = self.pools
        totals, next_peaks, slacks, peaks = small.total, small.next_peak, small.slack, small.peak
        totals2, next_peaks2, slacks2, peaks2 = large.total, large.next_peak, large.slack, large.peak
        both = self.peak
        for i in which:
            now, now2 = totals[i] - next_peaks[i] + slacks[i], totals2[i] - next_peaks2[i] + slacks2[i]
            if now > peaks[i]:
                peaks[i] = now
            if now2 > peaks2[i]:
                peaks2[i] = now2
            room = both[i] - now - now2
            if room < 0:
                both[i], room = now + now2, 0
            level = now + room // 2
            if level > peaks[i]:
                level = peaks[i]
            level2 = both[i] - level
            if level2 > peaks2[i]:
                level2 = peaks2[i]
                level = min(both[i] - level2, peaks[i])  # what the other cannot use
            next_peaks[i] += level - slacks[i]
            next_peaks2[i] += level2 - slacks2[i]
            slacks[i], slacks2[i] = level, level2

    def is_peak(self, counts: Counts, size: int, requested: int, piece: bool, rest: int) -> bool:
        """Would one more block in this pool, and a piece of `rest` bytes where there is one, be more than ever before?"""
        other = self.large if counts is self.small else self.small
        total, next_peak, slack, peak = counts.total, counts.next_peak, counts.slack, counts.peak
        total2, next_peak2, slack2, both = other.total, other.next_peak, other.slack, self.peak
        for i, more in enumerate((1, size, requested, 1, rest) if piece else (1, size, requested)):
            now = total[i] - next_peak[i] + slack[i] + more
            if now > peak[i] or now + total2[i] - next_peak2[i] + slack2[i] > both[i]:
                return True
        return False

    def note_active(self) -> None:
        """Called when a block is allocated while others wait."""
        sums = [0, 0]
        for counts in self.pools:
            for i in (ALLOCATION, ALLOCATED_BYTES):
                active = counts.now(i) + counts.waiting[i]
                counts.active_peak[i] = max(counts.active_peak[i], active)
                sums[i] += active
        self.active_peak = [max(pair) for pair in zip(self.active_peak, sums, strict=True)]

    def peak_of(self, i: int) -> int:
        """The peak of figure `i` of the FIVE, both pools together; brought up to date first."""
        self.note_peaks((i,))
        return self.peak[i]

    def segment_taken(self, counts: Counts, size: int, segments: int = 1) -> None:
        """`segments` 0: an expandable one grew."""
        self.device_allocs += 1
        for owner in (self, counts):
            owner.segment.increase(segments)
            owner.reserved_bytes.increase(size)

    def segment_given_back(self, counts: Counts, size: int, segments: int = 1) -> None:
        """`segments` 0: an expandable one shrank."""
        self.device_frees += 1
        for owner in (self, counts):
            owner.segment.decrease(segments)
            owner.reserved_bytes.decrease(size)

    def reset_peaks(self) -> None:
        """Each peak is what there is now (torch.cuda.reset_peak_memory_stats)."""
        for counts in self.pools:
            counts.peak = [counts.now(i) for i in FIVE]
            counts.active_peak = [counts.now(i) + counts.waiting[i] for i in (ALLOCATION, ALLOCATED_BYTES)]
        self.peak = [self.now(i) for i in FIVE]
        self.active_peak = [sum(counts.active_peak[i] for counts in self.pools) for i in (0, 1)]
        for stat in self._stats():
            stat.reset_peak()
        self.note_peaks()

    def reset_accumulated(self) -> None:
        """What came and went, and the plain counters, start at 0 (torch.cuda.reset_accumulated_memory_stats)."""
        for counts in self.pools:
            counts.total_at_reset = list(counts.total)
            counts.freed_at_reset = [counts.freed(i) for i in FIVE]
            counts.active_freed_at_reset = [counts.freed(i) - counts.waiting[i] for i in (ALLOCATION, ALLOCATED_BYTES)]
        for stat in self._stats():
            stat.reset_accumulated()
        self.retries = self.ooms = self.syncs = self.device_allocs = self.device_frees = 0

    def nested(self) -> dict[str, Any]:
        """What `torch._C._cuda_memoryStats` returns."""
        self.note_peaks()
        figures = {name: self._figure(i) for i, name in enumerate(NAMES)}
        figures["active"] = self._active(figures["allocation"], ALLOCATION)
        figures["active_bytes"] = self._active(figures["allocated_bytes"], ALLOCATED_BYTES)
        for name in ("segment", "reserved_bytes"):
            owners = {"all": self, "small_pool": self.small, "large_pool": self.large}
            figures[name] = {pool: getattr(owner, name).as_dict() for pool, owner in owners.items()}
        return {
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
            "max_split_size": self.max_split_size,
            "num_sync_all_streams": self.syncs,
            "num_device_alloc": self.device_allocs,
            "num_device_free": self.device_frees,
            "num_oom_rejections": 0,  # throw_on_cudamalloc_oom is not modelled, and refused
            **figures,
            "reserved_bytes_by_private_pools": {},  # nor is MemPool
            "oversize_allocations": self.oversize_allocations.as_dict(),
            "oversize_segments": self.oversize_segments.as_dict(),
        }

    def _stats(self) -> list[Stat]:
        pools = [stat for owner in (self, *self.pools) for stat in (owner.segment, owner.reserved_bytes)]
        return [*pools, self.oversize_allocations, self.oversize_segments]

    def _figure(self, i: int) -> dict[str, dict[str, int]]:
        pools = [
            {
                "current": counts.now(i),
                "peak": counts.peak[i],
                "allocated": counts.total[i] - counts.total_at_reset[i],
                "freed": counts.freed(i) - counts.freed_at_reset[i],
            }
            for counts in self.pools
        ]
        both = {key: pools[0][key] + pools[1][key] for key in pools[0]}
        return {"all": {**both, "peak": self.peak[i]}, "small_pool": pools[0], "large_pool": pools[1]}

    def _active(self, figure: dict[str, dict[str, int]], i: int) -> dict[str, dict[str, int]]:
        """A block that waits is no longer allocated, and still active."""
        both = {"current": 0, "peak": max(figure["all"]["peak"], self.active_peak[i]), "allocated": 0, "freed": 0}
        result = {"all": both}
        for pool, counts in zip(("small_pool", "large_pool"), self.pools, strict=True):
            result[pool] = {
                "current": counts.now(i) + counts.waiting[i],
                "peak": max(figure[pool]["peak"], counts.active_peak[i]),
                "allocated": figure[pool]["allocated"],
                "freed": counts.freed(i) - counts.waiting[i] - counts.active_freed_at_reset[i],
            }
            for key in ("current", "allocated", "freed"):
                both[key] += result[pool][key]
        return result
