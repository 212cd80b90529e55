"""What a dry run cannot do, and what its tensors cannot do after it: said in a sentence, with the way out."""

import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import virtualgpu

F = nn.functional


@pytest.fixture
def dry(gpus):
    with virtualgpu.dry_run():
        yield gpus


LENGTHS = {
    "a list of lengths": lambda x: rnn.pack_padded_sequence(x, [5, 3, 2]),
    "a tensor": lambda x: rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2])),
    "not sorted": lambda x: rnn.pack_padded_sequence(x, [3, 5, 2], enforce_sorted=False),
    "pack_sequence": lambda x: rnn.pack_sequence([x[:3, 0], x[:2, 0]]),
    "of masks on the GPU": lambda x: rnn.pack_padded_sequence(
        x, torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]]).cuda().sum(1).cpu()
    ),
}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("how", LENGTHS)
def test_packed_sequences(gpus, kind, how):
    """As with numbers: shapes, lengths, the bytes and seconds of a training step."""

    def run():
        virtualgpu.gpus(1)
        model, x = kind(8, 4, num_layers=2, bidirectional=True).cuda(), torch.randn(5, 3, 8).cuda().requires_grad_()
        packed = LENGTHS[how](x)
        out, _ = model(packed)
        padded, lengths = rnn.pad_packed_sequence(out, total_length=6)
        padded.square().sum().backward()
        made = [(tensor.shape, tensor.stride(), tensor.device) for tensor in (packed.data, padded, x.grad)]
        torch.cuda.synchronize()
        figures = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), virtualgpu.machine().clock.host
        return made, packed.batch_sizes.tolist(), lengths.tolist(), figures

    wanted = run()
    virtualgpu.reset()
    with virtualgpu.dry_run(1):
        assert run() == wanted


def test_a_packed_sequence_of_lengths_that_are_not_known(dry):
    lengths = torch.randn(3, 5, device="cuda").argmax(1).cpu()
    with pytest.raises(
        NotImplementedError, match=r"lengths, which this dry run does not know\. Give the module the padded"
    ):
        rnn.pack_padded_sequence(torch.randn(5, 3, 8, device="cuda"), lengths, enforce_sorted=False)


def test_a_padded_sequence_works(dry):
    out, _ = nn.LSTM(8, 4, device="cuda")(rnn.pad_sequence([torch.ones(n, 8, device="cuda") for n in (3, 2)]))
    assert out.shape == (3, 2, 4)


SPARSE = {
    "coo": lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), device="cuda"),
    "coo, its size in its indices": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]).cuda(), torch.ones(2).cuda()
    ),
    "coo of the CPU": lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0]),
    "csr": lambda: torch.sparse_csr_tensor([0, 1, 1], [0], [1.0], (2, 2), device="cuda"),
    "zeros": lambda: torch.zeros(3, layout=torch.sparse_coo, device="cuda"),
    "a gradient": lambda: (
        nn.Embedding(3, 4, sparse=True, device="cuda")(torch.zeros(2, dtype=torch.long, device="cuda")).sum().backward()
    ),
}


@pytest.mark.parametrize("how", SPARSE)
def test_sparse_tensors(dry, how):
    with pytest.raises(NotImplementedError, match="sparse tensors are not modelled in a dry run"):
        SPARSE[how]()


QUANTIZED = {
    "per tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "by its own range": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False),
    "per channel": lambda x: torch.quantize_per_channel(x, x[0], x[0], 0, torch.qint8),
    "of the CPU": lambda x: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "empty": lambda x: torch._empty_affine_quantized([4], scale=0.1, zero_point=0, dtype=torch.qint8, device="cuda"),
}


@pytest.mark.parametrize("how", QUANTIZED)
def test_quantized_tensors(dry, how):
    with pytest.raises(
        NotImplementedError, match=r"quantized tensors are not modelled in a dry run \(.*outside dry_run"
    ):
        QUANTIZED[how](torch.ones(4, 4, device="cuda"))


