"""The caching allocator: hand-computed cases as scripts (tests/virtualgpu/memory/programs.py), invariants under random programs, and
its words when memory is out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import virtualgpu
from tests.virtualgpu.memory.programs import GIB, KIB, MIB, STEPS, Program, allocator, check, play
from virtualgpu.memory.allocator import format_size
from virtualgpu.memory.blocks import Addresses

GROWING = "expandable_segments:True"
FRACTION = "per_process_memory_fraction:0.5"


@pytest.mark.parametrize(
    "settings, request_, allocated, reserved",
    [
        ("", 1, 512, 2 * MIB),
        ("", 512, 512, 2 * MIB),
        ("", 513, 1024, 2 * MIB),
        ("", MIB, MIB, 2 * MIB),
        ("", MIB + 1, MIB + 512, 20 * MIB),
        ("", 10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        ("", 10 * MIB, 10 * MIB, 10 * MIB),
        ("", 10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        ("", 11 * MIB, 12 * MIB, 12 * MIB),  # what would be left over, 1 MiB, is not split off: it counts as allocated
        ("", 100 * MIB, 100 * MIB, 100 * MIB),
        ("large_segment_size_mb:30", 2 * MIB, 2 * MIB, 30 * MIB),
        ("roundup_power2_divisions:4", 1200 * KIB, 1280 * KIB, 20 * MIB),  # 1024, 1280, 1536: the source's example
        ("roundup_power2_divisions:4", 1024 * KIB, 1024 * KIB, 2 * MIB),
        ("roundup_power2_divisions:4", 2048, 2048, 2 * MIB),  # no more than 512 bytes a division: by 512 as ever
        ("roundup_power2_divisions:4", 2049, 2560, 2 * MIB),
        ("roundup_power2_divisions:1", 1200 * KIB + 1, 1200 * KIB + 512, 20 * MIB),
        ("roundup_power2_divisions:[2:2,>:0]", 3 * MIB + 1, 4 * MIB, 20 * MIB),  # sizes from 2 to 4 MiB: halves
        ("roundup_power2_divisions:[2:2,>:0]", 5 * MIB + 1, 5 * MIB + 512, 20 * MIB),
        ("roundup_power2_divisions:[2:2,>:0]", 600 * KIB, 768 * KIB, 2 * MIB),  # below the first boundary: its own
    ],
)
def test_one_request(settings, request_, allocated, reserved):
    memory = allocator(GIB, settings)
    block = memory.malloc(request_)
    assert (memory.allocated, memory.reserved) == (allocated, reserved)
    memory.free(block)
    assert (memory.allocated, memory.reserved) == (0, reserved), "a freed block stays reserved"
    assert memory.empty_cache() == reserved and memory.reserved == 0
    assert (memory.peak_allocated, memory.peak_reserved) == (allocated, reserved)
    assert memory.malloc(0) is None and memory.free(None) is None, "no bytes need no block"


SCRIPTS = """
the best fitting hole is used             | | 100 | a=300K b=100K c=200K d=100K e=400K -a -c f=150K f==c g=250K g==a
free neighbours join                      | | 100 | a=400K b=400K c=400K d=400K -a -c -b e=1000K e==a
much is free, and nothing fits            | | 20  | a=4 b=4 c=4 d=4 e=4 -a -c -e f=5! 8/20 empty=0 f=4 12/20
where the GPU is full, the cache goes     | | 100 | a=60 -a 0/60 b=80 80/80 num_alloc_retries=1 num_ooms=0
a failing request is counted              | | 10  | a=11! num_alloc_retries=1 num_ooms=1 num_sync_all_streams=1 max_split_size=-1 0/0
the block in the newer segment is taken   | | 100 | a=30 b=30 -a -b c=30 c==b c!=a empty=30 30/30 d=30 d==a
a stream reuses its own blocks            | | 100 | a=400K@7 -a b=400K b!=a c=400K@7 c==a reserved_bytes.all.current=4194304
a shared block waits                      | | 100 | a=512K a>7 7:5 -a 0/2 requested_bytes.all.current=524288 active.all.current=1
    active_bytes.all.current=524288 b=512K b!=a active.all.peak=2 host:5 c=512K c==a active.all.current=2
