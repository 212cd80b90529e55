"""Ranks that work on shapes alone, and one process that plays one rank of many: what they tell each other, their bytes and their time."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import virtualgpu
from tests.virtualgpu.distributed.conftest import started
from tests.virtualgpu.distributed.test_weights import uneven_inputs
from virtualgpu.distributed.topology import RankConfig
from virtualgpu.engine.machine import CONTEXT
from virtualgpu.run.ranks import launch

MAX, MIN, SUM, AVG, PRODUCT = (getattr(dist.ReduceOp, name) for name in ("MAX", "MIN", "SUM", "AVG", "PRODUCT"))


def here() -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


# -- what is the same with numbers and without: small tensors arrive as they would, bytes and time are those of a run with numbers


def counts() -> list:
    """How many, which, and how much: as libraries ask."""
    rank, size, where = dist.get_rank(), dist.get_world_size(), here()
    length = torch.tensor(5 if rank == 0 else -1, device=where)
    dist.broadcast(length, src=0)
    sizes = [torch.empty(2, dtype=torch.int64, device=where) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([rank + 1, 10 * rank], device=where))
    together = torch.zeros(2 * size, dtype=torch.int64, device=where)
    dist.all_gather_into_tensor(together, torch.tensor([rank, rank], device=where))
    found = [length.item(), [each.tolist() for each in sizes], together.tolist(), together.view(size, 2)[-1].tolist()]
    for op in (SUM, MAX, MIN, PRODUCT):
        count = torch.tensor([2 + rank], dtype=torch.int32, device=where)
        dist.all_reduce(count, op=op, async_op=True).wait()
        found.append(count.item())
    for op in (SUM, AVG, MAX):
        unfinished = torch.tensor(0.0 if rank == 0 else 1.0, device=where)  # of transformers' generate, under FSDP
        dist.all_reduce(unfinished, op=op)
        found.append(unfinished.item())
    ready = torch.tensor([rank == 0], device=where)
    dist.all_reduce(ready, op=MIN)
    return [*found, bool(ready)]


def measured() -> list:
    """What ranks have measured, in single and half precision: the longest time, sums and means, everybody's, one rank's."""
    rank, size, where, found = dist.get_rank(), dist.get_world_size(), here(), []
    for op in (MAX, MIN, SUM, AVG, PRODUCT):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            elapsed = torch.tensor([0.5 + rank, 2.0], device=where, dtype=dtype)
            dist.all_reduce(elapsed, op=op)
            found.append(elapsed.tolist())
    mine = torch.tensor([rank + 0.25, 4.0], device=where)
    every, together = [torch.empty_like(mine) for _ in range(size)], torch.empty(2 * size, device=where)
    dist.all_gather(every, mine)
    dist.all_gather_into_tensor(together, mine)
    part, one = torch.empty(1, device=where), mine.clone()
    dist.reduce_scatter_tensor(part, torch.arange(1.0, size + 1, device=where) * (rank + 1))
    dist.broadcast(one, src=0)
    gathered = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    reduced, scattered = mine.clone(), torch.empty(2, device=where)
    dist.reduce(reduced, dst=0)
    dist.scatter(scattered, [mine * 2, mine * 3] if rank == 0 else None, src=0)
    found += [[tensor.tolist() for tensor in every], together.view(size, 2).sum(0).tolist(), part.item(), one.tolist()]
    found.append([tensor.tolist() for tensor in gathered or ()])
    return [*found, reduced.tolist() if rank == 0 else None, scattered.tolist()]


def sent() -> list:
    """How a pipeline's stages tell each other the shape of what comes: one by one, and both at a time."""
    rank, where = dist.get_rank(), here()
    shape, other, found = torch.tensor([4, 8 + rank], device=where), torch.empty(2, dtype=torch.int64, device=where), []
    for sender in (0, 1):
        if rank == sender:
            dist.send(shape, 1 - rank)
        else:
            dist.recv(other, sender)
            found.append(other.tolist())
    both = [dist.P2POp(dist.isend, shape, 1 - rank), dist.P2POp(dist.irecv, other.zero_(), 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    activation, doubles = torch.ones(4, 8, device=where), torch.zeros(2, dtype=torch.float64, device=where)
    if rank == 0:
        dist.send(activation, 1)
        dist.send(shape, 1)  # of another type than what receives it
    else:
        dist.recv(torch.empty(4, 8, device=where), 0)
        dist.recv(doubles, 0)
    return [*found, other.tolist()]


def a_moment() -> list:
    """mmengine's broadcast of a moment: over the GPU, and back into a tensor of the CPU, whole and in parts."""
    moment = torch.tensor(5.5 + dist.get_rank(), dtype=torch.float64)
    gpus = moment.to(here())
    dist.broadcast(gpus, src=0)
    both = torch.tensor([1.5, 2.5], dtype=torch.float64)
    both[1] += gpus.cpu()
    moment.copy_(gpus.cpu())
    assert (moment.item(), both.tolist(), (moment + 1).item()) == (5.5, [1.5, 8.0], 6.5)
    return both.tolist()


def objects() -> tuple:
    rank, size = dist.get_rank(), dist.get_world_size()
    group, every, received = dist.new_group(backend="nccl"), [None] * size, [None]
    dist.all_gather_object(every, {"rank": rank}, group=group)
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, src=1, group=group)
    if rank == 0:
        dist.send_object_list([(1, "two")], dst=1, group=group)
    else:
        dist.recv_object_list(received, src=0, group=group)
    return every, shared, received


def synced_batch_norm() -> tuple[int, int]:
    """It has a mask of the ranks that have rows, whose values a dry run does not know, and for which the host waits."""
    norm = nn.SyncBatchNorm(64).to(here())
    torch.cuda.synchronize()
    begin = virtualgpu.machine().clock.host
    for _ in range(2):
        norm(torch.randn(256, 64, device=here())).square().sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), round((virtualgpu.machine().clock.host - begin) * 1e9)


