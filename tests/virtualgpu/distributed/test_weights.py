"""What PyTorch builds on collectives, on virtual GPUs: weights equal those of CPUs and gloo in every bit."""

import contextlib
import tempfile
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.virtualgpu.distributed.conftest import started


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def place() -> tuple[int, str]:
    """This rank, and its device: a GPU where there are some."""
    import torch.distributed as dist

    return dist.get_rank(), f"cuda:{dist.get_rank()}" if torch.cuda.is_available() else "cpu"


def mesh(shape=(2,), names=None):
    import torch.distributed as dist

    return dist.init_device_mesh(place()[1].split(":")[0], shape, mesh_dim_names=names)


def trained(model, optimizer=None, steps: int = 3, around=contextlib.nullcontext) -> list:
    """The weights after some steps, each rank with samples of its own."""
    rank, device = place()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1 + rank)
    with around():
        for _ in range(steps):
            x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
            out = model(x.to(device))
            nn.functional.cross_entropy(out, y.to(out.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def weights(model) -> list:
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.state_dict().values()]
    return [value.detach().cpu().tolist() for value in values]


# -- DistributedDataParallel


def ddp(hook=None, accumulate=False, backend=None, **options):
    import torch.distributed as dist

    device = place()[1]
    if backend and device != "cpu":
        options["process_group"] = dist.new_group(
            backend=backend
        )  # as most programs have it: with nobody for the CPU's tensors
    model = DDP(net().to(device), **options)
    if hook is not None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, getattr(default_hooks, hook))
    if accumulate:
        with model.no_sync():
            model(torch.ones(2, 16, device=device)).sum().backward()
    return trained(model)


class Two(nn.Module):
    """One of two nets is not used."""

    def __init__(self):
        super().__init__()
        self.one, self.other = net(), net()

    def forward(self, x):
        return self.one(x)


def unused_parameters():
    return trained(DDP(Two().to(place()[1]), find_unused_parameters=True))


def uneven_inputs(**options):
    """With the gradients after the last step, which rank 1 takes alone."""
    rank, device = place()
    model = DDP(net().to(device))
    found = trained(model, None, 2 + 2 * rank, lambda: model.join(**options))
    with model.join(**options):
        for step in range(1 + rank):
            model.zero_grad()
            model(torch.full((3, 16), 1.0 + step, device=device)).sum().backward()
    return [found, [parameter.grad.cpu().tolist() for parameter in model.parameters()]]


def power_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = DDP(net().to(place()[1]))
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    return trained(model, steps=4)


def optimizer_in_the_backward_pass():
    from torch.distributed.optim import _apply_optimizer_in_backward as in_backward

    if place()[1] == "cpu":
        return ddp()
    model = net().to(place()[1])
    in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return trained(DDP(model), torch.optim.SGD([torch.zeros(1)], 0.1))


def reduced_late():
    """PyTorch waits for nobody there: the optimizer may come before the sum, as it does by gloo on CPUs."""
    if place()[1] == "cpu":
        return ddp()
    model = net().to(place()[1])
    first, late = model[0].weight, [(name, p) for name, p in model.named_parameters() if name != "0.weight"]
    options = {"delay_all_reduce_named_params": late[:3], "param_to_hook_all_reduce": first}
    return trained(DDP(model, device_ids=[place()[0]], **options))


def tutorial(backend: str):
    """Of PyTorch's tutorial: a checkpoint that each rank loads onto its own GPU. Nobody calls torch.cuda.set_device."""
    import torch.distributed as dist

    rank, device = place()
    group, folder = dist.new_group(backend=backend if device != "cpu" else "gloo"), [tempfile.gettempdir()]
    dist.broadcast_object_list(folder, 0)
    if device != "cpu":
        torch.cuda.set_device(0)
    torch.manual_seed(rank)
    model = DDP(nn.Linear(16, 4).to(device), device_ids=None if device == "cpu" else [rank], process_group=group)
    if rank == 0:
        torch.save(model.state_dict(), f"{folder[0]}/virtualgpu_tutorial.pt")
    dist.barrier(group)
    where = {"cuda:0": device}
    model.load_state_dict(torch.load(f"{folder[0]}/virtualgpu_tutorial.pt", map_location=where, weights_only=True))
    dist.barrier(group)
    return trained(model)