@pytest.mark.parametrize("kind", ["per tensor", "per channel"])
def test_rounding_as_if_quantized_works(gpus, kind):
    def train():
        x = torch.ones(40, 50, device="cuda", requires_grad=True)
        if kind == "per tensor":
            out = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255)
        else:
            scales, zeros = torch.ones(50, device="cuda"), torch.zeros(50, device="cuda", dtype=torch.int32)
            out = torch.fake_quantize_per_channel_affine(x, scales, zeros, 1, 0, 255)
        out.sum().backward()
        return out.dtype, out.shape, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    with virtualgpu.gpus(1):
        real = train()
    with virtualgpu.dry_run(1):
        assert train() == real


def test_attention_of_jagged_tensors(dry):
    parts = [torch.ones(length, 2, 8) for length in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda").transpose(1, 2)
    with pytest.raises(NotImplementedError, match=r"attention of nested tensors .* padded ones \(to_padded_tensor\)"):
        F.scaled_dot_product_attention(x, x, x)


def test_one_hot_wants_the_number_of_classes_of_what_is_not_known(dry):
    classes = torch.randn(3, 5, device="cuda").argmax(1)
    with pytest.raises(NotImplementedError, match="Give num_classes"):
        F.one_hot(classes)
    hot = F.one_hot(classes, 5)
    assert (hot.shape, hot.dtype, hot.device) == ((3, 5), torch.long, classes.device)


def test_one_hot_with_numbers_is_that_of_the_cpu(gpus):
    for classes in (torch.tensor([[2, 0], [1, 1]]), torch.empty(0, dtype=torch.long)):
        assert torch.equal(F.one_hot(classes.cuda(), 4).cpu(), F.one_hot(classes, 4))
    assert torch.equal(F.one_hot(torch.tensor([2, 0]).cuda()).cpu(), F.one_hot(torch.tensor([2, 0])))
    with pytest.raises(RuntimeError, match="num_classes should be positive"):
        F.one_hot(torch.tensor([2, 0]).cuda(), 0)
    with pytest.raises(RuntimeError, match="LongTensor"):
        F.one_hot(torch.ones(2).cuda())


def test_repeats_whose_sum_is_told(dry):
    rows = torch.randn(3, 2, device="cuda")
    repeats = (rows.sum(1) > 0).long()
    assert rows.repeat_interleave(repeats, dim=0, output_size=5).shape == (5, 2)
    with pytest.raises(NotImplementedError, match="depends on values"):
        rows.repeat_interleave(repeats, dim=0)


LABELS = [3, -100, 1, 3, -100, 0]
# x: numbers that no dry run knows; labels: on a GPU what the host wrote
SIZED = {
    "x[mask]": lambda x, labels: x[labels != -100],
    "x[mask] within": lambda x, labels: x.reshape(2, 3, 8)[:, labels[:3] >= 0],
    "x[mask, where]": lambda x, labels: x[labels > 0, labels[labels > 0]],
    "x[mask on the host]": lambda x, labels: x[labels.cpu() > 0],
    "x[two dimensions of a mask]": lambda x, labels: x.view(2, 3, 8)[labels.view(2, 3) > 0],
    "x[None, mask]": lambda x, labels: x.T[:, None, labels > 0],
    "a gradient": lambda x, labels: torch.autograd.grad(x.requires_grad_()[labels > 0].sum(), x)[0],
    "loss": lambda x, labels: F.cross_entropy(x[labels >= 0], labels[labels >= 0]),
    "in place": lambda x, labels: x.index_put_((labels > 0,), x[labels > 0] * 2),
    "masked_select": lambda x, labels: x.masked_select(labels[:, None] > 0),
    "masked_select of one number": lambda x, labels: x[0, 0].masked_select(labels[0] > 0),
    "x[a mask of one number]": lambda x, labels: x[labels[0] > 0],
    "nonzero": lambda x, labels: x.index_select(0, (labels > 0).nonzero().squeeze(1)),
    "where": lambda x, labels: torch.where(labels.view(2, 3) > 0)[1],
    "argwhere": lambda x, labels: torch.argwhere(labels > 0),
    "unique": lambda x, labels: torch.unique(labels, return_inverse=True, return_counts=True)[2],
    "unique_consecutive": lambda x, labels: torch.unique_consecutive(labels),
    "bincount": lambda x, labels: labels.clamp(0).bincount(),
    "repeat_interleave": lambda x, labels: x.repeat_interleave(labels.clamp(0), 0),
    "one_hot": lambda x, labels: F.one_hot(labels.clamp(0)),
    "out": lambda x, labels: torch.nonzero(labels > 0, out=torch.empty(0, dtype=torch.long, device="cuda")),
    "out is longer": lambda x, labels: torch.masked_select(labels, labels > 0, out=torch.zeros_like(labels)),
    "of none": lambda x, labels: x[labels > 100],
    "ctc_loss": lambda x, labels: ctc(x, [6], [3]),
    "ctc_loss on the host": lambda x, labels: ctc(x.cpu(), torch.tensor([6]), torch.tensor([3])),
    "ctc_loss, lengths on a GPU": lambda x, labels: ctc(x, torch.tensor([6]).cuda(), (labels > 0).sum()[None]),
}


def ctc(x, input_lengths, target_lengths):
    """The gradient of the loss of six steps, of which a target of three digits is to be read."""
    x.requires_grad_()
    targets = torch.tensor([[1, 2, 3]], device=x.device)
    F.ctc_loss(x[:, None].log_softmax(2), targets, input_lengths, target_lengths).backward()
    return x.grad


@pytest.mark.parametrize("how", SIZED)
def test_a_shape_that_depends_on_known_values(gpus, how):
    """As with numbers: the shape, the bytes, the seconds; and what comes of whole numbers is known as well."""

    def run():
        virtualgpu.gpus(1)
        x, labels = torch.randn(6, 8, device="cuda"), torch.tensor(LABELS).cuda()
        out = SIZED[how](x, labels).detach()
        known = None if out.is_floating_point() else out.tolist()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return out.shape, out.stride(), out.dtype, out.device, known, held, virtualgpu.machine().clock.host

    wanted = run()
    virtualgpu.reset()
    with virtualgpu.dry_run(1):
        assert run() == wanted


def test_a_shape_that_depends_on_values_that_are_not_known(dry):
    x, on_host = torch.randn(6, 8, device="cuda"), torch.zeros(6)
    written, anew = torch.zeros(6, dtype=torch.bool, device="cuda"), torch.tensor([1, 2], device="cuda")
    written |= x[:, 0] > 0
    on_host[2:4] = x[0, :2].cpu()
    anew.random_()
    anew.copy_(torch.tensor([0, 4]))
    assert anew.nonzero().tolist() == [[1]]
    for refused in (
        lambda: x[x > 0],
        lambda: x.masked_select(x > 0),
        lambda: x.argmax(1).unique(),
        lambda: (x > 0).nonzero(),
        lambda: x[torch.ones(6, dtype=torch.bool, device="cuda"), x[0] > 0],
        lambda: x[written],
        lambda: x[~written[:6].clone()],
        lambda: x[written.cpu()],
        lambda: x.masked_select(written[:, None]),
        lambda: on_host.nonzero(),
        lambda: F.one_hot(written.long()),
    ):
        with pytest.raises(NotImplementedError, match="values, which this dry run does not know"):
            refused()


def test_ctc_loss_of_lengths_that_are_not_known(dry):
    x, targets = torch.randn(6, 1, 8, device="cuda"), torch.tensor([[1, 2, 3]], device="cuda")
    with pytest.raises(NotImplementedError, match="its lengths say, which this dry run does not know"):
        F.ctc_loss(x.log_softmax(2), targets, [6], x[0].argmax(1))


def test_a_list_of_numbers_under_a_default_device(dry):
    """There PyTorch's getters ask Tensor.is_meta as it is replaced: False, and C++ looked for the numbers in meta tensors."""
    with torch.device("cuda"):
        made = torch.as_tensor([torch.ones(()), torch.ones(()).as_subclass(Plain)])
    assert (made.device, made.shape) == (torch.device("cuda:0"), (2,))


class Plain(torch.Tensor):
    """A subclass that overrides nothing."""


def test_an_array_that_is_overwritten_by_what_is_not_known(dry):
    """It comes with its numbers, which stay to be read; no shape depends on them, nor on what comes of them."""
    numpy = pytest.importorskip("numpy")
    counted, passed_on = (torch.from_numpy(numpy.array([0, 3, 0])) for _ in range(2))
    counted[1:] = torch.randn(2, 8, device="cuda").argmax(1).cpu()
    passed_on += counted
    for forgotten in (counted, counted + 1, counted.view(3, 1), passed_on):
        with pytest.raises(NotImplementedError, match="values, which this dry run does not know"):
            forgotten.nonzero()
    for known in (counted, passed_on):
        known.copy_(torch.tensor([0, 4, 5]))
        assert known.nonzero().tolist() == [[1], [2]]


LATER = {
    "x + 1": lambda x, y: x + 1,
    "x + y": lambda x, y: x + y,
    "y + x": lambda x, y: y + x,
    "copy_": lambda x, y: y.copy_(x),
    "item": lambda x, y: x[0, 0].item(),
    "if": lambda x, y: bool(x[0, 0]),
    "tolist": lambda x, y: x.tolist(),
    "cpu": lambda x, y: x.cpu(),
    "to the other GPU": lambda x, y: x.to("cuda:1"),
    "nonzero": lambda x, y: x.nonzero(),
    "x[y > 0]": lambda x, y: x[y > 0],
    "equal": lambda x, y: torch.equal(x, y),
    "save": lambda x, y: torch.save(x, io.BytesIO()),
}


@pytest.mark.parametrize("what", LATER)
def test_a_tensor_of_a_dry_run_after_it(gpus, what):
    with virtualgpu.dry_run():
        x = torch.ones(3, 3, device="cuda")
    with pytest.raises(RuntimeError, match=r"dry run.* has no values.*make it outside dry_run\(\)"):
        LATER[what](x, torch.ones(3, 3, device="cuda"))
    assert repr(x) == "tensor(..., device='cuda:0', size=(3, 3), dtype=torch.float32)"


def test_a_model_of_a_dry_run_after_it(gpus):
    with virtualgpu.dry_run():
        model = nn.Linear(4, 4, device="cuda")
    with pytest.raises(RuntimeError, match="made in a dry run"):
        model(torch.ones(2, 4, device="cuda"))


def test_meta_tensors_of_the_programs_own_are_pytorchs_affair(gpus):
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        torch.ones(2, device="meta").to("cuda")
    assert (torch.ones(2, device="meta") + 1).device.type == "meta"
    pickle.dumps(torch.ones(2, device="meta"))


def test_a_generators_state_that_came_over_a_gpu():
    """accelerate sends rank 0's to all ranks; in a dry run it has no values, and the generator goes on from its own."""
    generator = torch.Generator().manual_seed(1)
    first = generator.get_state()
    with virtualgpu.dry_run(1):
        generator = torch.Generator().manual_seed(2)
        second = generator.get_state()
        assert generator.set_state(second.cuda().cpu()) is generator
        kept = generator.get_state()
        generator.set_state(first)
        set_anew = generator.get_state()
    assert torch.equal(kept, second) and torch.equal(set_anew, first) and not torch.equal(first, second)


def test_addresses_tell_tensors_apart(dry):
    """accelerate's FSDP2 found an optimizer's parameters by their addresses: where all were 0, most went without a state."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(
        RuntimeError, match=r"data_ptr: a dry run gives tensors on the CPU no memory.*put them on a GPU"
    ):
        model[0].weight.data_ptr()
    assert len({parameter.data_ptr() for parameter in model.to("cuda").parameters()}) == 4


OUTSIDE = {
    "a tensor": lambda: (values := torch.arange(3.0), values),
    "a NumPy array": lambda: (values := pytest.importorskip("numpy").arange(3.0), torch.from_numpy(values)),
    "a view": lambda: (values := torch.arange(6.0), values[3:]),
    "a parameter": lambda: (values := nn.Parameter(torch.arange(3.0)), values.data),
    "whole numbers": lambda: (values := torch.arange(3), values),
}
WRITTEN = {
    "+=": lambda t, unknown: t.add_(unknown),
    "copy_": lambda t, unknown: t.copy_(unknown),
    "a part": lambda t, unknown: t.__setitem__(0, unknown[0]),
    "twice": lambda t, unknown: t.add_(unknown).add_(unknown),
    "out=": lambda t, unknown: torch.mul(unknown, 2, out=t),
    "then what is known": lambda t, unknown: t.add_(unknown).mul_(2).sub_(1),
}


@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize("make", OUTSIDE)
def test_what_is_the_callers_keeps_its_numbers(gpus, make, write):
    """A dry run has none to write there. In it, they are not known; after it, they are as they were before."""
    if (make, write) == ("whole numbers", "then what is known"):
        pytest.skip("what is known is carried out on whole numbers, which stay to be read")
    owner, tensor = OUTSIDE[make]()
    before = owner.tolist()
    with virtualgpu.dry_run():
        other = (
            torch.rand(3, device="cuda").cumsum(0).to(tensor.dtype)
            if make != "whole numbers"
            else torch.rand(3, device="cuda").exp().long()
        )
        WRITTEN[write](tensor, other.cpu())
        if make != "whole numbers":
            read = (
                tensor[0].item(),
                tensor.tolist()[0],
                *tensor.numpy()[:1],
                (tensor + 1)[0].item(),
                tensor.sum().item(),
            )
            assert all(map(math.isnan, read)) and "nan" in repr(tensor)
        with pytest.raises(NotImplementedError, match="values, which this dry run does not know"):
            tensor.nonzero()
        with pytest.raises(RuntimeError, match="no values to save"):
            torch.save(tensor, io.BytesIO())
    assert owner.tolist() == before
    with virtualgpu.dry_run():  # another one knows them
        assert tensor.tolist() == before[-3:] and tensor.nonzero().shape == (3 - (before[-3] == 0), 1)


def test_what_is_written_anew_is_known_again(dry):
    tensor = torch.from_numpy(pytest.importorskip("numpy").arange(3.0))
    tensor += torch.rand(3, device="cuda").cpu()
    assert math.isnan(tensor[0].item())
    tensor.fill_(7)
    assert tensor.tolist() == [7, 7, 7] and tensor.nonzero().shape == (3, 1)


def test_checks_of_numbers_hold(gpu, dry):
    """all() is what a program asks before it goes on; whatever else it asks is not so."""
    x = torch.rand(3, 2, device=gpu)
    assert torch.isfinite(x).all() and (x > 0).all(0).all().item() is True and not (x > 0).any()
    assert not (x > 0).all(0)[0] and bool(x.isnan().any()) is False
    seen = x > 0  # transformers asks by a sum whether a padding mask hides nothing, and then gives attention none
    assert seen.sum() == seen.numel()
    assert not any(map(bool, (seen.sum() == 5, seen.sum() > 5, x.sum() == x.numel())))


def test_what_an_initializer_draws_until_it_suits_is_no_decision_of_the_program(recwarn):
    with virtualgpu.dry_run(1):
        torch.nn.init.trunc_normal_(torch.empty(64, 64, device="cuda"), std=0.02)
        assert not recwarn.list
        with pytest.warns(UserWarning, match="a dry run computes shapes, no values"):
            bool(torch.rand(2, device="cuda").any())
