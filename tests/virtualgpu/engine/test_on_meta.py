"""What a program puts on meta itself is there in a dry run, too, where every tensor of the CPU's is really on meta."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import virtualgpu

META = torch.device("meta")


@pytest.fixture(params=["numbers", "dry"])
def run(request, gpus):
    """A run with numbers and a dry one: each test says what both do."""
    with virtualgpu.dry_run() if request.param == "dry" else contextlib.nullcontext():
        yield request.param


def on_meta():
    with META:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def by_default():
    torch.set_default_device("meta")
    try:
        return [torch.ones(2), torch.tensor([1.0]), torch.as_tensor([1.0]), nn.Linear(2, 2).weight]
    finally:
        torch.set_default_device(None)


def test_where_it_says_it_is(run, tmp_path):
    x = torch.empty(3, device="meta")
    torch.save({"weights": [torch.from_numpy(pytest.importorskip("numpy").ones(3))]}, tmp_path / "file.pt")
    made = [x, x + 1, x[1:], torch.ones_like(x), torch.ones(3).to("meta"), torch.ones(3).to(x), x.double(), *x.chunk(2)]
    made += [*on_meta().parameters(), *nn.Linear(3, 2).to("meta").parameters(), torch.ones(3).cuda().to("meta")]
    made += [nn.Linear(3, 2, device="meta")(torch.ones(1, 3, device="meta"))]
    made += [
        *by_default(),
        torch.tensor([1.0], device="meta"),
        torch.asarray([1.0], device="meta"),
        x.new_tensor([1.0]),
    ]
    made += torch.load(tmp_path / "file.pt", map_location="meta")["weights"]
    made += [*copy.deepcopy(on_meta()).buffers(), *nn.BatchNorm1d(2, device="meta").buffers(), torch.cat([x, x])]
    assert all(tensor.is_meta and tensor.device == tensor.untyped_storage().device == META for tensor in made)
    others = [torch.ones(3), torch.ones_like(x, device="cpu"), torch.ones_like(x, device="cuda")]
    others += [*nn.Linear(3, 2).parameters(), torch.ones(3).cuda() + 1]
    assert not any(tensor.is_meta or tensor.device == META for tensor in others)
    assert x.to("meta") is x and x.to("meta", torch.float32) is x


def test_it_gets_memory_by_to_empty(run):
    model = on_meta()
    assert torch.cuda.memory_allocated() == 0
    model.to_empty(device="cuda")
    assert torch.cuda.memory_allocated() == 4 * 512 and not any(p.is_meta for p in model.parameters())
    assert model(torch.ones(1, 3, device="cuda")).device.type == "cuda"


def test_a_state_dict_takes_its_place(run):
    model, state = on_meta(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    with pytest.warns(UserWarning, match="a no-op"):
        model.load_state_dict(state)
    assert all(p.is_meta for p in model.parameters())
    model.load_state_dict(state, assign=True)
    assert not any(p.is_meta for p in model.parameters())


REFUSED = {
    "cuda": (lambda x: x.cuda(), NotImplementedError, "Cannot copy out of meta tensor"),
    "cpu": (lambda x: x.cpu(), NotImplementedError, "Cannot copy out of meta tensor"),
    "Module.cuda": (lambda x: on_meta().cuda(), NotImplementedError, "Cannot copy out of meta tensor"),
    "Module.to": (lambda x: on_meta().to("cpu"), NotImplementedError, r"to_empty\(\) instead of"),
    "item": (lambda x: x.sum().item(), RuntimeError, "cannot be called on meta tensors"),
    "tolist": (lambda x: x.tolist(), NotImplementedError, "Cannot copy out of meta tensor"),
    "numpy": (lambda x: x.numpy(), TypeError, "can't convert meta device type"),
    "copied to the CPU": (lambda x: torch.empty(3).copy_(x), NotImplementedError, "Cannot copy out of meta tensor"),
    "copied to a GPU": (lambda x: torch.empty(3, device="cuda").copy_(x), NotImplementedError, "Cannot copy out of"),
    "beside a GPU's": (lambda x: x + torch.ones(3, device="cuda"), RuntimeError, "meta and cuda:0|cuda:0 and meta"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_it_has_no_numbers(run, way):
    function, kind, words = REFUSED[way]
    with pytest.raises(kind, match=words):
        function(torch.empty(3, device="meta"))


def test_it_is_printed_as_pytorch_does(run):
    assert repr(torch.empty(3, device="meta")) == "tensor(..., device='meta', size=(3,))"
    assert "meta" not in repr(torch.ones(3))


def test_a_copy_onto_it_does_nothing(run):
    x = torch.empty(3, device="meta")
    before = virtualgpu.machine().clock.host
    assert x.copy_(torch.ones(3)) is x and x.is_meta and virtualgpu.machine().clock.host == before


def test_fsdp_refuses_what_was_never_given_memory():
    """The dry run trained, and on the machine PyTorch refused."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    with virtualgpu.dry_run(like="T4", world_size=2):
        dist.init_process_group("nccl")
        x = torch.ones(1, 3, device="cuda")
        before = torch.cuda.max_memory_allocated()
        without, model = fully_shard(on_meta()), fully_shard(on_meta())
        assert all(p.is_meta for p in without.parameters())
        assert torch.cuda.max_memory_allocated() == before  # it was given memory here, and once more by to_empty
        with pytest.raises(RuntimeError, match=r"should be materialized from meta device .* \['0.weight', '0.bias'"):
            without(x)
        model.to_empty(device="cuda")
        model(x).sum().backward()
        assert {p.grad.device.type for p in model.parameters()} == {"cuda"}
        dist.destroy_process_group()