def fsdp1() -> tuple:
    """Its peak; and a fused optimizer's state: ranks compare their steps, which it counts on the GPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    model.scale = nn.Parameter(torch.tensor([2.0]))  # from values: a dry run knows them
    model.register_forward_hook(lambda module, given, out: out * module.scale)
    model = FullyShardedDataParallel(model, device_id=dist.get_rank(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.ones(8, 64).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    assert {values["step"].item() for values in state.values()} == {3}
    return peak, {name: values["exp_avg"].shape for name, values in state.items()}


def fsdp2() -> tuple[dict[str, int], list]:
    """Bytes of this rank's GPU: after sharding, at the peak of a step, after it; and what its kernels and collectives are, and how long."""
    from torch.distributed.fsdp import fully_shard

    # a product's own memory is no concern here, and PyTorch before 2.15 keeps it
    with pytest.MonkeyPatch.context() as patch, virtualgpu.recording() as spans, here():
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
        for layer in (*model, model):
            fully_shard(layer)
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
        torch.cuda.synchronize()
    held = {"sharded": begin, "peak": peak, "after": after, "idle": torch.cuda.memory_allocated()}
    return held, [(span.kind, span.name, round((span.end - span.start) * 1e12)) for span in spans]


SAME = {case.__name__: case for case in (fsdp2, counts, measured, sent, a_moment, objects, synced_batch_norm, fsdp1)}


@pytest.fixture(scope="module")
def both():
    return started(SAME), started(SAME, dry=True)


@pytest.mark.parametrize("case", SAME)
def test_a_dry_run_tells_what_a_run_with_numbers_tells(both, case):
    with_numbers, dry = (found[case] for found in both)
    assert not [error for error in (*with_numbers, *dry) if isinstance(error, str)]
    assert with_numbers == dry


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_rank_alone_tells_what_all_tell(on_gpus, n):
    """And shards take sixteen bytes a parameter over the ranks."""
    ranks = on_gpus(fsdp2, n=n, dry=True)
    virtualgpu.reset()
    with virtualgpu.dry_run(like="T4", world_size=n):
        dist.init_process_group("nccl")
        assert fsdp2() == ranks[0]
    held, _ = ranks[0]
    assert all(rank[0] == held for rank in ranks)
    parameters, layer = 8 << 20, 4 << 20
    for when, each in (("sharded", 4), ("after", 16), ("idle", 12)):
        assert 0 <= held[when] - each * parameters // n < 64 << 10  # inputs, steps' counters
    if n > 1:  # two layers gathered and their gradients, beside the shards
        assert 16 * parameters // n + layer < held["peak"] < 16 * parameters // n + 7 * layer


