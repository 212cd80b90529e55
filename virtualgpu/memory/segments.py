"""What one process holds of a GPU: segments, taken when no free block serves, and given back by several ways.

Segments that grow (expandable_segments:True) are address space first, and get memory behind it page by page. Each stream
has one for its small blocks and one for its large ones, with addresses for 1 1/8 of the whole GPU. A page is 2 MiB for
small blocks and 20 MiB for large ones. A request that finds no free block gets pages mapped at the lowest address where
it fits, joined to a free block before them. Giving back unmaps every page that no block uses, so little is lost between
blocks. Pieces without memory are blocks too, with `mapped` False, in `FreeList.unmapped` (CUDACachingAllocator.cpp, Note
[Expandable Segments], and find_expandable_block, map_block, unmap_block).

Where the GPU is full, PyTorch tries in this order (CUDACachingAllocator.cpp, malloc): garbage collection, if it is on;
a segment from the GPU; giving back free segments that are too large to split, if max_split_size_mb is set; waiting for
blocks that streams still use, and giving back all free segments. Then it is out of memory.
"""

import contextlib
import math
from collections.abc import Callable

import torch

from virtualgpu.memory.blocks import (
    SMALL_SEGMENT,
    Addresses,
    Block,
    BlockPool,
    FreeList,
    Timeline,
    allocation_size,
    format_size,
)
from virtualgpu.memory.config import UNLIMITED, Config, from_environment
from virtualgpu.memory.ledger import PLAYED_PID
from virtualgpu.memory.statistics import ALLOCATED_BYTES, RESERVED_BYTES, SEGMENT, Statistics

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
        self.timeline: Timeline = timeline or Timeline()
        limited = None if self.config.max_split_size == UNLIMITED else int(self.config.max_split_size)
        self.statistics = Statistics(limited)
        self.pools = BlockPool(True, self.statistics.small), BlockPool(False, self.statistics.large)
        self.on_reserved: Callable[[Segments], None] | None = None
        self.exclusive: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.history = None
        self.listeners: list[Callable] = []
        self.oom_observers: list[Callable] = []
        self.heads: dict[int, Block] = {}  # the first block of each segment, by address
        self.silent = False  # a trial is on: see CachingAllocator.require
        self.expandable: set[int] = set()  # the first addresses of expandable segments
        self._context = None  # where the present call comes from, if that is recorded
        self.addresses = Addresses(device)
        self.limit = int(self.config.memory_fraction * capacity)

    # -- what there is

    @property
    def reserved(self) -> int:
        """torch.cuda.memory_reserved: bytes of all segments; of expandable ones, what has memory behind it."""
        return self.statistics.now(RESERVED_BYTES)

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
        for listener in self.listeners:
            listener(action, address, size, stream, block)

    # -- free blocks

    def _find_free(self, free: FreeList, size: int) -> int:
        """The place in its list of the free block that PyTorch would take for a request; the list's length for none."""
        blocks, index, config = free.blocks, free.at_least(size), self.config
        if self.expandable and index < len(blocks) and blocks[index].segment is not None:
            if config.expandable_segments:  # what can grow counts as large as it can become, so that it is taken last
                while blocks[index].segment is not None and _reach(blocks[index]) > _reach(
                    *blocks[index + 1 : index + 2]
                ):
                    index += 1
            else:  # they have been turned off since
                index = next((i for i in range(index, len(blocks)) if blocks[i].segment is None), len(blocks))
        most = config.max_split_size
        if most < UNLIMITED and index < len(blocks):
            found = blocks[index].size
            if size < most <= found or (size >= most and found >= size + config.max_non_split_rounding):
                return len(blocks)
        return index

    def _merge_neighbours(self, block: Block) -> tuple[Block, int]:
        """A block that is in no list, with those of its neighbours that are free as well, and mapped or not like it; and
        how many these were."""
        before, after, joined = block.prev, block.next, 0
        if before is not None and not before.used and before.mapped == block.mapped:
            before.free_list.remove(before)
            before.join()
            block, joined = before, 1
        if after is not None and not after.used and after.mapped == block.mapped:
            after.free_list.remove(after)
            block.join()
            joined += 1
        return block, joined

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
        segment = allocation_size(size, self.config.large_segment)
        with self.exclusive():
            if self.config.expandable_segments:
                return self._grow_segment(free, size) if self.within_limit(segment) else None
            if not self.fits(segment):
                return None
            address = self.addresses.take(segment)
            block = self.heads[address] = Block(address, segment, free, None, None)
            block.segment_context = self._context
            self.statistics.segment_taken(free.pool.counts, segment)
            if segment >= self.config.max_split_size:
                self.statistics.oversize.increase(SEGMENT, 1)
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
        self._shrink_segments(pool)

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
            self.statistics.oversize.decrease(SEGMENT, 1)
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

    # -- expandable segments

    def page(self, pool: BlockPool) -> int:
        """Bytes of a page: 2 MiB in the small pool, large_segment_size in the large one."""
        return SMALL_SEGMENT if pool.small else self.config.large_segment

    def _grow_segment(self, free: FreeList, size: int) -> Block | None:
        """A free block of at least `size`, in no list; None where the GPU has no memory left for its pages."""
        block = self._find_block(free, size)
        if not block.mapped and not self._map_block(block, min(block.size, size)):
            return None
        while block.size < size:  # a free block, with addresses without memory after it
            following = block.next
            if following is None or not self._map_block(following, min(following.size, size - block.size)):
                return None
        free.remove(block)
        return block

    def _find_block(self, free: FreeList, size: int) -> Block:
        """The lowest free or unmapped block from which on there are enough addresses."""
        for block in free.unmapped:
            before = block.prev
            start = before if before is not None and not before.used else block
            total = 0
            piece: Block | None = start
            while total < size and piece is not None and not piece.used:
                total, piece = total + piece.size, piece.next
            if total >= size:
                return start
        return self._reserve(free)

    def _reserve(self, free: FreeList) -> Block:
        """Addresses, and no memory."""
        page = self.page(free.pool)
        size = -(-(self.capacity + self.capacity // 8) // page) * page
        address = self.addresses.take(size)
        self.expandable.add(address)
        block = self.heads[address] = Block(address, size, free, None, None)
        block.segment, block.mapped = (address, page), False
        free.unmapped.append(block)
        return block

    def _map_block(self, block: Block, size: int) -> bool:
        """Put memory behind the first `size` bytes of an unmapped block, in whole pages, and make it a free block."""
        free = block.free_list
        _, page = _segment(block)
        size = -(-size // page) * page
        if size > self.free_on_gpu:
            return False
        address = block.address
        free.remove(block)
        if size < block.size:
            rest = block.split(size)
            rest.mapped = False
            free.insert(rest)
        block.mapped = True
        block, _ = self._merge_neighbours(block)
        free.insert(block)
        self.statistics.segment_taken(free.pool.counts, size, 0)
        if block.prev is None and block.segment_context is None:
            block.segment_context = self._context
        self.changed("segment_map", address, size, free.stream, self._context)
        return True

    def _shrink_segments(self, pool: BlockPool) -> None:
        """Unmap every page that is wholly free, and give back the addresses of segments that have none left."""
        for block in [block for block in pool.free_blocks() if block.segment is not None]:
            left = self._unmap_block(block)
            if left is not None and left.whole:
                self.expandable.remove(left.address)
                del self.heads[left.address]
                left.free_list.remove(left)

    def _unmap_block(self, block: Block) -> Block | None:
        """What has no memory then, of a free block; None where no page is wholly in it."""
        free = block.free_list
        start, page = _segment(block)
        first = start + -(-(block.address - start) // page) * page
        last = start + (block.address + block.size - start) // page * page
        if first >= last:
            return None
        free.remove(block)
        if last < block.address + block.size:
            free.insert(block.split(last - block.address))
        if first > block.address:
            before, block = block, block.split(first - block.address)
            free.insert(before)
        block.mapped = False
        self.timeline.wait_until(self.timeline.ready(free.stream))  # as unmapHandles does
        block, _ = self._merge_neighbours(block)
        free.insert(block)
        self.statistics.segment_given_back(free.pool.counts, last - first, 0)
        self.changed("segment_unmap", first, last - first, free.stream, self._context or block.segment_context)
        return block

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
        allocated, own = self.statistics.now(ALLOCATED_BYTES), format_size(self.reserved + self.context)
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


def _reach(block: Block | None = None) -> float:
    """The size that a block can come to; no block: infinite."""
    if block is None:
        return math.inf
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def _segment(block: Block) -> tuple[int, int]:
    """The address of its segment, and the size of a page."""
    assert block.segment is not None, "not of an expandable segment"
    return block.segment