the last of several streams counts        | | 100 | a=300K 7:5 9:8 a>7 a>9 a>7 -a host:5 b=300K b!=a host:8 c=300K c==a
use on its own stream changes nothing     | | 100 | a=300K@7 a>7 7:5 -a active.all.current=0
blocks that wait do not join              | | 100 | a=300K b=300K c=300K b>7 7:5 -b -a -c d=700K d==c
out of memory waits for streams           | | 100 | a=60 a>7 7:5 -a b=60 60/60 host=5 num_alloc_retries=1
    num_sync_all_streams=1 num_ooms=0 num_device_alloc=2 num_device_free=1
empty_cache waits for them                | | 100 | a=2 a>7 7:3 -a empty=20 host=3
one stream's cache makes room for another | | 100 | a=60@7 -a b=60 60/60 c=60@7!

large blocks serve large requests alone   | max_split_size_mb:40 | 1000 | a=100 -a max_split_size=41943040 oversize_segments.current=1
    oversize_allocations.current=0 oversize_allocations.peak=1 b=30 30/130 c=80 110/210 d=81 210/210 d==a
too large ones go first, the largest      | max_split_size_mb:40 | 300 | a=30 b=50 c=60 d=100 -a -b -c -d e=70 num_device_free=1
    70/210 f=105 176/206 num_alloc_retries=0
what was not used for long is garbage     | garbage_collection_threshold:0.6,per_process_memory_fraction:0.5 | 200 | a=12 b=14 c=40 -a -b -c
    d=12 -d e=40 40/66 f=30 70/82 num_alloc_retries=0
without a fraction nothing is             | garbage_collection_threshold:0.6,per_process_memory_fraction:1.0 | 200 | a=12 b=14 c=40 -a -b -c
    d=12 -d e=40 40/66 f=30 70/96 num_alloc_retries=0
garbage of the same age goes together     | garbage_collection_threshold:0.6,per_process_memory_fraction:0.5 | 200 | a=32 b=34 -a -b c=1
    1/2 num_alloc_retries=0

segments grow by pages of 2 and 20 MiB    | expandable_segments:True | 1000 | a=25 25/40 b=30 55/60 b==a+25 c=1 56/62
    segment.all.allocated=0 inactive_split.all.allocated=0 num_device_alloc=3
growing batches leave no slivers          | expandable_segments:True | 1000 | a=100 -a a=120 -a a=140 -a 0/140
and those of fixed size do                | | 1000 | a=100 -a a=120 -a a=140 -a 0/360
free pages between are unmapped           | expandable_segments:True | 100 | a=20 b=20 c=20 d=20 e=20 -a -c -e 40/100 f=60 100/100
    num_alloc_retries=1 g=2!
a page in use stays                       | expandable_segments:True | 1000 | a=25 b=30 -a empty=20 30/40 c=4 c==a+20 -b d=31 d==c+4
all is given back                         | expandable_segments:True | 1000 | a=1 b=3 c=50 -a -b -c empty=62 0/0 num_device_free=2
one segment for each stream and pool      | expandable_segments:True | 1000 | a=100K b=3 c=100K@7 d=3@7 reserved_bytes.all.current=46137344
switched off they serve no more           | expandable_segments:True | 1000 | a=30 -a 0/40 configure: b=30 30/70 b!=a
    configure:expandable_segments:True c=30 60/70 c==a