class Halves(nn.Module):
    """Two layers on two devices."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.devices = first, second
        self.below, self.above = nn.Linear(16, 8).to(first), nn.Linear(8, 4).to(second)

    def forward(self, x):
        first, second = self.devices
        return self.above(torch.relu(self.below(x.to(first))).to(second))


def halves(backend: str, **options):
    """Model parallel within DDP: two GPUs a rank."""
    import torch.distributed as dist

    rank, device = place()
    if device == "cpu":
        return trained(DDP(Halves("cpu", "cpu"), **options))
    torch.cuda.set_device(0)
    model = DDP(Halves(2 * rank, 2 * rank + 1), process_group=dist.new_group(backend=backend), **options)
    found = trained(model)
    assert [torch.cuda.memory_allocated(gpu) > 0 for gpu in range(4)] == [gpu // 2 == rank for gpu in range(4)]
    return found


# -- what shards parameters, and what splits layers


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(net().to(place()[1]))
    return trained(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def fsdp1(norm=False):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    _, device = place()
    inner = nn.Sequential(nn.BatchNorm1d(16), *net()) if norm else net()
    model = FSDP(
        inner, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device(device), use_orig_params=norm
    )
    trained(model, torch.optim.Adam(model.parameters(), 0.01))
    assert {str(buffer.device) for buffer in model.buffers()} <= {device}
    with FSDP.summon_full_params(model):
        return weights(model)


def fsdp2(bfloat16=False, **options):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = net().to(place()[1])
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh(), **options)
    trained(model, torch.optim.Adam(model.parameters(), 0.01))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return weights(model)


def hybrid_shards():
    from torch.distributed.fsdp import fully_shard

    model = net().to(place()[1])
    fully_shard(model, mesh=mesh((2, 1), ("replicate", "shard")))
    return trained(model, torch.optim.Adam(model.parameters(), 0.01))


def tensor_parallel(sequence=False):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device = place()[1]
    model = nn.Sequential(net()[:3], nn.Linear(32, 4)).to(device)
    plan = {"0.0": ColwiseParallel(), "0.2": RowwiseParallel()}
    if sequence:
        plan = {"0.0": ColwiseParallel(input_layouts=Shard(0)), "0.2": RowwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh(), plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)  # DTensors and others do not mix in one list
    torch.manual_seed(1)
    for _ in range(2):
        out = model(torch.randn(8, 16).to(device))
        nn.functional.cross_entropy(out, torch.arange(len(out), device=device) % 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def parallel_loss():
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    device = place()[1]
    torch.manual_seed(0)
    logits = distribute_tensor(torch.randn(6, 8, device=device), mesh(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, torch.arange(6, device=device))
        loss.backward()
    return [loss.item(), logits.grad.full_tensor().tolist()]


CASES = {  # the first look at the GPUs' memory, before anything else is there
    "two GPUs a rank, gloo": partial(halves, "gloo"),
    "two GPUs a rank, nccl": partial(halves, "nccl"),
    "two GPUs a rank, small buckets": partial(halves, "nccl", gradient_as_bucket_view=True, bucket_cap_mb=0.0001),
    "DDP": ddp,
    "DDP, gradients in the buckets": partial(ddp, gradient_as_bucket_view=True),
    "DDP, static graph": partial(ddp, static_graph=True),
    "DDP, static graph, nccl alone": partial(ddp, static_graph=True, backend="nccl"),
    "DDP, small buckets": partial(ddp, bucket_cap_mb=0.001),
    "DDP, no_sync": partial(ddp, accumulate=True),
    "DDP, float16 hook": partial(ddp, hook="fp16_compress_hook"),
    "DDP, all_reduce hook": partial(ddp, hook="allreduce_hook"),
    "DDP, unused parameters": unused_parameters,
    "DDP, uneven inputs, mean of all ranks": uneven_inputs,
    "DDP, uneven inputs, mean of those at work": partial(uneven_inputs, divide_by_initial_world_size=False),
    "DDP, PowerSGD": power_sgd,
    "DDP, optimizer in the backward pass": optimizer_in_the_backward_pass,
    "DDP, gradients reduced late": reduced_late,
    "DDP, tutorial, gloo": partial(tutorial, "gloo"),
    "DDP, tutorial, nccl": partial(tutorial, "nccl"),
    "ZeRO": zero_redundancy,
    "FSDP1": fsdp1,
    "FSDP1, with buffers": partial(fsdp1, norm=True),
    "FSDP2": fsdp2,
    "FSDP2, not resharded": partial(fsdp2, reshard_after_forward=False),
    "FSDP2, bfloat16": partial(fsdp2, bfloat16=True),
    "HSDP": hybrid_shards,
    "tensor parallel": tensor_parallel,
    "sequence parallel": partial(tensor_parallel, sequence=True),
    "loss parallel": parallel_loss,
}


@pytest.fixture(scope="module")
def both():
    """What each case gives on GPUs and on CPUs."""
    return started(CASES, gpus=4), started(CASES, gpus=0)


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_those_of_cpus_and_gloo(both, name):
    on_gpus, on_cpus = (found[name] for found in both)
    assert not [error for error in (*on_gpus, *on_cpus) if isinstance(error, str)]
    assert on_gpus == on_cpus
