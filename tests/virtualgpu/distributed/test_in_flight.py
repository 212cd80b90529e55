"""Collectives whose tensors are used before anybody waits: by the next collective, which NCCL's stream runs after them, or by a kernel."""

import torch
from torch import nn

SIZE = 1 << 19  # so many that gloo is still busy when the next one comes


def of_one_tensor():
    """What two collectives in a row of one tensor make of rank + 1; and whether the second read what the first made."""
    import torch.distributed as dist

    rank, found = dist.get_rank(), []

    def full(n=SIZE):
        return torch.full((n,), rank + 1.0, device="cuda")

    def twice(x, first, second):
        works = [work for work in (first(x), second(x)) if work is not None]
        for work in works:
            work.wait()
        found.append(sorted(set(x.tolist())))

    def summed(x):
        return dist.all_reduce(x, async_op=True)

    twice(full(), summed, summed)
    twice(full(), summed, lambda x: dist.broadcast(x, 0))
    twice(full(), lambda x: dist.broadcast(x, 1, async_op=True), summed)
    twice(
        full(),
        lambda x: dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True),
        lambda x: dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True),
    )
    twice(full(2 * SIZE), lambda x: dist.all_gather_into_tensor(x, x[rank * SIZE :][:SIZE], async_op=True), summed)
    sent, received = full(), full()
    twice(sent, lambda x: dist.all_to_all_single(received, x, async_op=True), summed)
    return found, received[:: SIZE // 2].tolist()


def test_collectives_of_one_tensor_run_one_after_the_other(on_gpus):
    """Gloo ran both at once, on the same memory."""
    expected = [[6.0], [3.0], [4.0], [1.5], [2.0, 4.0], [3.0]]
    assert on_gpus(of_one_tensor) == [(expected, [1.0, 2.0])] * 2


def used_without_waiting():
    import torch.distributed as dist

    x, y, z = (torch.full((SIZE,), dist.get_rank() + 1.0, device="cuda") for _ in range(3))
    works = [dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)]
    doubled = x * 2
    works.append(dist.all_reduce(y, async_op=True))
    y.add_(1)
    works.append(dist.all_reduce(z, async_op=True))
    found = set(z.tolist()) | set(y.tolist()) | set(doubled.tolist())
    for work in works:
        work.wait()
    return found, torch.cuda.memory_allocated() == sum(held.nbytes for held in (x, y, z, doubled))


def test_a_kernel_reads_what_a_collective_brings_even_if_nobody_waits(on_gpus):
    """A race, which gave one or the other number, and an average that was still a sum."""
    assert on_gpus(used_without_waiting) == [({3.0, 4.0}, True)] * 2


def attended_without_waiting():
    import torch.distributed as dist

    q, s = torch.zeros(1, 4, 1024, 64, device="cuda"), torch.ones(2, 4, 1024, 64, device="cuda")
    works = [dist.reduce_scatter_tensor(q.view(-1), s.view(-1), async_op=True)]
    attended = [nn.functional.scaled_dot_product_attention(q, q, q).unique().tolist()]
    cell, x = nn.LSTMCell(64, 4, device="cuda"), torch.zeros(SIZE // 64, 64, device="cuda")
    works.append(dist.all_reduce(x.fill_(1), async_op=True))
    before = cell(x)[0]
    for work in works:
        work.wait()
    return attended, torch.equal(before, cell(x)[0])


def test_attention_and_cells_do_so_too(on_gpus):
    assert on_gpus(attended_without_waiting) == [([[2.0]], True)] * 2


def trained(delayed: bool):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)).to(
        "cuda"
    )
    late = [(name, p) for name, p in model.named_parameters() if name != "0.weight"]
    options = {"delay_all_reduce_named_params": late[:3], "param_to_hook_all_reduce": model[0].weight}
    ddp = DistributedDataParallel(model, device_ids=[rank], **(options if delayed else {}))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.randn(2, 4, 8, 64, generator=torch.Generator().manual_seed(1))[rank].to("cuda")
    for batch in x:
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.double().sum().item() for p in model.parameters()]


def test_gradients_that_ddp_reduces_late(on_gpus):
    """PyTorch waits for nobody there: the optimizer may come before the sum, as it does by gloo on CPUs."""
    zero, one = on_gpus(trained, True)
    assert zero == one == on_gpus(trained, False)[0]
