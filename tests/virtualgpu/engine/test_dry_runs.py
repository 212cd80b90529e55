# ruff: noqa: F403, F405
"""What a dry run cannot do, and what its tensors cannot do after it: said in a sentence, with the way out. And what is on meta."""

import copy  # noqa: F401
import io
import math
import pickle

import pytest
from torch.nn.utils import rnn

from tests.virtualgpu.engine.tools import *


@pytest.fixture
def dry(gpus):
    with virtualgpu.dry_run():
        yield gpus


UNKNOWN = "values, which this dry run does not know"
# x, y: numbers and whole numbers that no dry run knows; w, h: of a GPU and of the host, over which something unknown was written
REFUSED = table(f"""
    x[x > 0] | the shape of what index returns depends on {UNKNOWN}
    (x > 0).nonzero() | the shape of what nonzero returns depends on {UNKNOWN}
    x.masked_select(x > 0) | {UNKNOWN}
    y.unique() | {UNKNOWN}
    x[torch.ones(6, dtype=BOOL, device="cuda"), x[0] > 0] | {UNKNOWN}
    x[w] | {UNKNOWN}
    x[~w[:6].clone()] | {UNKNOWN}
    x[w.cpu()] | {UNKNOWN}
    x.masked_select(w[:, None]) | {UNKNOWN}
    h.nonzero() | {UNKNOWN}
    F.one_hot(w.long()) | {UNKNOWN}
    F.one_hot(y) | Give num_classes
    x.repeat_interleave(y, dim=0) | depends on values
    rnn.pack_padded_sequence(x[..., None], y[:6].cpu(), enforce_sorted=False) | lengths, which this dry run does not know\\. Give the module the padded
    F.ctc_loss(x[:, None].log_softmax(2), torch.tensor([[1, 2, 3]]).cuda(), [6], y[:1]) | its lengths say, which this dry run does not know
    torch.save(x, io.BytesIO()) | no values to save
    h.data_ptr() | data_ptr: a dry run gives tensors on the CPU no memory.*put them on a GPU
    # quantized
    torch.quantize_per_tensor(x, 0.1, 0, torch.qint8) | quantized tensors are not modelled in a dry run \\(.*outside dry_run
    torch.quantize_per_tensor_dynamic(x, torch.qint8, False) | quantized tensors are not modelled in a dry run
    torch.quantize_per_channel(x, x[0], x[0], 1, torch.qint8) | quantized tensors are not modelled in a dry run
    torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8) | quantized tensors are not modelled in a dry run
    torch._empty_affine_quantized([4], scale=0.1, zero_point=0, dtype=torch.qint8, device="cuda") | quantized tensors are not modelled
""")


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_a_dry_run_cannot_do_says_so(dry, call, message):
    x, h, w = rand(6, 8, learns=False), torch.zeros(6), whole(6, dtype=BOOL)
    w |= x[:, 0] > 0
    h[2:4] = x[0, :2].cpu()
    names = {"x": x, "y": x.argmax(1), "w": w, "h": h}
    with pytest.raises((NotImplementedError, RuntimeError), match=message):
        eval(call, globals(), names)


