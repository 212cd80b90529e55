"""What one process holds of a GPU: segments, taken when no free block serves, and given back by several ways.

Where the GPU is full, PyTorch tries in this order (CUDACachingAllocator.cpp, malloc): garbage collection, if it is on;
a segment from the GPU; giving back free segments that are too large to split, if max_split_size_mb is set; waiting for
blocks that streams still use, and giving back all free segments. Then it is out of memory.
"""

import contextlib
from collections.abc import Callable

import torch

from virtualgpu.memory.blocks import (
    Addresses,
    Block,
    BlockPool,
    FreeList,
    Timeline,
    Untimed,
    allocation_size,
    format_size,
)
from virtualgpu.memory.config import UNLIMITED, Config, from_environment
from virtualgpu.memory.expandable import Expandable
from virtualgpu.memory.ledger import PLAYED_PID
from virtualgpu.memory.statistics import Statistics

EXABYTE = 1 << 60


class Segments:
    """A GPU of `capacity` bytes, of which this process's CUDA `context` and `others` on the GPU hold a part (see
    `others_held`).

    limit: what this process may reserve (torch.cuda.set_per_process_memory_fraction). on_reserved: called with this
    object whenever `reserved` has changed. exclusive: with exclusive(): no other process takes memory between asking for
    it and `on_reserved`. history, listeners: see `tell`.
    """

    # See `occupy`, `share` and `GPU.leaving`; of the class, since Python looks up no more than 30 attributes of an object fast
    occupied = 0
    host_pid: int | None = None
    processes: Callable[[], list[tuple[int, int]]] = list  # of the other processes: pid and bytes

    def __init__(
        self,
        capacity: int,
        device: int = 0,
        context: int = 0,
        others: "int | Callable[[], int]" = 0,
        timeline: Timeline | None = None,
        config: Config | None = None,
    ):
        """config: by default that of the environment. Raises ValueError or NotImplementedError for a wrong one."""
        self.config = from_environment() if config is None else config
        self.capacity, self.device, self.context, self.others = capacity, device, context, others
        self.timeline: Timeline = timeline or Untimed()
        limited = None if self.config.max_split_size == UNLIMITED else int(self.config.max_split_size)
        self.statistics = Statistics(limited)
        self.pools = BlockPool(True, self.statistics.small), BlockPool(False, self.statistics.large)
        self.on_reserved: Callable[[Segments], None] | None = None
        self.exclusive: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.history = None
        self.listeners: list[Callable] | None = None
        self.oom_observers: list[Callable] = []
        self.heads: dict[int, Block] = {}  # the first block of each segment, by address
        self.silent = False  # a trial is on: see CachingAllocator.require
        self.expandable = Expandable(self)
        self._context = None  # where the present call comes from, if that is recorded
        self.addresses = Addresses(device)
        self.limit = int(self.config.memory_fraction * capacity)

    # -- what there is

    @property
    def reserved(self) -> int:
        """torch.cuda.memory_reserved: bytes of all segments; of expandable ones, what has memory behind it."""
        return self.statistics.reserved_bytes.current

    @property
    def others_held(self) -> int:
        """Bytes of the GPU that other processes hold."""
        others = self.others
        return self.occupied + (others() if callable(others) else others)

    def share(self, processes: Callable[[], list[tuple[int, int]]], exclusive: Callable, on_reserved: Callable) -> None:
        """Other processes, each with pid and bytes, use this GPU, too; for the other arguments see the class."""
        self.others = lambda: sum(nbytes for _, nbytes in processes())
        self.processes, self.exclusive, self.on_reserved = processes, exclusive, on_reserved

    def occupy(self, nbytes: int) -> None:
        """Another process, which is only played, takes so much more; less, for a negative number."""
        self.occupied += nbytes
        if self.on_reserved is not None:
            self.on_reserved(self)

    def be_in_container(self, pid: int | None) -> None:
        """The driver knows this process by that pid of its host from now on, and PyTorch does not find itself among them; None: it does."""
        self.host_pid = pid

    @property
    def free_on_gpu(self) -> int:
        """What torch.cuda.mem_get_info calls free: neither reserved here nor held otherwise."""
        return self.capacity - self.others_held - self.context - self.reserved

    def limit_to(self, nbytes: int) -> None:
        """No more than this may be reserved from now on."""
        self.limit = nbytes
        self._choose_way()

    @property
    def limited(self) -> bool:
        """May less be reserved than the GPU has?"""
        return self.limit < self.capacity

    @property
    def collects_garbage(self) -> bool:
        """garbage_collection_threshold works only together with a memory fraction."""
        return self.config.garbage_collection_threshold > 0 and self.limited

    def all_blocks(self) -> list[Block]:
        """Every block, by address, those without memory behind them (in expandable segments) too."""
        blocks = []
        for address in sorted(self.heads):
            block: Block | None = self.heads[address]
            while block is not None:
                blocks.append(block)
                block = block.next
        return blocks

    def tell(self, action: str, address: int, size: int, stream: int, context, block: Block | None = None) -> None:
        """Each event goes to the history and to all `listeners`, as listener(action, address, size, stream, block).

        The actions are PyTorch's: alloc, free_requested, free_completed (both with the bytes asked for; `block` has
        those given), segment_alloc, segment_free, segment_map, segment_unmap, oom (address: what is free on the GPU).
        """
        if self.silent and action in ("alloc", "free_requested", "free_completed"):
            return
        if self.history is not None:
            self.history.note(action, address, size, stream, context)
        for listener in self.listeners or ():
            listener(action, address, size, stream, block)

    # -- taking

    def fits(self, nbytes: int) -> bool:
        """Could the GPU give so much as it is now?"""
        return nbytes <= self.free_on_gpu and self.within_limit(nbytes)

    def within_limit(self, nbytes: int) -> bool:
        """May so many bytes more be reserved? Whether the GPU has them is not asked."""
        return not self.limited or self.reserved + nbytes <= self.limit

    def _grow(self, free: FreeList, size: int) -> Block:
        """A free block of at least `size` from the GPU, not in any list. Raises torch.OutOfMemoryError."""
        if size >= EXABYTE:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.")
        if self.collects_garbage:
            self._garbage_collect_cached_blocks()
        block = self._alloc_block(free, size)
        if block is None and self._release_available_cached_blocks(free, size):
            block = self._alloc_block(free, size)
        if block is None:
            self.release_cached_blocks()
            self.statistics.retries += 1
            block = self._alloc_block(free, size)
        if block is None:
            raise self._out_of_memory(free, size)
        return block

    def _alloc_block(self, free: FreeList, size: int) -> Block | None:
        with self.exclusive():
            return self._alloc_block_now(free, size)

    def _alloc_block_now(self, free: FreeList, size: int) -> Block | None:
        segment = allocation_size(size, self.config.large_segment)
        if self.config.expandable_segments:
            return self.expandable.grow(free, size) if self.within_limit(segment) else None
        if not self.fits(segment):
            return None
        address = self.addresses.take(segment)
        block = self.heads[address] = Block(address, segment, free, None, None)
        block.segment_context = self._context
        self.statistics.segment_taken(free.pool.counts, segment)
        if segment >= self.config.max_split_size:
            self.statistics.oversize_segments.increase(1)
        self.changed("segment_alloc", block.address, segment, free.stream, self._context)
        return block

    def changed(self, action: str, address: int, size: int, stream: int, context) -> None:
        """What is reserved has changed."""
        if self.on_reserved is not None:
            self.on_reserved(self)
        if self.history is not None or self.listeners:
            self.tell(action, address, size, stream, context)

    # -- giving back

    def release_cached_blocks(self) -> None:
        """Wait for the blocks that streams still use, then return each segment that is wholly free to the GPU."""
        self.statistics.syncs += 1
        self._synchronize_and_free_events()
        for pool in reversed(self.pools):  # the large ones first, as PyTorch does
            self.release_blocks(pool)

    def release_blocks(self, pool: BlockPool) -> None:
        """Return the segments of one pool that are wholly free."""
        for block in pool.free_blocks():
            if block.segment is None and block.whole:
                self._release_block(block)
        self.expandable.shrink(pool)

    def _synchronize_and_free_events(self) -> None:
        raise NotImplementedError

    def _release_block(self, block: Block) -> None:
        """cudaFree: the GPU is done with its work first."""
        free = block.free_list
        free.remove(block)
        del self.heads[block.address]
        self.addresses.give_back(block.address, block.size)
        self.timeline.wait_until(self.timeline.ready(free.stream))
        self.statistics.segment_given_back(free.pool.counts, block.size)
        if block.size >= self.config.max_split_size:
            self.statistics.oversize_segments.decrease(1)
        self.changed("segment_free", block.address, block.size, free.stream, self._context or block.segment_context)

    def _garbage_collect_cached_blocks(self) -> None:
        """Return large segments that have not been used for longest, until reserved comes under the threshold."""
        too_much = self.reserved - int(self.config.garbage_collection_threshold * self.limit)
        pool = self.pools[1]
        candidates = [block for block in pool.free_blocks() if block.whole and block.segment is None]
        while too_much > 0 and candidates:
            ages = {block.address: pool.searches - block.mark for block in candidates}
            mean = sum(ages.values()) / len(candidates)
            old = [block for block in candidates if ages[block.address] >= mean]
            for block in old:
                too_much -= block.size
                self._release_block(block)
            candidates = [block for block in candidates if ages[block.address] < mean]

    def _release_available_cached_blocks(self, free: FreeList, size: int) -> bool:
        """Free segments that may not be split serve no other request: return one that is large enough, or several."""
        if self.config.max_split_size == UNLIMITED:
            return False
        wanted = max(size, int(self.config.max_split_size))
        index = free.at_least(wanted)
        if index < len(free.blocks) and free.blocks[index].segment is None:
            self._release_block(free.blocks[index])
            return True
        released = 0
        for block in reversed(free.blocks[:index]):
            if released >= wanted or block.size < self.config.max_split_size:
                break
            if block.segment is None:
                released += block.size
                self._release_block(block)
        return released >= wanted

    def _choose_way(self) -> None:
        raise NotImplementedError

    # -- out of memory

    def _out_of_memory(self, free: FreeList, size: int) -> torch.OutOfMemoryError:
        self.statistics.ooms += 1
        segment, left = allocation_size(size, self.config.large_segment), self.free_on_gpu
        if self.history is not None or self.listeners:
            self.tell("oom", left, size, free.stream, self._context)
        message = self._message(segment)
        for observer in list(self.oom_observers):
            observer(self.device, segment, self.limit if self.limited else self.capacity, left)
        return torch.OutOfMemoryError(message)

    def _message(self, segment: int) -> str:
        allowed = f"{format_size(self.limit)} allowed; " if self.limited else ""
        allocated, own = self.statistics.now(1), format_size(self.reserved + self.context)
        played = [(PLAYED_PID, self.occupied)] if self.occupied else []
        held = "".join(
            f"Process {pid} has {format_size(used)} memory in use. " for pid, used in self.processes() + played
        )
        # In a container PyTorch does not find itself among the pids, which are the host's (reportProcessMemoryInfo)
        who = "Including non-PyTorch memory, this process" if self.host_pid is None else f"Process {self.host_pid}"
        return (
            f"CUDA out of memory. Tried to allocate {format_size(segment)}. "
            f"GPU {self.device} has a total capacity of {format_size(self.capacity)} "
            f"of which {format_size(self.free_on_gpu)} is free. "
            f"{held}{who} has {own} memory in use. "
            f"{allowed}Of the allocated memory {format_size(allocated)} is allocated by PyTorch, and "
            f"{format_size(self.reserved - allocated)} is reserved by PyTorch but unallocated. If reserved but "
            "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
            "fragmentation.  See documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )
