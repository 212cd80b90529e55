"""Programs for the allocator: random ones, with what must hold after each of their steps, and scripts, with what they expect."""

import itertools
import re

import hypothesis.strategies as st
import torch

from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.config import parse

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(1, 30 * MIB))
STREAMS = st.sampled_from([0, 0, 7, 9])
STEPS = st.one_of(
    *[st.tuples(st.just("malloc"), SIZES, STREAMS)] * 3,
    *[st.tuples(st.just("free"), SIZES, STREAMS)] * 2,
    st.tuples(st.just("share"), SIZES, STREAMS),
    st.tuples(st.just("pass"), st.integers(0, 5), STREAMS),
    st.just(("empty_cache", 0, 0)),
)


class Time:
    """Each stream is busy for as long as `work` says; the host waits by moving on."""

    def __init__(self):
        self.host, self.work = 0.0, {}

    def now(self) -> float:
        return self.host

    def ready(self, stream: int) -> float:
        return max(self.host, self.work.get(stream, 0.0))

    def wait_until(self, moment: float) -> None:
        self.host = max(self.host, moment)


class Program:
    """Carries out steps, one stream or several; `live`: the blocks that it holds."""

    def __init__(self, memory: CachingAllocator, streams: bool):
        self.memory, self.streams, self.live = memory, streams, []

    def step(self, action: str, number: int, stream: int) -> bool:
        """False: memory ran out."""
        memory, stream = self.memory, stream if self.streams else 0
        if action == "malloc":
            try:
                self.live.append(memory.malloc(number, stream))
            except torch.OutOfMemoryError:
                return False
        elif action == "free" and self.live:
            memory.free(self.live.pop(number % len(self.live)))
        elif action == "share" and self.live and self.streams:
            memory.record_stream(self.live[number % len(self.live)], stream)
        elif action == "pass" and self.streams:
            time = memory.timeline
            time.work[stream] = time.ready(stream) + number
            time.host += 1
        elif action == "empty_cache":
            memory.empty_cache()
        return True


def check(memory: CachingAllocator, live: list) -> None:
    """Bytes add up over blocks and segments, nothing overlaps, and free neighbours are joined."""
    blocks = memory.all_blocks()
    mapped = [block for block in blocks if block.mapped]
    for block in blocks:
        assert block.size > 0 and block.size % 512 == 0
        if block.next is not None:
            assert block.next.prev is block and block.next.address == block.address + block.size
            assert block.next.free_list is block.free_list, "a segment is of one stream and one pool"
            assert block.used or block.next.used or block.mapped != block.next.mapped, "free neighbours did not join"
    assert all(a.address + a.size <= b.address for a, b in itertools.pairwise(blocks)), "two blocks overlap"
    free = [block for pool in memory.pools for block in pool.free_blocks()]
    assert {id(block) for block in free} == {id(block) for block in mapped if not block.used}
    unmapped = [block for pool in memory.pools for entry in pool.lists.values() for block in entry.unmapped]
    assert {id(block) for block in unmapped} == {id(block) for block in blocks if not block.mapped}
    assert memory.reserved == sum(block.size for block in mapped) <= memory.capacity
    assert memory.allocated == sum(block.size for block in live)
    assert {id(block) for block in live} == {id(block) for block in mapped if block.used and not block.waiting}
    waiting = [block for block in mapped if block.waiting]
    assert memory.statistics.now(2) == sum(block.requested for block in live + waiting)
    figures = memory.statistics.nested()
    assert figures["active_bytes"]["all"]["current"] == sum(block.size for block in mapped if block.used)
    assert figures["active"]["all"]["current"] == len(live) + len(waiting)
    for name, small in (("small_pool", True), ("large_pool", False)):
        pieces = [
            b for b in mapped if not b.used and not b.whole and b.segment is None and b.free_list.pool.small is small
        ]
        assert figures["inactive_split"][name]["current"] == len(pieces)
        assert figures["inactive_split_bytes"][name]["current"] == sum(block.size for block in pieces)
        of_pool = [block for block in mapped if block.free_list.pool.small is small]
        assert figures["reserved_bytes"][name]["current"] == sum(block.size for block in of_pool)


def allocator(capacity: int = 1 << 40, settings: str = "", **keywords) -> CachingAllocator:
    """Under a clock of its own; settings: as in PYTORCH_CUDA_ALLOC_CONF."""
    return CachingAllocator(capacity, timeline=Time(), config=parse(settings), **keywords)


SCRIPT = re.compile(
    r"(?P<name>[a-z])=(?P<size>\d+)(?P<unit>[BK]?)(@(?P<stream>\d))?(?P<fails>!?)"  # a=25 (MiB), b=300K@7: 300 KiB on stream 7, c=9!: out of memory
    r"|-(?P<freed>[a-z])|(?P<used>[a-z])>(?P<user>\d)"  # freed; used by another stream
    r"|(?P<worker>\d):(?P<until>\d)|host:(?P<host>\d)"  # a stream works until then; the host has come so far
    r"|(?P<at>[a-z])(?P<sign>==|!=)(?P<other>[a-z])(\+(?P<offset>\d+))?"  # lies where the other did, or so many MiB behind
    r"|(?P<allocated>\d+)/(?P<reserved>\d+)|empty=(?P<emptied>\d+)"  # MiB; what empty_cache gives back
    r"|(?P<figure>[a-z_.]{2,})=(?P<value>-?\d+)|configure:(?P<settings>\S*)"  # of memory_stats, or `host`
)


def play(memory: CachingAllocator, script: str) -> dict:
    """The blocks by their names, after all of a script's steps and expectations."""
    blocks: dict = {}
    for number, step in enumerate(script.split()):
        match = SCRIPT.fullmatch(step)
        assert match, step
        said, where = match.groupdict(), f"step {number}, {step}"
        if said["name"]:
            size = int(said["size"]) * {"B": 1, "K": KIB, "": MIB}[said["unit"]]
            try:
                blocks[said["name"]] = memory.malloc(size, int(said["stream"] or 0))
                assert not said["fails"], where
            except torch.OutOfMemoryError:
                assert said["fails"], where
        elif said["freed"]:
            memory.free(blocks[said["freed"]])
        elif said["used"]:
            memory.record_stream(blocks[said["used"]], int(said["user"]))
        elif said["worker"]:
            memory.timeline.work[int(said["worker"])] = float(said["until"])
        elif said["host"]:
            memory.timeline.host = float(said["host"])
        elif said["at"]:
            there = blocks[said["other"]].address + int(said["offset"] or 0) * MIB
            assert (blocks[said["at"]].address == there) is (said["sign"] == "=="), where
        elif said["allocated"]:
            found = memory.allocated / MIB, memory.reserved / MIB
            assert found == (int(said["allocated"]), int(said["reserved"])), where
        elif said["emptied"]:
            assert memory.empty_cache() == int(said["emptied"]) * MIB, where
        elif said["settings"] is not None:
            memory.configure(parse(said["settings"]))
        else:
            assert figure(memory, said["figure"]) == int(said["value"]), where
    return blocks


def figure(memory: CachingAllocator, name: str) -> float:
    """Of memory_stats, by its name; `host`: where the host is."""
    if name == "host":
        return memory.timeline.host
    found = memory.statistics.nested()
    for part in name.split("."):
        found = found[part]
    return found