"""
ROWS = [row.split("|") for row in SCRIPTS.replace("\n    ", " ").strip().splitlines() if row]


@pytest.mark.parametrize(("name", "settings", "capacity", "script"), ROWS, ids=[row[0].strip() for row in ROWS])
def test_by_hand(name, settings, capacity, script):
    memory = allocator(int(capacity) * MIB, settings.strip())
    blocks = {id(block): block for block in play(memory, script).values()}
    check(memory, [block for block in blocks.values() if block.used and not block.waiting])


def test_the_moment_of_the_free_counts():
    memory = allocator(100 * MIB)
    block = memory.malloc(300 * KIB)
    memory.record_stream(block, 7)
    memory.free(block, {7: 1.0})
    memory.timeline.work[7], memory.timeline.host = 9.0, 1.0  # work queued after the free does not delay it
    assert memory.malloc(300 * KIB).address == block.address


@pytest.mark.parametrize(
    ("capacity", "settings", "options", "held", "asked", "words"),
    [
        (256, "", {"device": 1, "context": 50 * MIB, "others": 6 * MIB}, 150, 90 * MIB + 1,
         r"^CUDA out of memory\. Tried to allocate 92\.00 MiB\. GPU 1 has a total capacity of 256\.00 MiB of which 50\.00 MiB is free\. "
         r"Including non-PyTorch memory, this process has 200\.00 MiB memory in use\. Of the allocated memory 150\.00 MiB is allocated by "
         r"PyTorch, and 0 bytes is reserved by PyTorch but unallocated\. If reserved but unallocated memory "),
        (100, "", {"context": 10 * MIB, "others": lambda: 30 * MIB}, 0, 70 * MIB, r"of which 60\.00 MiB is free"),
        (100, FRACTION, {}, 0, 60 * MIB, r"50\.00 MiB allowed; Of the allocated memory"),
        (1024, f"{GROWING},per_process_memory_fraction:0.05", {}, 30, 12 * MIB, r"51\.20 MiB allowed"),
        (20, "", {}, 8, 13 * MIB, r"8\.00 MiB is allocated by PyTorch, and 12\.00 MiB is reserved"),
    ],
)  # fmt: skip
def test_out_of_memory_in_pytorchs_words(capacity, settings, options, held, asked, words):
    memory = allocator(capacity * MIB, settings, **options)
    memory.malloc(held * MIB)
    before = memory.allocated, memory.reserved
    with pytest.raises(torch.OutOfMemoryError, match=words):
        memory.malloc(asked)
    assert (memory.allocated, memory.reserved, memory.statistics.ooms) == (*before, 1), "the request changed nothing"


def test_what_others_hold_may_change():
    held = [30 * MIB]
    memory = allocator(100 * MIB, context=10 * MIB, others=lambda: held[0])
    assert (memory.free_on_gpu, memory.others_held) == (60 * MIB, 30 * MIB)
    held[0] = 20 * MIB
    memory.malloc(70 * MIB)
    memory.others = 5 * MIB
    assert memory.free_on_gpu == 15 * MIB
    memory.limit_to(72 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"72.00 MiB allowed"):
        memory.malloc(3 * MIB)


@pytest.mark.parametrize("size, text", [(0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (3 * MIB // 2, "1.50 MiB"),
                                        (GIB, "1024.00 MiB"), (15 * GIB, "15.00 GiB")])  # fmt: skip
def test_sizes_are_printed_as_pytorch_prints_them(size, text):
    assert format_size(size) == text


def test_require_of_several_sizes_together():
    memory = allocator(100 * MIB)
    memory.require([60 * MIB, 40 * MIB])
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 42.00 MiB.*60.00 MiB is allocated by PyTorch"):
        memory.require([60 * MIB, 42 * MIB])
    assert (memory.allocated, memory.statistics.ooms) == (0, 1)
    memory.require([])
    memory.require(0)


# -- where segments lie


def test_a_new_range_lies_below_and_holes_are_filled_from_below():
    addresses = Addresses(0)
    a, b, c = (addresses.take(size) for size in (2 * MIB, 20 * MIB, 3 * MIB))
    assert (a - b, b - c, a % (2 * MIB)) == (20 * MIB, 4 * MIB, 0)
    addresses.give_back(a, 2 * MIB)
    addresses.give_back(c, 3 * MIB)
    assert addresses.take(20 * MIB) == c - 20 * MIB, "neither hole is large enough"
    assert addresses.take(2 * MIB) == c
    addresses.give_back(b, 20 * MIB)
    assert [addresses.take(12 * MIB) for _ in range(2)] == [c + 2 * MIB, c + 14 * MIB], "24 MiB in one hole"
    assert addresses.holes == []


def test_a_fresh_model_sharded_by_fsdp2():
    """GPT-2 on rank 0 of 8: an H100 had 91,563,008 bytes (PyTorch 2.11, 2026-11-26)."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(768), nn.LayerNorm(768)
            self.qkv, self.out = nn.Linear(768, 3 * 768), nn.Linear(768, 768)
            self.up, self.down = nn.Linear(768, 4 * 768), nn.Linear(4 * 768, 768)

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(50304, 768), nn.Embedding(512, 768)
            self.blocks = nn.ModuleList(Block() for _ in range(12))
            self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 50304, bias=False)

    with virtualgpu.dry_run(like="H100", world_size=8):
        torch.distributed.init_process_group("nccl")
        try:
            from torch.distributed.fsdp import fully_shard

            with torch.device("cuda"):
                model = GPT()
            tokens = torch.randint(0, 50304, (4, 512), device="cuda")
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            assert torch.cuda.memory_allocated() == 91_563_008
            del tokens
        finally:
            torch.distributed.destroy_process_group()


