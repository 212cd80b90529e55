"""What PyTorch builds on collectives, on virtual GPUs: weights equal those of CPUs and gloo in every bit."""

import contextlib
import functools

import pytest
import torch
from torch import nn

import virtualgpu


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def place() -> tuple[int, str]:
    """This rank, and its device: a GPU where there is one for each."""
    import torch.distributed as dist

    rank = dist.get_rank()
    return rank, f"cuda:{rank}" if torch.cuda.device_count() >= dist.get_world_size() else "cpu"


def trained(model, optimizer, steps: int = 3, around=contextlib.nullcontext) -> list:
    """The weights after some steps, each rank with samples of its own."""
    rank, device = place()
    generator = torch.Generator().manual_seed(1 + rank)
    with around():
        for _ in range(steps):
            x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def weights(model) -> list:
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.state_dict().values()]
    return [value.detach().cpu().tolist() for value in values]


def ddp(hook=None, accumulate=False, **options):
    from torch.nn.parallel import DistributedDataParallel

    _, device = place()
    model = DistributedDataParallel(net().to(device), **options)
    if hook is not None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, getattr(default_hooks, hook))
    if accumulate:
        with model.no_sync():
            model(torch.ones(2, 16, device=device)).sum().backward()
    return trained(model, torch.optim.SGD(model.parameters(), 0.1))


def ddp_with_unused_parameters():
    from torch.nn.parallel import DistributedDataParallel

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = net(), net()

        def forward(self, x):
            return self.one(x)

    _, device = place()
    model = DistributedDataParallel(Two().to(device), find_unused_parameters=True)
    return trained(model, torch.optim.SGD(model.parameters(), 0.1))


def ddp_with_uneven_inputs():
    from torch.nn.parallel import DistributedDataParallel

    rank, device = place()
    model = DistributedDataParallel(net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return trained(model, optimizer, 2 + rank, lambda: model.join())


def ddp_with_power_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
    from torch.nn.parallel import DistributedDataParallel

    _, device = place()
    model = DistributedDataParallel(net().to(device))
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    return trained(model, torch.optim.SGD(model.parameters(), 0.1), 4)


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    _, device = place()
    model = DistributedDataParallel(net().to(device))
    return trained(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    _, device = place()
    if device == "cpu":
        model = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"))
    else:
        model = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device(device))
    trained(model, torch.optim.Adam(model.parameters(), 0.01))
    with FSDP.summon_full_params(model):
        return weights(model)


def fsdp2(**options):
    from torch.distributed.fsdp import fully_shard

    _, device = place()
    model = net().to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh(), **options)
    fully_shard(model, mesh=mesh(), **options)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    trained(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return weights(model)


def mesh(shape=None, names=None):
    import torch.distributed as dist

    shape = shape or (dist.get_world_size(),)
    return dist.init_device_mesh(place()[1].split(":")[0], shape, mesh_dim_names=names)


def fsdp2_in_bfloat16():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def hybrid_shards():
    from torch.distributed.fsdp import fully_shard

    _, device = place()
    model = net().to(device)
    fully_shard(model, mesh=mesh((2, 1), ("replicate", "shard")))
    return trained(model, torch.optim.Adam(model.parameters(), 0.01))


def tensor_parallel(sequence=False):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _, device = place()
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

    _, device = place()
    torch.manual_seed(0)
    logits = distribute_tensor(torch.randn(6, 8, device=device), mesh(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, torch.arange(6, device=device))
        loss.backward()
    return [loss.item(), logits.grad.full_tensor().tolist()]


CASES = {
    "DDP": ddp,
    "DDP, gradients in the buckets": functools.partial(ddp, gradient_as_bucket_view=True),
    "DDP, static graph": functools.partial(ddp, static_graph=True),
    "DDP, small buckets": functools.partial(ddp, bucket_cap_mb=0.001),
    "DDP, no_sync": functools.partial(ddp, accumulate=True),
    "DDP, float16 hook": functools.partial(ddp, hook="fp16_compress_hook"),
    "DDP, all_reduce hook": functools.partial(ddp, hook="allreduce_hook"),
    "DDP, unused parameters": ddp_with_unused_parameters,
    "DDP, uneven inputs": ddp_with_uneven_inputs,
    "DDP, PowerSGD": ddp_with_power_sgd,
    "ZeRO": zero_redundancy,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "FSDP2, not resharded": functools.partial(fsdp2, reshard_after_forward=False),
    "FSDP2, bfloat16": fsdp2_in_bfloat16,
    "HSDP": hybrid_shards,
    "tensor parallel": tensor_parallel,
    "sequence parallel": functools.partial(tensor_parallel, sequence=True),
    "loss parallel": parallel_loss,
}


def every(names):
    """One start for many cases: each one's result, or its error."""
    import traceback

    found = {}
    for name in names:
        try:
            found[name] = CASES[name]()
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def both():
    """What each case gives on GPUs and on CPUs."""
    from virtualgpu.run.ranks import launch

    virtualgpu.gpus(2)
    try:
        on_gpus = launch(every, list(CASES))
    finally:
        virtualgpu.reset()
    return on_gpus, launch(every, list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_those_of_cpus_and_gloo(both, name):
    for on_gpu, on_cpu in zip(*both, strict=True):
        assert not isinstance(on_gpu[name], str), on_gpu[name]
        assert not isinstance(on_cpu[name], str), on_cpu[name]
        assert on_gpu[name] == on_cpu[name]


def ddp_in_a_group_of_nccl_alone(**options):
    """init_process_group("nccl"), as most programs write it: a tensor of the CPU has nobody to send it."""
    import torch.distributed as dist

    return ddp(process_group=dist.new_group(backend="nccl"), **options)


def ddp_with_the_optimizer_in_the_backward_pass():
    from torch.distributed.optim import _apply_optimizer_in_backward as in_backward
    from torch.nn.parallel import DistributedDataParallel

    _, device = place()
    model = net().to(device)
    in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(model)
    return trained(model, torch.optim.SGD([torch.zeros(1)], 0.1))


def test_a_static_graph_in_a_group_of_nccl_alone(on_gpus):
    for weights in on_gpus(functools.partial(ddp_in_a_group_of_nccl_alone, static_graph=True)):
        assert weights == on_gpus(ddp)[0]


def test_ddp_with_the_optimizer_in_the_backward_pass(on_gpus):
    for weights in on_gpus(ddp_with_the_optimizer_in_the_backward_pass, timeout=60):
        assert weights == on_gpus(ddp)[0]
