"""Messages that would end a process: elements that share memory, and two sides of different sizes."""

import pytest
import torch

from virtualgpu.run.ranks import WorkerError


def expanded():
    """Four numbers that say to be 4000, as a mask that was broadcast."""
    import torch.distributed as dist

    device = torch.device("cuda", dist.get_rank())
    if dist.get_rank() == 0:
        dist.send(torch.arange(1.0, 5.0, device=device).unsqueeze(1).expand(4, 1000), 1)
        return None
    received = torch.empty_strided((4, 1000), (1, 0), device=device)
    beside = torch.full((4000,), 7.0, device=device)
    dist.recv(received, 0)
    return received[:, ::999].tolist(), beside.unique().tolist()


def test_elements_that_share_memory_travel_once(on_gpus):
    assert on_gpus(expanded)[1] == ([[n, n] for n in (1.0, 2.0, 3.0, 4.0)], [7.0])


def two_sizes():
    import torch.distributed as dist

    device = torch.device("cuda", dist.get_rank())
    if dist.get_rank() == 0:
        dist.send(torch.ones(100_000, device=device), 1)
    else:
        dist.recv(torch.zeros(10, device=device), 0)


def test_two_sizes_are_an_error_of_python(on_gpus):
    with pytest.raises(WorkerError, match="rank 0 sends 400000 bytes where rank 1 receives 40: give both a tensor"):
        on_gpus(two_sizes)


def to_itself():
    """As the last rank of a V-shaped pipeline does, which has two stages in a row."""
    import torch.distributed as dist

    group, device = dist.group.WORLD, torch.device("cuda", dist.get_rank())
    given, taken = torch.arange(3.0, device=device), torch.zeros(3, device=device)
    with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as both:
        group.recv([taken], dist.get_rank(), 0)
        group.send([given], dist.get_rank(), 0)
    both.wait()
    return taken.tolist()


def test_a_rank_may_send_to_itself(on_gpus):
    assert on_gpus(to_itself) == [[0.0, 1.0, 2.0]] * 2
