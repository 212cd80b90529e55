"""DTensor on virtual GPUs: random numbers, checkpoints, shards of another dimension, a sequence in parts; and SyncBatchNorm."""

import itertools
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import virtualgpu
from tests.virtualgpu.distributed.conftest import Rows

TWO, DRY = Rows(), Rows(dry=True)


@TWO.row
def random_numbers():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, rand

    torch.manual_seed(3)
    mesh = dist.init_device_mesh("cuda", (2,))
    parts, copies = rand(4, 2, device_mesh=mesh, placements=[Shard(0)]), rand(3, device_mesh=mesh)
    dropped = F.dropout(distribute_tensor(torch.ones(64, device="cuda"), mesh, [Shard(0)]))
    weights = distribute_tensor(torch.empty(8, device="cuda"), mesh, [Replicate()]).uniform_()
    found = [parts.full_tensor(), copies.to_local(), dropped.full_tensor(), weights.to_local()]
    return [value.tolist() for value in found], torch.cuda.get_rng_state().tolist()


@TWO.row
def random_numbers_again():
    return random_numbers()


def test_shards_draw_different_numbers_and_replicas_the_same():
    (zero, state), (one, same) = TWO[random_numbers]
    assert zero == one and state == same
    whole, _, dropped, _ = zero
    assert whole[:2] != whole[2:] and dropped[:32] != dropped[32:]
    assert TWO[random_numbers_again][0][0] == zero


def another_dimension(alone):
    """alone: in a group that has nobody for a tensor of the CPU, as init_process_group("nccl") makes it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(dist.new_group(backend="nccl") if alone else dist.group.WORLD, "cuda", mesh=[0, 1])
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


@TWO.row
@DRY.row
def both_ways():
    return [another_dimension(alone) for alone in (True, False)]


@pytest.mark.parametrize("way", [0, 1])
def test_shards_of_another_dimension(way):
    """Which sent the CPU's tensor by gloo, in no time, or had nobody to send it."""
    whole = torch.arange(24.0).view(2, 4, 3)
    for rank, (device, lasted, part, gradient) in enumerate(ways[way] for ways in TWO[both_ways]):
        assert device == f"cuda:{rank}" and part == whole[:, 2 * rank : 2 * rank + 2].tolist()
        assert gradient == whole[rank : rank + 1].tolist()
        assert lasted > 10e-6  # a collective's latency
    dry = [ways[way][:2] for ways in DRY[both_ways]]
    assert dry == [(f"cuda:{rank}", pytest.approx(lasted, rel=1e-6)) for rank in range(2)]


@TWO.gives(({"cpu"}, True, [2.0, 2.0], torch.float16))
def copied_to_the_cpu():
    """`.to("cpu")` was the DTensor itself, and a checkpoint's buffers took the place of an optimizer's state."""
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


# -- checkpoints of FSDP2: what is loaded is what was saved, whatever was learned while another thread or process wrote


def model_and_optimizer():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(f"cuda:{dist.get_rank()}")
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def learn(model, optimizer) -> None:
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(states) -> list:
    """Whole tensors of a model's and an optimizer's state, as lists."""
    model, optimizer = states
    moments = [value for of in optimizer["state"].values() for value in of.values()]
    return [(v.full_tensor() if hasattr(v, "full_tensor") else v).tolist() for v in (*model.values(), *moments)]


def saved_and_loaded(kind):
    """kind: who writes."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, 0)
    folder = box[0]
    model, optimizer = model_and_optimizer()
    learn(model, optimizer)
    states = get_state_dict(model, optimizer)
    before, saved = values(states), dict(zip(("model", "optimizer"), states, strict=True))
    if kind == "itself":
        checkpoint.save(saved, checkpoint_id=folder)
    else:
        kind = AsyncCheckpointerType(kind)
        checkpoint.async_save(saved, checkpoint_id=folder, async_checkpointer_type=kind).result()
    learn(model, optimizer)
    changed = values(get_state_dict(model, optimizer)) != before
    other, its_optimizer = model_and_optimizer()
    states = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    loaded = get_state_dict(other, its_optimizer)
    where = {parameter.to_local().device.index for parameter in loaded[0].values()}
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return changed, values(loaded) == before, where, next(iter(loaded[0].values())).data_ptr()


@TWO.gives([(True, True, {0}, 0)] * 3, [(True, True, {1}, 0)] * 3)
def checkpoints():
    return [saved_and_loaded(kind) for kind in ("itself", "thread", "process")]


# -- SyncBatchNorm, also beside a group of gloo


@TWO.gives((True, True, [3, 3, 3], [3, 3, 3], True))
def synchronized_batch_norm_and_gloo():
    """Does it differ from a plain one of all ranks' rows?"""
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.manual_seed(rank)
    x = torch.randn(8, 4, device=device)
    model = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm(4).to(device), device_ids=[rank])
    out = model(x)
    out.square().sum().backward()
    every = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(every, x)
    alone = nn.BatchNorm1d(4).to(device)
    expected = alone(torch.cat(every))
    expected.square().sum().backward()
    difference = (out - expected[8 * rank : 8 * rank + 8]).abs().max()
    gradient = (2 * model.module.weight.grad - alone.weight.grad).abs().max()
    gloo = dist.new_group(backend="gloo")
    total, cpu = torch.full((3,), 1.0 + rank, device=device), torch.full((3,), 1.0 + rank)
    dist.all_reduce(total, group=gloo)
    dist.all_reduce(cpu, group=gloo)
    return difference.item() < 1e-5, gradient.item() < 1e-4, total.tolist(), cpu.tolist(), total.device == device


# -- context_parallel: each rank has a part of the sequence, and keys and values go around the ring


def ring(dtype, causal):
    """The largest differences of output and gradients from attention over the whole sequence, and the shape of a rank's own output."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard

    _cp_options.enable_load_balance = causal
    mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    *whole, weights = (torch.randn(2, 4, 256, 16, dtype=dtype).cuda() for _ in range(4))
    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    expected = [expected, *torch.autograd.grad(expected, leaves, weights)]
    with context_parallel(mesh, buffers=[*whole, weights], buffer_seq_dims=[2] * 4):
        parts = [tensor.detach().requires_grad_() for tensor in whole]
        out = F.scaled_dot_product_attention(*parts, is_causal=causal)
        results = context_parallel_unshard(mesh, [out.detach(), *torch.autograd.grad(out, parts, weights)], [2] * 4)
    return tuple(out.shape), [float((one - other).abs().max()) for one, other in zip(results, expected, strict=True)]


def both(dtype):
    return [ring(dtype, causal) for causal in (True, False)]


@pytest.mark.parametrize(("like", "dtype", "near"), [("T4", torch.float32, 2e-6), ("A100", torch.bfloat16, 0.04)])
def test_attention_in_parts_is_that_over_the_whole_sequence(on_gpus, like, dtype, near):
    """By the memory-efficient kernel, and by flash: their sums join the parts."""
    for shape, differences in itertools.chain(*on_gpus(both, dtype, like=like)):
        assert shape == (2, 4, 128, 16)
        assert max(differences) < near


def test_where_no_fused_kernel_may_run_it_is_refused(on_gpus):
    """A T4 takes bfloat16 by plain operations, of which context_parallel knows nothing: a part would look at itself alone."""
    with pytest.raises(RuntimeError, match="context_parallel splits the fused kernels"):
        on_gpus(ring, torch.bfloat16, True)


test_two_ranks = TWO.test()
