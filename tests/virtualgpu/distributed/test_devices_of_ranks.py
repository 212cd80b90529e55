"""Collectives go by the GPUs that the tensors are on, as NCCL does: nobody has to call torch.cuda.set_device.

The programs are those of PyTorch's tutorial on DistributedDataParallel, in other words.
"""

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu.run.ranks import launch


class Halves(nn.Module):
    """Two layers on two devices."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.devices = first, second
        self.below, self.above = nn.Linear(8, 8).to(first), nn.Linear(8, 4).to(second)

    def forward(self, x):
        first, second = self.devices
        return self.above(torch.relu(self.below(x.to(first))).to(second))


def trained(model, rank: int, steps: int = 3) -> list:
    """The weights after some steps, each rank with samples of its own."""
    optimizer, generator = torch.optim.SGD(model.parameters(), 0.1), torch.Generator().manual_seed(1 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(torch.randn(6, 8, generator=generator))
        nn.functional.mse_loss(out, torch.randn(6, 4, generator=generator).to(out.device)).backward()
        optimizer.step()
    return [value.cpu().tolist() for value in model.state_dict().values()]


def tutorial(backend: str, folder: str) -> list:
    """model.to(rank), device_ids=[rank], barrier, and a checkpoint that each rank loads onto its own GPU."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    group, rank = dist.new_group(backend=backend), dist.get_rank()
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(0)  # as where nobody calls it
    here = f"cuda:{rank}" if on_gpus else "cpu"
    torch.manual_seed(rank)
    model = Halves(here, here)
    model = DistributedDataParallel(model, device_ids=[rank] if on_gpus else None, process_group=group)
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/model.pt")
    dist.barrier(group)
    model.load_state_dict(torch.load(f"{folder}/model.pt", map_location={"cuda:0": here}, weights_only=True))
    dist.barrier(group)
    return trained(model, rank)


def halves(backend: str, **options) -> list:
    """Model parallel within DDP: two GPUs a rank."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    group, rank = dist.new_group(backend=backend), dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        model = Halves(f"cuda:{2 * rank}", f"cuda:{2 * rank + 1}")
    else:
        model = Halves("cpu", "cpu")
    weights = trained(DistributedDataParallel(model, process_group=group, **options), rank)
    if torch.cuda.is_available():
        assert [torch.cuda.memory_allocated(gpu) > 0 for gpu in range(4)] == [gpu // 2 == rank for gpu in range(4)]
    return weights


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_ddp_tutorial(backend, on_gpus, on_cpus, tmp_path):
    assert on_gpus(tutorial, backend, str(tmp_path)) == on_cpus(tutorial, "gloo", str(tmp_path))


@pytest.mark.parametrize(
    "backend, options",
    [("gloo", {}), ("nccl", {}), ("nccl", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001})],
)
def test_model_parallel_within_ddp(backend, options, on_cpus):
    virtualgpu.gpus(4, like="T4")
    on_gpus = launch(halves, backend, nprocs=2, **options)
    assert on_gpus == on_cpus(halves, "gloo", **options)
    assert on_gpus[0] == on_gpus[1]


def one_gpu_for_both() -> list:
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    x = torch.full((2,), float(dist.get_rank()), device="cuda:0")
    dist.all_reduce(x, group=group)
    dist.barrier(group)
    return x.tolist()


def test_ranks_of_gloo_may_share_a_gpu(on_gpus):
    assert on_gpus(one_gpu_for_both) == [[1, 1], [1, 1]]


def one_after_the_other() -> tuple:
    import torch.distributed as dist

    rank, sums = dist.get_rank(), []
    for gpu in (rank, 1 - rank, rank):
        x = torch.full((2,), float(gpu), device=f"cuda:{gpu}")
        dist.all_reduce(x)
        sums.append(x.tolist())
    received = torch.zeros(1, device=f"cuda:{rank}")
    sent = torch.full((1,), 5.0 + rank, device=f"cuda:{rank}")
    torch.cuda.set_device(0)  # a batch is of its tensors' GPU, too
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    ):
        work.wait()
    return sums, received.item(), sorted(index for _, index in virtualgpu.machine().communicators.known)


def test_a_communicator_for_each_gpu_of_a_rank(on_gpus):
    for rank, (sums, received, gpus) in enumerate(on_gpus(one_after_the_other)):
        assert sums == [[1, 1]] * 3 and received == 6 - rank and gpus == [0, 1]
