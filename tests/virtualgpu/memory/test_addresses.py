"""Where segments lie, and which of two free blocks of one size is taken for that."""

import torch
from torch import nn

import virtualgpu
from tests.virtualgpu.memory.test_allocator import MIB
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.blocks import Addresses


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


def test_of_two_free_blocks_the_one_in_the_newer_segment_is_taken():
    memory = CachingAllocator(1 << 30)
    old, new = memory.malloc(30 * MIB), memory.malloc(30 * MIB)
    memory.free(old)
    memory.free(new)
    assert memory.malloc(30 * MIB).address == new.address < old.address
    memory.release_cached()
    assert memory.malloc(30 * MIB).address == old.address, "given back, and taken again"


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
