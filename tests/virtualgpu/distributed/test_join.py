"""Join: ranks with unequal numbers of batches, by what is left to average over; also in a dry run, where ranks are counted too."""

import pytest
import torch
from torch import nn


def uneven(static: bool):
    """How many steps this rank took, and its gradients after the last one that it took alone."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2).to(device))
    steps = 0
    with model.join(divide_by_initial_world_size=static):
        for step in range(2 + 2 * rank):
            model.zero_grad()
            model(torch.full((3, 4), 1.0 + step, device=device)).sum().backward()
            steps += 1
    return steps, [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("static", [True, False], ids=["of all ranks", "of those still at work"])
def test_gradients_are_the_mean(on_gpus, on_cpus, static):
    here, there = on_gpus(uneven, static), on_cpus(uneven, static)
    assert [steps for steps, _ in here] == [2, 4]
    for (_, gpu), (_, cpu) in zip(here, there, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(gpu, cpu, strict=True))


def dry(static: bool):
    import virtualgpu

    with virtualgpu.dry_run():
        return uneven(static)[0]


@pytest.mark.parametrize("static", [True, False])
def test_a_dry_run_ends_when_all_have(on_gpus, static):
    assert on_gpus(dry, static) == [2, 4]
