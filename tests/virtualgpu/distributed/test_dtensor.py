"""DTensor on virtual GPUs: random numbers, checkpoints, SyncBatchNorm's and gloo's ways with GPU tensors."""

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu.run.ranks import launch


def random_numbers():
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, rand

    torch.manual_seed(3)
    mesh = dist.init_device_mesh("cuda", (2,))
    parts, copies = rand(4, 2, device_mesh=mesh, placements=[Shard(0)]), rand(3, device_mesh=mesh)
    dropped = nn.functional.dropout(distribute_tensor(torch.ones(64, device="cuda"), mesh, [Shard(0)]))
    weights = distribute_tensor(torch.empty(8, device="cuda"), mesh, [Replicate()]).uniform_()
    found = [parts.full_tensor(), copies.to_local(), dropped.full_tensor(), weights.to_local()]
    return [value.tolist() for value in found], torch.cuda.get_rng_state().tolist()


def test_shards_draw_different_numbers_and_replicas_the_same(on_gpus):
    (zero, state), (one, same) = on_gpus(random_numbers)
    assert zero == one and state == same
    whole, _, dropped, _ = zero
    assert whole[:2] != whole[2:] and dropped[:32] != dropped[32:]
    assert on_gpus(random_numbers)[0][0] == zero


def checkpoint(folder):
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cuda", (2,))
    held = {"w": distribute_tensor(torch.arange(8.0, device="cuda"), mesh, [Shard(0)])}
    checkpoint.save(held, checkpoint_id=folder)
    empty = {"w": distribute_tensor(torch.zeros(8, device="cuda"), mesh, [Shard(0)])}
    checkpoint.load(empty, checkpoint_id=folder)
    return empty["w"].full_tensor().tolist(), str(empty["w"].device)


def test_checkpoints_of_shards(on_gpus, tmp_path):
    assert on_gpus(checkpoint, str(tmp_path)) == [(list(range(8)), "cuda:0"), (list(range(8)), "cuda:1")]


def another_dimension(alone):
    """alone: in a group that has nobody for a tensor of the CPU, as init_process_group("nccl") makes it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    group = dist.new_group(backend="nccl") if alone else dist.group.WORLD
    mesh = DeviceMesh.from_group(group, "cuda", mesh=[0, 1])
    whole = torch.arange(24.0, device="cuda").view(2, 4, 3)
    rows = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    torch.cuda.synchronize()
    start = virtualgpu.machine().clock.host
    columns = rows.redistribute(mesh, [Shard(1)])
    torch.cuda.synchronize()
    lasted = virtualgpu.machine().clock.host - start
    part = columns.to_local()
    part.mul(part.detach()).sum().backward()
    return str(part.device), lasted, part.tolist(), rows.grad.to_local().tolist()


@pytest.mark.parametrize("alone", [True, False])
def test_shards_of_another_dimension(on_gpus, alone):
    """Which sent the CPU's tensor by gloo, in no time, or had nobody to send it."""
    whole = torch.arange(24.0).view(2, 4, 3)
    for rank, (device, lasted, part, gradient) in enumerate(on_gpus(another_dimension, alone)):
        assert device == f"cuda:{rank}" and part == whole[:, 2 * rank : 2 * rank + 2].tolist()
        assert gradient == whole[rank : rank + 1].tolist()
        assert lasted > 10e-6  # a collective's latency
    with virtualgpu.dry_run():
        dry = launch(another_dimension, alone, nprocs=2)
    assert [one[:2] for one in dry] == [(f"cuda:{rank}", pytest.approx(lasted, rel=1e-6)) for rank in range(2)]


def copied_to_the_cpu():
    import torch.distributed as dist
    from torch.distributed import _state_dict_utils as staging
    from torch.distributed.tensor import Shard, distribute_tensor

    here = torch.device("cuda", dist.get_rank())
    mesh = dist.init_device_mesh("cuda", (2,))
    held = distribute_tensor(torch.arange(4.0, device=here), mesh, [Shard(0)]).requires_grad_()
    copies = [held.cpu(), held.to("cpu"), held.to("cpu", torch.float16), held.to(torch.zeros(1))]
    places = {str(copy.device) for copy in copies} | {str(copy.to_local().device) for copy in copies}
    places |= {str(value.to_local().device) for value in staging._create_cpu_state_dict({"w": held.detach()}).values()}
    held.cpu().to_local().mul(2).sum().backward()
    gradient = held.grad.to_local()
    same = held.device == held.to_local().device == gradient.device == here
    return places, same, gradient.tolist(), copies[2].to_local().dtype


def test_a_copy_on_the_cpu_leaves_the_shards_where_they_are(on_gpus):
    """`.to("cpu")` was the DTensor itself, and a checkpoint's buffers took the place of an optimizer's state."""
    assert on_gpus(copied_to_the_cpu) == [({"cpu"}, True, [2.0, 2.0], torch.float16)] * 2


def batch_norm_and_gloo():
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.manual_seed(rank)
    x = torch.randn(8, 4, device=device)
    model = DistributedDataParallel(nn.SyncBatchNorm(4).to(device), device_ids=[rank])
    out = model(x)
    out.square().sum().backward()
    every = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(every, x)
    alone = nn.BatchNorm1d(4).to(device)
    expected = alone(torch.cat(every))
    expected.square().sum().backward()
    difference = (out - expected[8 * rank : 8 * rank + 8]).abs().max().item()
    gradient = (2 * model.module.weight.grad - alone.weight.grad).abs().max().item()
    gloo = dist.new_group(backend="gloo")
    total, cpu = torch.full((3,), 1.0 + rank, device=device), torch.full((3,), 1.0 + rank)
    dist.all_reduce(total, group=gloo)
    dist.all_reduce(cpu, group=gloo)
    return difference, gradient, total.tolist(), cpu.tolist(), str(total.device)


def test_synchronized_batch_norm_and_gloo(on_gpus):
    for rank, (difference, gradient, total, cpu, device) in enumerate(on_gpus(batch_norm_and_gloo)):
        assert difference < 1e-5 and gradient < 1e-4
        assert total == cpu == [3, 3, 3] and device == f"cuda:{rank}"


def batch_norm_at_its_peak():
    import torch.distributed as dist

    device = torch.device("cuda", dist.get_rank())
    norm = nn.SyncBatchNorm(64).to(device)
    for _ in range(2):
        norm(torch.randn(256, 64, device=device)).square().sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), round(virtualgpu.machine().clock.host * 1e9)


def test_synchronized_batch_norm_in_a_dry_run(on_gpus):
    """It has a mask of the ranks that have rows, whose values a dry run does not know, and for which the host waits."""
    assert on_gpus(batch_norm_at_its_peak, dry=True) == on_gpus(batch_norm_at_its_peak)
