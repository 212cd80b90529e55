"""The figures of `torch.cuda.memory_stats()`: each with its present value, its peak, and all that ever came and went.

Each pool counts its own, and what both have together follows: present values and what came and went are sums; its peaks
are kept beside them. Source: c10/core/CachingDeviceAllocator.h (DeviceStats) and the places where
CUDACachingAllocator.cpp changes them.
"""

from typing import Any

# By their numbers, which are their places in a pool's counts; malloc and free (allocator.py) write them out
FIGURES = (
    *("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes"),
    *("inactive_split", "inactive_split_bytes", "segment", "reserved_bytes"),
)
ALLOCATION, ALLOCATED_BYTES, SEGMENT, RESERVED_BYTES = 0, 1, 7, 8


class Counts:
    """Those of one pool. both: the peaks of both pools together; other: what the other one has now.

    What came is what there is, more than there was (`before`) when counting began, and what `went`.
    """

    def __init__(self, both: list[int]):
        self.now, self.peak, self.went, self.before = ([0] * len(FIGURES) for _ in range(4))
        self.both, self.other = both, [0] * len(FIGURES)

    def note_peaks(self) -> None:
        """Called when there may be new ones."""
        now, peak, other, both = self.now, self.peak, self.other, self.both
        for i, present in enumerate(now):
            if present > peak[i]:
                peak[i] = present
            if present + other[i] > both[i]:
                both[i] = present + other[i]

    def increase(self, first: int, *amounts: int) -> None:
        """So much came of each of the figures from `first` on."""
        for i, amount in enumerate(amounts, first):
            self.now[i] += amount
        self.note_peaks()

    def decrease(self, first: int, *amounts: int) -> None:
        """So much went."""
        for i, amount in enumerate(amounts, first):
            self.now[i] -= amount
            self.went[i] += amount

    def reset_accumulated(self) -> None:
        """What came and what went are counted from 0 again; present values and peaks stay."""
        self.before[:], self.went[:] = self.now, [0] * len(FIGURES)

    def figure(self, i: int) -> dict[str, int]:
        """By PyTorch's names: current, peak, allocated (all that came) and freed."""
        came = self.now[i] - self.before[i] + self.went[i]
        return {"current": self.now[i], "peak": self.peak[i], "allocated": came, "freed": self.went[i]}


class Statistics:
    """All of one GPU's figures in this process. The plain counters are PyTorch's num_* figures without their `num_`.

    oversize: what max_split_size_mb leaves whole, of which PyTorch counts blocks and segments.
    """

    def __init__(self, max_split_size: int | None = None):
        self.peak = [0] * len(FIGURES)  # of both pools together
        self.small, self.large = self.pools = Counts(self.peak), Counts(self.peak)
        self.small.other, self.large.other = self.large.now, self.small.now
        self.oversize = Counts([0] * len(FIGURES))
        self.retries = self.ooms = self.syncs = self.device_allocs = self.device_frees = 0
        self.max_split_size = -1 if max_split_size is None else max_split_size  # SIZE_MAX, as a signed number

    def now(self, i: int) -> int:
        """The present value of a figure, both pools together."""
        return self.small.now[i] + self.large.now[i]

    def segment_taken(self, counts: Counts, size: int, segments: int = 1) -> None:
        """`segments` 0: an expandable one grew."""
        self.device_allocs += 1
        counts.increase(SEGMENT, segments, size)

    def segment_given_back(self, counts: Counts, size: int, segments: int = 1) -> None:
        """`segments` 0: an expandable one shrank."""
        self.device_frees += 1
        counts.decrease(SEGMENT, segments, size)

    def reset_peaks(self) -> None:
        """Each peak is what there is now (torch.cuda.reset_peak_memory_stats)."""
        for counts in (*self.pools, self.oversize):
            counts.peak[:] = counts.now
        self.peak[:] = map(self.now, range(len(FIGURES)))

    def reset_accumulated(self) -> None:
        """What came and went, and the plain counters, start at 0 (torch.cuda.reset_accumulated_memory_stats)."""
        for counts in (*self.pools, self.oversize):
            counts.reset_accumulated()
        self.retries = self.ooms = self.syncs = self.device_allocs = self.device_frees = 0

    def nested(self) -> dict[str, Any]:
        """What `torch._C._cuda_memoryStats` returns."""
        figures = {}
        for i, name in enumerate(FIGURES):
            small, large = self.small.figure(i), self.large.figure(i)
            both = {key: small[key] + large[key] for key in small} | {"peak": self.peak[i]}
            figures[name] = {"all": both, "small_pool": small, "large_pool": large}
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
            "oversize_allocations": self.oversize.figure(ALLOCATION),
            "oversize_segments": self.oversize.figure(SEGMENT),
        }