def test_what_is_known_in_spite_of_that(dry):
    anew, rows = torch.tensor([1, 2], device="cuda"), rand(3, 2, learns=False)
    anew.random_()
    anew.copy_(torch.tensor([0, 4]))
    assert anew.nonzero().tolist() == [[1]]
    assert rows.repeat_interleave((rows.sum(1) > 0).long(), dim=0, output_size=5).shape == (5, 2)
    classes = rows.argmax(1)
    hot = F.one_hot(classes, 5)
    assert (hot.shape, hot.dtype, hot.device) == ((3, 5), LONG, classes.device)
    out, _ = nn.LSTM(8, 4, device="cuda")(rnn.pad_sequence([ones(n, 8) for n in (3, 2)]))
    assert out.shape == (3, 2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("cuda")
    # accelerate's FSDP2 found an optimizer's parameters by their addresses: where all were 0, most went without a state
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == 4


def test_one_hot_with_numbers_is_that_of_the_cpu(gpus):
    for classes in (torch.tensor([[2, 0], [1, 1]]), torch.empty(0, dtype=LONG)):
        assert torch.equal(F.one_hot(classes.cuda(), 4).cpu(), F.one_hot(classes, 4))
    assert torch.equal(F.one_hot(torch.tensor([2, 0]).cuda()).cpu(), F.one_hot(torch.tensor([2, 0])))
    with pytest.raises(RuntimeError, match="num_classes should be positive"):
        F.one_hot(torch.tensor([2, 0]).cuda(), 0)
    with pytest.raises(RuntimeError, match="LongTensor"):
        F.one_hot(ones(2))


class Plain(torch.Tensor):
    """A subclass that overrides nothing."""


def test_a_list_of_numbers_under_a_default_device(dry):
    """There PyTorch's getters ask Tensor.is_meta as it is replaced: False, and C++ looked for the numbers in meta tensors."""
    with torch.device("cuda"):
        made = torch.as_tensor([torch.ones(()), torch.ones(()).as_subclass(Plain)])
    assert (made.device, made.shape) == (ZERO, (2,))


LATER = table("""
    x + 1
    x + y
    y + x
    y.copy_(x)
    x[0, 0].item()
    bool(x[0, 0])
    x.tolist()
    x.cpu()
    x.to("cuda:1")
    x.nonzero()
    x[y > 0]
    torch.equal(x, y)
    torch.save(x, io.BytesIO())
""")


@pytest.mark.parametrize("call", LATER)
def test_a_tensor_of_a_dry_run_after_it(gpus, call):
    with virtualgpu.dry_run():
        x, model = ones(3, 3), nn.Linear(3, 3, device="cuda")
    with pytest.raises(RuntimeError, match=r"dry run.* has no values.*make it outside dry_run\(\)"):
        eval(call, globals(), {"x": x, "y": ones(3, 3)})
    assert repr(x) == "tensor(..., device='cuda:0', size=(3, 3), dtype=torch.float32)"
    with pytest.raises(RuntimeError, match="made in a dry run"):
        model(ones(2, 3))


def test_a_generators_state_that_came_over_a_gpu():
    """accelerate sends rank 0's to all ranks; in a dry run it has no values, and the generator goes on from its own."""
    first = torch.Generator().manual_seed(1).get_state()
    with virtualgpu.dry_run(1):
        generator = torch.Generator().manual_seed(2)
        second = generator.get_state()
        assert generator.set_state(second.cuda().cpu()) is generator
        kept = generator.get_state()
        generator.set_state(first)
        set_anew = generator.get_state()
    assert torch.equal(kept, second) and torch.equal(set_anew, first) and not torch.equal(first, second)


# -- what is the caller's

OUTSIDE = {
    "a tensor": lambda: (values := torch.arange(3.0), values),
    "a NumPy array": lambda: (values := pytest.importorskip("numpy").arange(3.0), torch.from_numpy(values)),
    "a view": lambda: (values := torch.arange(6.0), values[3:]),
    "a parameter": lambda: (values := nn.Parameter(torch.arange(3.0)), values.data),
    "whole numbers": lambda: (values := torch.arange(3), values),
}
WRITTEN = table("""
    t.add_(unknown)
    t.copy_(unknown)
    t.__setitem__(0, unknown[0])
    t.add_(unknown).add_(unknown)
    torch.mul(unknown, 2, out=t)
    t.add_(unknown).mul_(2).sub_(1)
""")


@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize("make", OUTSIDE)
def test_what_is_the_callers_keeps_its_numbers(gpus, make, write):
    """A dry run has none to write there. In it, they are not known; after it, they are as they were before."""
    is_whole = make == "whole numbers"
    if is_whole and "mul_" in write:
        pytest.skip("what is known is carried out on whole numbers, which stay to be read")
    owner, tensor = OUTSIDE[make]()
    before = owner.tolist()
    with virtualgpu.dry_run():
        other = rand(3, learns=False)
        other = other.exp().long() if is_whole else other.cumsum(0).to(tensor.dtype)
        eval(write, globals(), {"t": tensor, "unknown": other.cpu()})
        if not is_whole:
            read = (
                tensor[0].item(),
                tensor.tolist()[0],
                *tensor.numpy()[:1],
                (tensor + 1)[0].item(),
                tensor.sum().item(),
            )
            assert all(map(math.isnan, read)) and "nan" in repr(tensor)
        with pytest.raises(NotImplementedError, match=UNKNOWN):
            tensor.nonzero()
        with pytest.raises(RuntimeError, match="no values to save"):
            torch.save(tensor, io.BytesIO())
    assert owner.tolist() == before
    with virtualgpu.dry_run():  # another one knows them
        assert tensor.tolist() == before[-3:] and tensor.nonzero().shape == (3 - (before[-3] == 0), 1)


def test_an_array_that_is_overwritten_by_what_is_not_known(dry):
    """It comes with its numbers, which stay to be read; no shape depends on them, nor on what comes of them."""
    numpy = pytest.importorskip("numpy")
    counted, passed_on = (torch.from_numpy(numpy.array([0, 3, 0])) for _ in range(2))
    counted[1:] = rand(2, 8).argmax(1).cpu()
    passed_on += counted
    for forgotten in (counted, counted + 1, counted.view(3, 1), passed_on):
        with pytest.raises(NotImplementedError, match=UNKNOWN):
            forgotten.nonzero()
    for known in (counted, passed_on):
        known.copy_(torch.tensor([0, 4, 5]))
        assert known.nonzero().tolist() == [[1], [2]]
    tensor = torch.from_numpy(numpy.arange(3.0))
    tensor += torch.rand(3, device="cuda").cpu()
    assert math.isnan(tensor[0].item())
    tensor.fill_(7)
    assert tensor.tolist() == [7, 7, 7] and tensor.nonzero().shape == (3, 1)


def test_checks_of_numbers_hold(dry):
    """all() is what a program asks before it goes on; whatever else it asks is not so."""
    x = torch.rand(3, 2, device="cuda")
    assert torch.isfinite(x).all() and (x > 0).all(0).all().item() is True and not (x > 0).any()
    assert not (x > 0).all(0)[0] and bool(x.isnan().any()) is False
    seen = x > 0  # transformers asks by a sum whether a padding mask hides nothing, and then gives attention none
    assert seen.sum() == seen.numel()
    assert not any(map(bool, (seen.sum() == 5, seen.sum() > 5, x.sum() == x.numel())))


def test_what_an_initializer_draws_until_it_suits_is_no_decision_of_the_program(dry, recwarn):
    nn.init.trunc_normal_(torch.empty(64, 64, device="cuda"), std=0.02)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="a dry run computes shapes, no values"):
        bool(torch.rand(2, device="cuda").any())


