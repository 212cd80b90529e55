"""What NCCL's process group refuses, in its words; and groups of a backend that somebody wrote."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import virtualgpu


@pytest.fixture
def alone():
    """A group of one rank, which needs no other process."""
    virtualgpu.gpus(1, like="T4")
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def rooted(options, root):
    options.rootRank = root
    return options


INVALID_ROOT = (
    r"^NCCL error in: .*, invalid argument \(run with NCCL_DEBUG=WARN for details\), NCCL version 2\..*\n"
    r"ncclInvalidArgument: Invalid value for an argument\.\nLast error:\n{} : invalid root {} \(root should be in the 0\.\.1 range\)$"
)
REFUSED = [
    (lambda g, x: g._allgather_base(x.repeat(3), x), ValueError, "output tensor size must be equal to world_size"),
    (lambda g, x: g._allgather_base(x.int(), x), TypeError, "output tensor must have the same type as input tensor"),
    (lambda g, x: g._reduce_scatter_base(x, x.repeat(3)), ValueError, "input tensor must be the same size as output"),
    (lambda g, x: g._reduce_scatter_base(x.int(), x), TypeError, "input tensor must be the same type as the output"),
    (lambda g, x: g.gather([[x]], [x], rooted(dist.GatherOptions(), -1)), ValueError, "invalid root rank: -1"),
    (lambda g, x: g.scatter([x], [[x]], rooted(dist.ScatterOptions(), 1)), ValueError, "invalid root rank: 1"),
    (lambda g, x: g.gather([[x, x]], [x], rooted(dist.GatherOptions(), 0)), ValueError, "Incorrect output list size 2"),
    (
        lambda g, x: g.scatter([x], [[x[:1]]], rooted(dist.ScatterOptions(), 0)),
        ValueError,
        r"at index 0 \(expected \(4\), got \(1\)\)",
    ),
    (lambda g, x: g.gather([[x]], [], rooted(dist.GatherOptions(), 0)), RuntimeError, "There were no tensor arguments"),
    (lambda g, x: g.allreduce([x + 1j], dist.ReduceOp.MAX), RuntimeError, "does not support MAX on complex tensors"),
    (lambda g, x: dist.all_reduce(x.to_sparse()), RuntimeError, "NCCL does not support all_reduce with sparse tensors"),
    (lambda g, x: dist.broadcast(x.to_sparse(), 0), ValueError, "Tensors must be CUDA and dense"),
    (lambda g, x: dist.all_reduce(torch.ones(2, 3, device="cuda").t()), ValueError, "Tensors must be contiguous"),
    # in the words of an H100 with PyTorch 2.11
    (lambda g, x: dist.all_reduce(x.short()), TypeError, "^Input .* not supported for NCCL process group: Short$"),
    (lambda g, x: dist.broadcast(x.to(torch.uint16), 0), TypeError, "for NCCL process group: UInt16$"),
    (lambda g, x: dist.all_to_all_single(x.short(), x.short()), RuntimeError, "^Unconvertible NCCL type Short$"),
    (lambda g, x: g.broadcast(x, 1), dist.DistBackendError, INVALID_ROOT.format("Broadcast", 1)),
    (lambda g, x: dist.reduce(x, 5), dist.DistBackendError, INVALID_ROOT.format("Reduce", 5)),
]


def test_refused(alone):
    x = torch.ones(4, device="cuda")
    for wrong, kind, words in REFUSED:
        with pytest.raises(kind, match=words):
            wrong(alone, x)
    dist.all_reduce(x)  # nothing of them is left behind
    assert x.tolist() == [1] * 4


def test_a_group_for_cpu_tensors_alone_takes_no_gpus():
    """As on an H100."""
    virtualgpu.gpus(1, like="T4")
    dist.init_process_group("cpu:gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        dist.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match=r"^No backend type associated with device type cuda$"):
            dist.all_reduce(torch.ones(2, device="cuda"))
    finally:
        dist.destroy_process_group()


def test_ranks_that_are_threads():
    """PyTorch's tests have such a group, written in Python: what it makes is on the GPU of what it was given."""
    from torch.testing._internal.distributed import multi_threaded_pg

    virtualgpu.gpus(2, like="T4")
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store, said = dist.HashStore(), {}

    def rank(number):
        dist.init_process_group("threaded", rank=number, world_size=2, store=store)
        mine = torch.full((2,), 1.0 + number, device=number)
        total = functional.all_reduce(mine, "sum", dist.group.WORLD) + 0  # waits for it
        dist.broadcast(mine, 0)
        said[number] = total.device.index, total.tolist(), mine.device.index, mine.tolist()
        if hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # PyTorch 2.11 itself raises without
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert said == {number: (number, [3, 3], number, [1, 1]) for number in range(2)}


def test_attention_deep_in_a_thread():
    """Its C++ makes a mask "on the CPU", which belongs to the call, wherever the thread's first frames are."""
    virtualgpu.gpus(1, like="T4")
    x = torch.randn(1, 1, 4, 8, device="cuda", requires_grad=True)
    good = []

    def at(depth):
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.1)
        good.append(out.device.type)
        if depth:
            at(depth - 1)

    thread = threading.Thread(target=at, args=(30,))
    thread.start()
    thread.join()
    assert good == ["cuda"] * 31


def two_on_one_gpu() -> list[str]:
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.barrier()  # on the GPU of the rank's number, as ProcessGroupNCCL guesses
    group, said = dist.new_group(backend="nccl"), []
    for call in (lambda: dist.all_reduce(torch.ones(1, device="cuda"), group=group), lambda: dist.barrier(group)):
        try:
            call()
        except dist.DistBackendError as error:
            said.append(str(error))
    torch.cuda.set_device(dist.get_rank())  # the cure that it names
    for mended in (group, dist.new_group(backend="nccl")):
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x, group=mended)
        dist.barrier(mended)
        said.append(x.item())
    return said


def test_nccl_takes_one_gpu_for_each_rank(on_gpus):
    for said, again, *mended in on_gpus(two_on_one_gpu):
        assert "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 00000000:01:00.0" in said
        assert "torch.cuda.set_device" in said
        assert again == said and mended == [2.0, 2.0]  # a second communicator, once the cause is gone


def world_after_world(path: str) -> list[float]:
    """As under torchrun, whose store outlives a world."""
    rank, sums = dist.get_rank(), []
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    for _ in range(4):
        dist.init_process_group("nccl", store=dist.PrefixStore("worker", store), rank=rank, world_size=2)
        x = torch.ones(1, device=f"cuda:{rank}")
        dist.all_reduce(x)
        sums.append(x.item())
        dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.PrefixStore("last", store), rank=rank, world_size=2)
    return sums


def test_a_world_is_made_anew_in_the_same_store(on_gpus, tmp_path):
    assert on_gpus(world_after_world, str(tmp_path / "store")) == [[2.0] * 4] * 2
