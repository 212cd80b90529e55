"""What each rank's GPU holds: shards, gathered parameters, and what other processes hold of the same GPU."""

import os

import torch
from torch import nn

import virtualgpu
from virtualgpu.engine.machine import CONTEXT


def sharded() -> dict[str, int]:
    """Bytes of this rank's GPU: after sharding, at the peak of a step, after it."""
    from torch.distributed import get_rank
    from torch.distributed.fsdp import fully_shard

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = (
        ":0:0"  # a product's own memory is no concern here, and PyTorch before 2.15 keeps it
    )
    with torch.device("cuda", get_rank()):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        begin = torch.cuda.memory_allocated()
        x = torch.randn(4, 1024)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(x).sum().backward()
            peak = torch.cuda.max_memory_allocated()
            optimizer.step()
            after = torch.cuda.memory_allocated()
            optimizer.zero_grad()
    return {"sharded": begin, "peak": peak, "after": after, "idle": torch.cuda.memory_allocated()}


def test_shards_take_sixteen_bytes_a_parameter_over_the_ranks(on_gpus):
    parameters, layer = 8 << 20, 4 << 20
    for n in (1, 2, 4):
        ranks = on_gpus(sharded, n=n, dry=True)
        assert all(rank == ranks[0] for rank in ranks)
        held = ranks[0]
        slack = 64 << 10  # inputs, steps' counters
        assert 0 <= held["sharded"] - 4 * parameters // n < slack
        assert 0 <= held["after"] - 16 * parameters // n < slack
        assert 0 <= held["idle"] - 12 * parameters // n < slack
        if n == 2:
            assert on_gpus(sharded, n=n) == ranks, "with numbers the same bytes"
        if n > 1:  # two layers gathered and their gradients, beside the shards
            assert 16 * parameters // n + layer < held["peak"] < 16 * parameters // n + 7 * layer


def beside_others(nbytes: int) -> tuple[int, int, str]:
    """All ranks on GPU 0: what each sees free before and after, and what happens where both want more than there is."""
    import torch.distributed as dist

    torch.cuda.set_device(0)
    x = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    dist.barrier(dist.new_group(backend="gloo"))
    free, capacity = torch.cuda.mem_get_info(0)
    try:
        torch.empty(free + 1, dtype=torch.uint8, device="cuda:0")
        said = "enough"
    except torch.OutOfMemoryError as error:
        said = str(error)
    dist.barrier(dist.new_group(backend="gloo"))
    return free, capacity - x.nbytes, said


def test_processes_share_a_gpu(on_gpus):
    (free, without, said), (other, *_) = on_gpus(beside_others, 1 << 30)
    assert free == other  # each sees both
    assert without - free >= 1 << 30
    assert "CUDA out of memory" in said


def test_a_notebook_and_its_ranks_share_a_gpu(on_gpus):
    from virtualgpu.run.ranks import launch

    virtualgpu.gpus(2)
    before = launch(torch.cuda.mem_get_info)[0][0]
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:0")
    assert (
        before - launch(torch.cuda.mem_get_info)[0][0] == held.nbytes + CONTEXT
    )  # before, only its ranks had used the GPU
