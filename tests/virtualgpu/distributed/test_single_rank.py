"""One process that plays one rank of many."""

import os

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu.distributed import rank_config


def sharded_step() -> tuple[dict[str, int], list]:
    """Bytes, and collectives, of a step of FSDP2."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with virtualgpu.recording() as spans:
        for _ in range(2):
            model(torch.randn(64, 1024, device=device)).sum().backward()
            optimizer.step()
        torch.cuda.synchronize()
    assert dist.get_backend() in ("nccl", "cpu:gloo,cuda:nccl")
    told = [(span.kind, span.name, span.start, span.end) for span in spans]
    return {"peak": torch.cuda.max_memory_allocated(), "held": torch.cuda.memory_allocated()}, told


@pytest.mark.parametrize("n", [1, 2, 4])
def test_it_tells_what_all_ranks_tell(on_gpus, n):
    def alone():
        import torch.distributed as dist

        with virtualgpu.dry_run(like="T4", world_size=n):
            dist.init_process_group("nccl")
            return sharded_step()

    ranks = on_gpus(sharded_step, n=n, dry=True)
    virtualgpu.reset()
    memory, told = alone()
    assert all(rank[0] == memory for rank in ranks)
    lengths = [[(name, round((end - start) * 1e12)) for _, name, start, end in spans] for spans in (told, ranks[0][1])]
    assert lengths[0] == lengths[1]


def test_a_model_over_hundreds_of_ranks(without_workspaces):
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    before = {name: os.environ.get(name) for name in rank_config.make(1).environ}
    held = {}
    for world in (8, 512):
        with virtualgpu.dry_run(world_size=world, rank=5):
            dist.init_process_group("nccl")
            assert (dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()) == (5, world, 1)
            held[world], told = sharded_step()
            gathers = [end - start for kind, name, start, end in told if kind == "communication"]
            held[world]["gather"] = gathers[0]
    assert held[8]["held"] > 60 * held[512]["held"]
    assert held[512]["gather"] > 5 * held[8]["gather"]  # 64 nodes instead of one
    with virtualgpu.dry_run(world_size=64, rank=9):
        dist.init_process_group()
        mesh = dist.init_device_mesh("cuda", (8, 8), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024)).cuda()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model(torch.randn(4, 1024, device="cuda")).sum().backward()
        assert tuple(mesh.get_coordinate()) == (1, 1) and model[0].weight.to_local().shape == (256, 1024)
    assert not dist.is_initialized() and virtualgpu.machine() is None
    assert before == {name: os.environ.get(name) for name in before}


def test_one_within_another_gives_the_outer_one_back():
    import torch.distributed as dist

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
        mesh = module.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        assert mesh["tp"].size() == 4
    assert module.init_process_group is init_process_group and module.init_device_mesh is init_device_mesh


def test_an_optimizers_state_of_all_ranks_is_refused():
    """By an EOFError of pickle, or as if a weight had no state."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with virtualgpu.dry_run(world_size=4, rank=1):
        dist.init_process_group("nccl")
        sharded = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda(), use_orig_params=True
        )
        layer = nn.Linear(64, 64).cuda()
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
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.device_mesh import init_device_mesh as make_mesh

    with virtualgpu.dry_run(world_size=4, rank=2):
        dist.init_process_group("nccl")
        ranks = torch.arange(4, device=where).view(2, 2)
        meshes = [
            DeviceMesh("cuda", ranks),
            DeviceMesh.from_group(
                [dist.new_group([0, 2]), dist.new_group([2, 3])], "cuda", mesh=ranks, mesh_dim_names=("a", "b")
            ),
            make_mesh("cuda", (2, 2)),
        ]
        for mesh in meshes:
            assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and tuple(mesh.get_coordinate()) == (1, 0)
        assert DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh=ranks.flatten()).get_local_rank() == 2


def test_one_layout_after_another():
    """The tp groups of both meshes are equal to DTensor, which remembers how it dealt with the first; that one's groups are gone."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for data in (16, 4):
        with virtualgpu.dry_run(world_size=32):
            dist.init_process_group("nccl")
            mesh = dist.init_device_mesh("cuda", (16 // data, data, 2), mesh_dim_names=("pp", "dp", "tp"))
            layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
            parallelize_module(
                layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0))}
            )
            layers(torch.zeros(32, 64, device="cuda")).sum().backward()
            dist.destroy_process_group()


def test_three_dimensions():
    """Replicated, sharded and by tensor, on 64 ranks: what this one holds, and whom it talks to."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with virtualgpu.dry_run(world_size=64, rank=63):
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
    told = [span.name for span in spans if span.kind == "communication"]
    gathered, tp = 2 * 1024 * 4096 * 4 // 2, 256 * 1024 * 4
    assert told == [
        f"all_gather {gathered >> 20} MiB",  # over the 8 that shard
        f"all_reduce {tp >> 20} MiB",  # over the 2 of tensor parallel
        f"reduce_scatter {gathered >> 20} MiB",
        f"all_reduce {gathered // 8 >> 20} MiB",  # of a shard, over the 4 replicas
    ]
