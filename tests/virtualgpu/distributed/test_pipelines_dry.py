"""Pipelines without numbers: objects that stages tell each other, a stage that is played alone, pipelines of sharded stages."""

import pytest
import torch
from torch import nn

import virtualgpu

WIDTH, ROWS, MICRO_BATCHES = 256, 64, 8


def told():
    """Objects of every kind; in a dry run tensors have no values, and these do."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    group, every, sent = dist.new_group(backend="nccl"), [None] * size, [None]
    dist.all_gather_object(every, {"rank": rank}, group=group)
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, src=1, group=group)
    if rank == 0:
        dist.send_object_list([(1, "two")], dst=1, group=group)
    else:
        dist.recv_object_list(sent, src=0, group=group)
    return every, shared, sent, torch.rand(2, device="cuda").sum().item()


def test_objects_have_values_in_a_dry_run(on_gpus):
    for rank, (every, shared, sent, value) in enumerate(on_gpus(told, dry=True)):
        assert every == [{"rank": 0}, {"rank": 1}] and shared == ["from 1", 1]
        assert sent == [[None], [(1, "two")]][rank]
        assert value != value  # not a number: it was a dry run


def stage(static: bool = True):
    """Two steps of this rank's stage by 1F1B: its peak, and how often each pass came."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    part = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).to(device)
    received, sent = (torch.empty(ROWS, WIDTH, device=device, requires_grad=wants) for wants in (rank > 0, True))
    known = {"input_args": (received,), "output_args": (sent,)} if static else {}
    run = Schedule1F1B(PipelineStage(part, rank, ranks, device, **known), MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    x, y = (torch.randn(MICRO_BATCHES * ROWS, WIDTH, device=device) for _ in range(2))
    for _ in range(2):
        run.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == ranks - 1 else {}))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def alone(rank: int, ranks: int, **options):
    import torch.distributed as dist

    with virtualgpu.dry_run(like="T4", world_size=ranks, rank=rank):
        dist.init_process_group("nccl")
        return stage(**options)


def test_a_stage_alone_has_the_memory_that_it_has_among_all(on_gpus):
    ranks = on_gpus(stage, n=3, dry=True)
    virtualgpu.reset()
    with pytest.warns(UserWarning, match="the other side is taken to be there"):
        found = [alone(rank, 3) for rank in range(3)]
    assert found == ranks


def test_a_stage_alone_says_what_it_must_be_told(recwarn):
    with pytest.raises(NotImplementedError, match="given input_args= and output_args="):
        alone(2, 4, static=False)


def two_dimensional():
    """A pipeline of two stages, each on two ranks that share its parameters by FSDP2."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
    at, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    parts, x, y = model_and_data()
    part = parts[at].to(device)
    for layer in part:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(part, mesh=mesh["dp"])
    pipe = PipelineStage(part, at, 2, device, group=mesh.get_group("pp"))
    run = Schedule1F1B(pipe, 2, loss_fn=nn.functional.mse_loss)
    x, y = x.chunk(2)[replica].to(device), y.chunk(2)[replica].to(device)
    run.step(*((x,) if at == 0 else ()), **({"target": y} if at == 1 else {}))
    return at, [p.grad.full_tensor().cpu() for p in part.parameters()]


def model_and_data():
    torch.manual_seed(0)
    parts = [nn.Sequential(*[nn.Linear(16, 16) for _ in range(2)]) for _ in range(2)]
    return parts, torch.randn(16, 16), torch.randn(16, 16)


def test_stages_that_are_sharded(on_gpus):
    parts, x, y = model_and_data()
    nn.functional.mse_loss(parts[1](parts[0](x)), y).backward()
    for at, gradients in on_gpus(two_dimensional, n=4):
        for gradient, parameter in zip(gradients, parts[at].parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_a_shape_of_a_tensor_is_nobodys_memory():
    """Stages of older versions tell each other shapes so."""
    with virtualgpu.dry_run(1):
        shape = torch.ones(1 << 20, device="cuda").to("meta")
        assert torch.cuda.memory_allocated() == 0 and shape.shape == (1 << 20,) and shape.device.type != "cuda"


def test_what_export_asserts_of_a_tensor():
    virtualgpu.gpus(2)
    x = torch.ones(2, device="cuda:1")
    check = torch.ops.aten._assert_tensor_metadata.default
    assert check(x, dtype=torch.float32, device=torch.device("cuda", 1), layout=torch.strided) is None
    for wrong in ({"device": torch.device("cuda", 0)}, {"dtype": torch.int32}):
        with pytest.raises(RuntimeError, match="mismatch"):
            check(x, **wrong)