# -- what a program puts on meta itself is there in a dry run, too, where every tensor of the CPU's is really on meta

META = torch.device("meta")


@pytest.fixture(params=["numbers", "dry"])
def run(request, gpus):
    """A run with numbers and a dry one: each test says what both do."""
    with perhaps_dry(request.param == "dry"):
        yield


def on_meta():
    with META:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def by_default():
    torch.set_default_device("meta")
    try:
        return [torch.ones(2), torch.tensor([1.0]), torch.as_tensor([1.0]), nn.Linear(2, 2).weight]
    finally:
        torch.set_default_device(None)


THERE = table("""
    [x, x + 1, x[1:], torch.ones_like(x), x.double(), *x.chunk(2), torch.cat([x, x]), x.new_tensor([1.0])]
    [torch.ones(3).to("meta"), torch.ones(3).to(x), ones(3).to("meta"), x.to("meta", SINGLE)]
    [*on_meta().parameters(), *nn.Linear(3, 2).to("meta").parameters(), *copy.deepcopy(on_meta()).parameters()]
    [nn.Linear(3, 2, device="meta")(torch.ones(1, 3, device="meta")), *nn.BatchNorm1d(2, device="meta").buffers()]
    [torch.tensor([1.0], device="meta"), torch.asarray([1.0], device="meta"), *by_default()]
""")


def test_where_it_says_it_is(run, tmp_path):
    x = torch.empty(3, device="meta")
    torch.save({"weights": [torch.from_numpy(pytest.importorskip("numpy").ones(3))]}, tmp_path / "file.pt")
    made = [tensor for call in THERE for tensor in eval(call, globals(), {"x": x})]
    made += torch.load(tmp_path / "file.pt", map_location="meta")["weights"]
    assert all(tensor.is_meta and tensor.device == tensor.untyped_storage().device == META for tensor in made)
    others = [torch.ones(3), torch.ones_like(x, device="cpu"), torch.ones_like(x, device="cuda")]
    others += [*nn.Linear(3, 2).parameters(), ones(3) + 1]
    assert not any(tensor.is_meta or tensor.device == META for tensor in others)
    assert (
        x.to("meta") is x and repr(x) == "tensor(..., device='meta', size=(3,))" and "meta" not in repr(torch.ones(3))
    )
    before = virtualgpu.machine().clock.host
    assert x.copy_(torch.ones(3)) is x and x.is_meta and virtualgpu.machine().clock.host == before  # does nothing
    pickle.dumps(x)


def test_it_gets_memory_by_to_empty_or_a_state_dict(run):
    model, state = on_meta(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    with pytest.warns(UserWarning, match="a no-op"):
        model.load_state_dict(state)
    assert all(p.is_meta for p in model.parameters()) and torch.cuda.memory_allocated() == 0
    model.to_empty(device="cuda")
    assert torch.cuda.memory_allocated() == 4 * 512 and not any(p.is_meta for p in model.parameters())
    assert model(ones(1, 3)).is_cuda
    model = on_meta()
    model.load_state_dict(state, assign=True)
    assert not any(p.is_meta for p in model.parameters())


WITHOUT_NUMBERS = table("""
    x.cuda() | Cannot copy out of meta tensor
    x.to("cuda") | Cannot copy out of meta tensor
    x.cpu() | Cannot copy out of meta tensor
    on_meta().cuda() | Cannot copy out of meta tensor
    on_meta().to("cpu") | to_empty\\(\\) instead of
    x.sum().item() | cannot be called on meta tensors
    x.tolist() | Cannot copy out of meta tensor
    x.numpy() | can't convert meta device type
    torch.empty(3).copy_(x) | Cannot copy out of meta tensor
    torch.empty(3, device="cuda").copy_(x) | Cannot copy out of meta tensor
    x + ones(3) | meta and cuda:0|cuda:0 and meta
""")


@pytest.mark.parametrize("call, message", WITHOUT_NUMBERS)
def test_it_has_no_numbers(run, call, message):
    with pytest.raises((NotImplementedError, RuntimeError, TypeError), match=message):
        eval(call, globals(), {"x": torch.empty(3, device="meta")})


def test_fsdp_refuses_what_was_never_given_memory():
    """The dry run trained, and on the machine PyTorch refused."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    with virtualgpu.dry_run(like="T4", world_size=2):
        dist.init_process_group("nccl")
        x = ones(1, 3)
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
