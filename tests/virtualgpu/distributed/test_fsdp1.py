"""FullyShardedDataParallel, which FSDP2 replaces: with numbers, and in a dry run."""

import torch
from torch import nn

WIDTH, ROWS, STEPS = 64, 8, 3


def net():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    layers.scale = nn.Parameter(torch.tensor([2.0]))  # from values: a dry run knows them
    layers.register_forward_hook(lambda module, given, out: out * module.scale)
    return layers


def training(look: bool):
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = FullyShardedDataParallel(net(), device_id=rank, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for at in range(STEPS):
        torch.manual_seed(at)  # the same rows on both: BatchNorm looks at its own
        loss = model(torch.randn(ROWS, WIDTH).cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights, most = [], torch.cuda.max_memory_allocated()
    if look:
        with FullyShardedDataParallel.summon_full_params(model):
            weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return weights, most, {str(buffer.device) for buffer in model.buffers()}


def test_weights_are_those_of_one_process(on_gpus):
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for at in range(STEPS):
        torch.manual_seed(at)
        optimizer.zero_grad()
        alone(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
    for rank, (weights, _, devices) in enumerate(on_gpus(training, True)):
        assert devices == {f"cuda:{rank}"}
        for ours, theirs in zip(weights, alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_dry_run_has_the_same_memory(on_gpus):
    assert on_gpus(training, False, dry=True) == on_gpus(training, False)


def steps_saved():
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.cuda.set_device(dist.get_rank())
    model = FullyShardedDataParallel(net(), device_id=dist.get_rank(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(STEPS):
        model(torch.ones(ROWS, WIDTH).cuda()).sum().backward()
        optimizer.step()
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return {name: (values["step"].item(), values["exp_avg"].shape) for name, values in state.items()}


def test_a_dry_run_saves_a_fused_optimizer(on_gpus):
    """Ranks compare their steps, which it counts on the GPU."""
    given, dry = on_gpus(steps_saved), on_gpus(steps_saved, dry=True)
    assert given == dry and {step for step, _ in dry[0].values()} == {STEPS}
