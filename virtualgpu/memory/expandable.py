"""Segments that grow (expandable_segments:True): address space first, memory behind it page by page.

Each stream has one segment for its small blocks and one for its large ones, with addresses for 1 1/8 of the whole GPU.
A page is 2 MiB for small blocks and 20 MiB for large ones. A request that finds no free block gets pages mapped at the
lowest address where it fits, joined to a free block before them. Giving back unmaps every page that no block uses, so
little is lost between blocks.

Pieces without memory are blocks too, with `mapped` False, in `FreeList.unmapped`. Source: CUDACachingAllocator.cpp,
Note [Expandable Segments], and find_expandable_block, map_block, unmap_block.
"""

import math

from virtualgpu.memory.blocks import SMALL_SEGMENT, Block, BlockPool, FreeList


class Expandable:
    """The expandable segments of one allocator."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.segments: dict[int, int] = {}  # the size in addresses, by the first address

    def __bool__(self) -> bool:
        return bool(self.segments)

    def page(self, pool: BlockPool) -> int:
        """Bytes of a page: 2 MiB in the small pool, large_segment_size in the large one."""
        return SMALL_SEGMENT if pool.small else self.allocator.config.large_segment

    # -- growing

    def grow(self, free: FreeList, size: int) -> Block | None:
        """A free block of at least `size`, in no list; None where the GPU has no memory left for its pages."""
        block = self._find_block(free, size)
        if not block.mapped and not self._map_block(block, min(block.size, size)):
            return None
        while block.size < size:  # a free block, with addresses without memory after it
            following = block.next
            if following is None or not self._map_block(following, min(following.size, size - block.size)):
                return None
            block = following
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
        page, capacity = self.page(free.pool), self.allocator.capacity
        size = -(-(capacity + capacity // 8) // page) * page
        address = self.allocator.addresses.take(size)
        self.segments[address] = size
        block = self.allocator.heads[address] = Block(address, size, free, None, None)
        block.segment, block.mapped = (address, page), False
        free.unmapped.append(block)
        self.allocator._choose_way()
        return block

    def _map_block(self, block: Block, size: int) -> bool:
        """Put memory behind the first `size` bytes of an unmapped block, in whole pages, and make it a free block."""
        owner, free = self.allocator, block.free_list
        _, page = _segment(block)
        size = -(-size // page) * page
        if size > owner.free_on_gpu:
            return False
        address, stream = block.address, free.stream
        free.unmapped.remove(block)
        block.mapped = True
        if size < block.size:
            rest = self._split(block, size)
            rest.mapped = False
            self._insert_unmapped(rest)
        self._merge_neighbours(block)
        free.insert(block)
        owner.statistics.segment_taken(free.pool.counts, size, 0)
        if block.prev is None and block.segment_context is None:
            block.segment_context = owner._context
        owner.changed("segment_map", address, size, stream, owner._context)
        return True

    # -- shrinking

    def shrink(self, pool: BlockPool) -> None:
        """Unmap every page that is wholly free, and give back the addresses of segments that have none left."""
        if self.segments:
            for block in [block for block in pool.free_blocks() if block.segment is not None]:
                self._unmap_block(block)
                if block.whole and not block.mapped:
                    self._discard(block)

    def _unmap_block(self, block: Block) -> None:
        owner, free = self.allocator, block.free_list
        start, page = _segment(block)
        first = start + -(-(block.address - start) // page) * page
        last = start + (block.address + block.size - start) // page * page
        if first >= last:
            return
        free.remove(block)
        if first > block.address:
            before = Block(block.address, first - block.address, free, block.prev, block)
            before.segment = block.segment
            before.segment_context, block.segment_context = block.segment_context, None
            self._link(before)
            block.size -= before.size
            block.address = first
            free.insert(before)
        if last < first + block.size:
            free.insert(self._split(block, last - first))
        block.mapped = False
        owner.timeline.wait_until(owner.timeline.ready(free.stream))  # as unmapHandles does
        self._merge_neighbours(block)
        self._insert_unmapped(block)
        owner.statistics.segment_given_back(free.pool.counts, last - first, 0)
        owner.changed("segment_unmap", first, last - first, free.stream, owner._context or block.segment_context)

    def _discard(self, block: Block) -> None:
        del self.segments[block.address], self.allocator.heads[block.address]
        block.free_list.unmapped.remove(block)
        self.allocator._choose_way()

    # -- pieces

    def _split(self, block: Block, size: int) -> Block:
        """What is left of a block after its first `size` bytes, as a block of its own."""
        rest = Block(block.address + size, block.size - size, block.free_list, block, block.next)
        rest.segment = block.segment
        self._link(rest)
        block.size = size
        return rest

    def _link(self, block: Block) -> None:
        """The neighbours of a new block learn of it."""
        if block.prev is not None:
            block.prev.next = block
        else:
            self.allocator.heads[block.address] = block
        if block.next is not None:
            block.next.prev = block

    def _merge_neighbours(self, block: Block) -> None:
        """Neighbours that are free as well, and mapped or not like it, become part of a block that is in no list."""
        for other in (block.prev, block.next):
            if other is not None and not other.used and other.mapped == block.mapped:
                if other.mapped:
                    other.free_list.remove(other)
                else:
                    other.free_list.unmapped.remove(other)
                merge(self.allocator, block, other)

    def _insert_unmapped(self, block: Block) -> None:
        block.free_list.unmapped.append(block)
        block.free_list.unmapped.sort(key=lambda other: other.address)


def merge(allocator, block: Block, other: Block) -> None:
    """`other`, a neighbour that is in no list, becomes part of `block`."""
    if other is block.prev:
        block.address, block.prev, block.segment_context = other.address, other.prev, other.segment_context
        if block.prev is not None:
            block.prev.next = block
        else:
            allocator.heads[block.address] = block
    else:
        block.next = other.next
        if block.next is not None:
            block.next.prev = block
    block.size += other.size


def get_free_block(free: FreeList, size: int, config) -> Block | None:
    """The free block that PyTorch would take for a request where segments may be expandable or too large to split."""
    blocks, index = free.blocks, free.at_least(size)
    if index == len(blocks):
        return None
    if blocks[index].segment is not None:
        if config.expandable_segments:  # what can grow counts as large as it can become, so that it is taken last
            while blocks[index].segment is not None and _reach(blocks[index]) > _reach(*blocks[index + 1 : index + 2]):
                index += 1
        else:  # they have been turned off since
            index = next((i for i in range(index, len(blocks)) if blocks[i].segment is None), len(blocks))
            if index == len(blocks):
                return None
    most = config.max_split_size
    if size < most <= blocks[index].size:
        return None
    if size >= most and blocks[index].size >= size + config.max_non_split_rounding:
        return None
    return free.pop(index)


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