# -- what is not known


def unknown() -> list:
    """What one rank does not know, nobody knows; nor what is not carried, or is too large."""
    rank, where, found = dist.get_rank(), here(), []

    def mine(*numbers):
        """Known on the second rank alone."""
        known = torch.tensor(numbers, device=where)
        return known if rank else known.add_(torch.rand(len(numbers), device=where).long())

    given, other = mine(1, 2), torch.zeros(2, dtype=torch.int64, device=where)
    for op in (MAX, SUM):
        number = mine(0.5)
        dist.all_reduce(number, op=op)
        found.append(number.item())
    part = mine(3)
    dist.reduce_scatter_tensor(part, given)
    dist.broadcast(other.copy_(given), src=0)
    gathered = [torch.ones(2, device=where) for _ in range(2)]
    dist.all_gather(gathered, mine(0.5, 0.5))
    exchanged = torch.ones(2, device=where)
    dist.all_to_all_single(exchanged, torch.ones(2, device=where))
    large = torch.ones(300, device=where)
    dist.all_reduce(large)
    message = torch.ones(2, device=where)
    dist.send(mine(0.5, 0.5), 1) if rank == 0 else dist.recv(message, 0)
    found += [part.tolist(), other.tolist(), *gathered[1].tolist(), *exchanged.tolist(), large[0].item()]
    return [*map(str, found), str(message.tolist())]


def refused() -> list:
    """Tensors with a number that nobody knows, on which no shape may depend: of the CPU, beside one that another rank has told; and one
    of a GPU, of which the other rank did not know what it sent."""
    where, told = here(), torch.tensor([1.5, 2.5], dtype=torch.float64)
    gpus = torch.tensor(5.5, dtype=torch.float64, device=where)
    dist.broadcast(gpus, src=0)
    told[0] = gpus.cpu()
    assert told.nonzero().shape == (2, 1)
    told[1] = torch.rand(3, device=where).sum().cpu()
    told[0] = gpus.cpu()
    mask = torch.tensor([True, False], device=where)
    if dist.get_rank() == 0:
        mask |= torch.rand(2, device=where) > 0
    dist.broadcast(mask, src=0)
    for tensor in (told, mask):
        with pytest.raises(NotImplementedError, match="depends on values"):
            tensor.nonzero()
    return list(map(str, told.tolist()))


def mean_of_all() -> list:
    """As many programs average what each rank has measured: a sum and a number of samples, in one tensor of float64."""
    where = here()
    loss = torch.rand(3, device=where).mean()
    both = torch.tensor([3 + dist.get_rank(), loss.item()], dtype=torch.float64, device=where)
    dist.barrier(device_ids=[where.index])
    dist.all_reduce(both)
    unknown = torch.rand(2, device=where).double()
    dist.all_reduce(unknown)
    count, total = both.tolist()
    return [int(count), total != total, unknown.isnan().any().item() or unknown.tolist()[0] != unknown.tolist()[0]]


def test_what_is_not_known_or_not_carried():
    found = started({"unknown": unknown, "refused": refused, "mean": mean_of_all, "join": uneven_inputs}, dry=True)
    (*zero, sends), (*one, receives) = found["unknown"]
    assert zero == one == ["nan", "nan", "[0]", "[0, 0]", *5 * ["nan"]]
    assert (sends, receives) == ("[1.0, 1.0]", "[nan, nan]")
    assert found["refused"] == 2 * [["nan", "nan"]]
    assert found["mean"] == [[7, True, True]] * 2
    assert [len(rank) for rank in found["join"]] == [2, 2]  # of which ranks are counted, so that it ends


