"""torch.cuda.MemPool: whose blocks serve whom, and when they go back to the GPU."""

import gc
import threading

import pytest
import torch

import virtualgpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def gpus():
    return virtualgpu.gpus(2)


def block(mib: int = 1):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def reserved() -> int:
    return torch.cuda.memory_reserved() // MIB


def test_blocks_of_a_pool_serve_it_alone():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = block()
        assert pool.use_count() == 2
    assert (pool.use_count(), reserved(), len(pool.snapshot())) == (1, 2, 1)
    place = inside.data_ptr()
    del inside
    outside = block()
    assert (outside.data_ptr() != place, reserved()) == (True, 4)
    with torch.cuda.use_mem_pool(pool):
        assert block().data_ptr() == place
    assert torch.cuda.memory_allocated() == MIB


def test_its_segments_say_whose_they_are():
    pool = torch.cuda.MemPool()
    outside = block()
    with torch.cuda.use_mem_pool(pool):
        inside = [block(), block(), block()]
    assert len(pool.snapshot()) == 2
    ids = [segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()]
    assert sorted(ids) == sorted([(0, 0), pool.id, pool.id])
    assert sum(segment["allocated_size"] for segment in pool.snapshot()) == 3 * MIB
    del outside, inside


def test_what_is_free_stays_until_the_pool_goes():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept, gone = block(30), block(30)
    del gone
    torch.cuda.empty_cache()
    assert reserved() == 60
    del pool
    gc.collect()
    assert reserved() == 30
    del kept
    torch.cuda.empty_cache()
    assert reserved() == 0


def test_only_the_thread_that_asked_and_not_its_backward_pass():
    pool, found = torch.cuda.MemPool(), []
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(MIB, device="cuda", requires_grad=True)
        thread = threading.Thread(target=lambda: found.append(block()))
        thread.start()
        thread.join()
        before = sum(segment["allocated_size"] for segment in pool.snapshot())
        (x * 2).sum().backward()
        del thread
    assert found[0].numel() == MIB
    assert sum(segment["allocated_size"] for segment in pool.snapshot()) == before == 4 * MIB
    assert x.grad[0].item() == 2


def test_a_pool_on_another_gpu_and_one_inside_another():
    outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(outer, device=1), torch.cuda.use_mem_pool(outer):
        with torch.cuda.use_mem_pool(inner):
            one = block()
        two, there = block(), torch.ones(1, device="cuda:1")
    assert [len(pool.snapshot()) for pool in (outer, inner)] == [2, 1]
    assert {segment["device"] for segment in outer.snapshot()} == {0, 1}
    del one, two, there


def test_a_pool_may_go_in_the_middle_of_malloc():
    """As Python's collector has it: its destructor changes nothing while the allocator works."""
    pools = [torch.cuda.MemPool()]
    with torch.cuda.use_mem_pool(pools[0]):
        block(30)
    allocator, seen = virtualgpu.machine().gpus[0].memory, []

    def listener(*event):
        if pools:
            before = allocator.reserved
            pools.clear()
            seen.append((before, allocator.reserved))

    allocator.watch(listener)
    outside = block(40)
    allocator.watch(listener, on=False)
    assert len({*seen[0]}) == 1, "the pool's segment was given back inside malloc"
    assert reserved() == 40
    del outside


def test_no_split():
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        both = [block(), block()]
    assert [segment["total_size"] for segment in pool.snapshot()] == [2 * MIB, 2 * MIB]
    del both


def test_ids_and_what_is_not_modelled():
    assert torch.cuda.graph_pool_handle() != torch.cuda.MemPool().id != torch.cuda.MemPool().id
    with pytest.raises(NotImplementedError, match="model no_split alone"):
        torch.cuda.MemPool(use_on_oom=True)