# -- random programs


@given(st.lists(STEPS, min_size=30, max_size=120), st.sampled_from(["", GROWING]), st.booleans(), st.integers(0, 100))
def test_bytes_add_up(steps, settings, switch, at):
    """Also where the setting changes on the way, and memory runs out."""
    memory = allocator(60 * MIB if not settings else 100 * MIB, settings)
    program, largest = Program(memory, streams=True), 0
    for number, step in enumerate(steps):
        before = memory.allocated, len(program.live)
        if not program.step(*step):
            assert (memory.allocated, len(program.live)) == before
        check(memory, program.live)
        largest = max(largest, memory.allocated)
        if switch and number % 20 == at % 20:
            memory.configure(CONFIGURED["" if memory.config.expandable_segments else GROWING])
    assert memory.peak_allocated == largest
    for block in program.live:
        memory.free(block)
    memory.empty_cache()
    mapped = [block for block in memory.all_blocks() if block.mapped]  # the address range of a failed malloc may stay
    assert (memory.allocated, memory.statistics.now(2), memory.reserved, mapped) == (0, 0, 0, [])


CONFIGURED = {settings: allocator(GIB, settings).config for settings in ("", GROWING)}


@given(
    st.lists(STEPS, min_size=30, max_size=120),
    st.integers(1, 60 * MIB),
    st.sampled_from([0, 7]),
    st.sampled_from(["", GROWING]),
)
def test_require_says_what_malloc_would(steps, nbytes, stream, settings):
    """Both from the same state: it raises where malloc raises, and is no malloc in the figures."""
    memories = [allocator(60 * MIB if not settings else 100 * MIB, settings) for _ in range(2)]
    programs = [Program(memory, streams=True) for memory in memories]
    outcomes = []
    for memory, program, call in zip(memories, programs, ("malloc", "require"), strict=True):
        for step in steps:
            program.step(*step)
        try:
            getattr(memory, call)(nbytes, stream)
            outcomes.append("room")
        except torch.OutOfMemoryError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    if settings:
        return
    figures = [memory.statistics.nested() for memory in memories]
    if outcomes[0] != "room":
        assert figures[0] == figures[1]
        return
    counts = [one["allocation"]["all"]["allocated"] for one in figures]
    assert counts[1] == counts[0] - 1
    block = memories[1].malloc(
        nbytes, stream
    )  # now there is room, and no more is asked of the GPU than by malloc alone
    assert memories[1].reserved == memories[0].reserved and block.requested == nbytes
    assert memories[1].statistics.retries == memories[0].statistics.retries
    check(memories[1], [*programs[1].live, block])