# -- one process that plays one rank of many


@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
@pytest.mark.parametrize("rank, length", [(0, 5), (1, 0)])  # another's broadcast is not known
def test_a_rank_that_is_played_alone_takes_the_others_to_be_like_it(rank, length):
    with virtualgpu.dry_run(rank=rank, world_size=2):
        dist.init_process_group("nccl")
        found, times = counts(), measured() if rank == 0 else None
    mine = [rank + 1, 10 * rank]
    reduced = [2 * (2 + rank), 2 + rank, 2 + rank, (2 + rank) ** 2]
    assert found == [length, [mine, mine], 4 * [rank], 2 * [rank], *reduced, 2 * rank, rank, rank, rank == 0]
    if times is not None:
        mine, ops = [0.25, 4.0], ([0.5, 2], [0.5, 2], [1, 4], [0.5, 2], [0.25, 4])
        assert times[:15] == [numbers for op in ops for numbers in 3 * [op]]
        assert times[15:] == [[mine, mine], [0.5, 8], 2, mine, [mine, mine], [0.5, 8], [0.5, 8]]


def test_a_model_over_hundreds_of_ranks(without_workspaces):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    before = {name: os.environ.get(name) for name in RankConfig(1).environ}
    held = {}
    for world in (8, 512):
        with virtualgpu.dry_run(world_size=world, rank=5):
            dist.init_process_group("nccl")
            assert (dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()) == (5, world, 1)
            held[world], spans = fsdp2()
            held[world]["gather"] = next(length for kind, _, length in spans if kind == "communication")
    assert held[8]["after"] > 50 * held[512]["after"]
    assert held[512]["gather"] > 5 * held[8]["gather"]  # 64 nodes instead of one
    with virtualgpu.dry_run(
        world_size=64, rank=63
    ):  # replicated, sharded and by tensor: what it holds, whom it talks to
        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (4, 8, 2), mesh_dim_names=("replicate", "shard", "tp"))
        block = nn.Sequential(nn.Linear(1024, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 1024, bias=False)).cuda()
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["replicate", "shard"])
        assert tuple(mesh.get_coordinate()) == (3, 7, 1)
        assert [p.to_local().numel() for p in block.parameters()] == [1024 * 4096 // 16] * 2
        with virtualgpu.recording() as spans:
            block(torch.randn(256, 1024, device="cuda")).sum().backward()
            torch.cuda.synchronize()
    gathered, tp = 2 * 1024 * 4096 * 4 // 2, 256 * 1024 * 4
    assert [span.name for span in spans if span.kind == "communication"] == [
        f"all_gather {gathered >> 20} MiB",  # over the 8 that shard
        f"all_reduce {tp >> 20} MiB",  # over the 2 of tensor parallel
        f"reduce_scatter {gathered >> 20} MiB",
        f"all_reduce {gathered // 8 >> 20} MiB",  # of a shard, over the 4 replicas
    ]
    assert not dist.is_initialized() and virtualgpu.machine() is None
    assert before == {name: os.environ.get(name) for name in before}


def test_one_within_another_gives_the_outer_one_back():
    with virtualgpu.dry_run(like="T4", world_size=8, rank=3):
        dist.init_process_group("nccl")
        with virtualgpu.dry_run(world_size=2):
            assert os.environ["WORLD_SIZE"] == "2"
        assert (os.environ["WORLD_SIZE"], os.environ["RANK"]) == ("8", "3")
        x = torch.ones(2, device="cuda")
        dist.all_reduce(x)
        assert (dist.get_world_size(), dist.get_rank()) == (8, 3)
    assert not dist.is_initialized() and "RANK" not in os.environ


def test_what_cannot_be():
    for wrong in ({"world_size": 0}, {"world_size": 4, "rank": 4}, {"world_size": 4, "gpus_per_node": 0}):
        with pytest.raises(ValueError, match=r"whole number|ranks count from 0"), virtualgpu.dry_run(**wrong):
            pass


def test_names_that_were_imported_before(monkeypatch):
    """As a notebook imports them, in its first cell."""
    import sys

    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh

    module = sys.modules[__name__]
    for function in (init_process_group, init_device_mesh):
        monkeypatch.setattr(module, function.__name__, function, raising=False)
    with virtualgpu.dry_run(world_size=8):
        module.init_process_group("nccl")
        assert module.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))["tp"].size() == 4
    assert module.init_process_group is init_process_group and module.init_device_mesh is init_device_mesh


def test_an_optimizers_state_of_all_ranks_is_refused():
    """By an EOFError of pickle, or as if a weight had no state."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with virtualgpu.dry_run(world_size=4, rank=1):
        dist.init_process_group("nccl")
        both = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
        sharded, layer = FullyShardedDataParallel(both, use_orig_params=True), nn.Linear(64, 64).cuda()
        adam = torch.optim.AdamW(sharded.parameters())
        zero = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.Adam)
        for model, optimizer in ((sharded, adam), (layer, zero)):
            model(torch.randn(2, 64, device="cuda")).sum().backward()
            optimizer.step()
        with pytest.raises(NotImplementedError, match=r"plays rank 1 alone.*start all ranks"):
            FullyShardedDataParallel.optim_state_dict(sharded, adam)
        for to in (0, 1):
            with pytest.raises(NotImplementedError, match="consolidate_state_dict gathers what other ranks hold"):
                zero.consolidate_state_dict(to)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_mesh_of_a_tensor_of_ranks(where):
    """Which had no values there; nor had that of an init_device_mesh that was imported by another name."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.device_mesh import init_device_mesh as make_mesh

    with virtualgpu.dry_run(world_size=4, rank=2):
        dist.init_process_group("nccl")
        ranks = torch.arange(4, device=where).view(2, 2)
        groups = [dist.new_group([0, 2]), dist.new_group([2, 3])]
        for mesh in (
            DeviceMesh("cuda", ranks),
            DeviceMesh.from_group(groups, "cuda", mesh=ranks, mesh_dim_names=("a", "b")),
            make_mesh("cuda", (2, 2)),
        ):
            assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and tuple(mesh.get_coordinate()) == (1, 0)
        assert DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh=ranks.flatten()).get_local_rank() == 2


def test_one_layout_after_another():
    """The tp groups of both meshes are equal to DTensor, which remembers how it dealt with the first; that one's groups are gone."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for data in (16, 4):
        with virtualgpu.dry_run(world_size=32):
            dist.init_process_group("nccl")
            mesh = dist.init_device_mesh("cuda", (16 // data, data, 2), mesh_dim_names=("pp", "dp", "tp"))
            layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0))}
            parallelize_module(layers, mesh["tp"], plan)
            layers(torch.zeros(32, 64, device="cuda")).sum().backward()
            dist.destroy_process_group()


# -- what other processes hold of the same GPU


def beside_others(nbytes: int) -> tuple[int, int, str]:
    """All ranks on GPU 0: what each sees free before and after, and what happens where both want more than there is."""
    torch.cuda.set_device(0)
    x = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    dist.barrier(dist.new_group(backend="gloo"))
    free, capacity = torch.cuda.mem_get_info(0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(free + 1, dtype=torch.uint8, device="cuda:0")
    dist.barrier(dist.new_group(backend="gloo"))
    return free, capacity - x.nbytes, str(caught.value)


def test_processes_share_a_gpu(on_gpus):
    (free, without, message), (other, *_) = on_gpus(beside_others, 1 << 30)
    assert free == other  # each sees both
    assert without - free >= 1 << 30
    assert "CUDA out of memory" in message
    virtualgpu.gpus(2)  # a notebook and its ranks do so, too
    before = launch(torch.cuda.mem_get_info)[0][0]
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:0")
    # before, only its ranks had used the GPU
    assert before - launch(torch.cuda.mem_get_info)[0][0] == held.nbytes + CONTEXT
