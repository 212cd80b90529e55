"""Where tensors are, and which may meet: nothing is silently on the CPU, and nothing joins a GPU that PyTorch would refuse."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils._python_dispatch import TorchDispatchMode

import virtualgpu

MIB = 1 << 20
ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


def allocated(gpu=0):
    return torch.cuda.memory_allocated(gpu)


# -- to where another tensor is


ELSEWHERE = {
    "to": lambda tensor, other: tensor.to(other),
    "type_as": lambda tensor, other: tensor.type_as(other),
    "Module.to": lambda tensor, other: nn.ParameterList([tensor]).to(other)[0],
    "Module.to, by name": lambda tensor, other: nn.ParameterList([tensor]).to(tensor=other)[0],
}


@pytest.mark.parametrize("how", ELSEWHERE)
@pytest.mark.parametrize("places", [(CPU, ONE), (ONE, CPU), (ZERO, ONE), (ONE, ONE)], ids=str)
@pytest.mark.parametrize("dry", [False, True])
def test_to_the_place_and_type_of_another_tensor(gpus, how, places, dry):
    source, target = places
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        for dtype in (torch.float32, torch.float64):
            tensor = torch.ones(3, device=source, requires_grad=True)
            moved = ELSEWHERE[how](tensor, torch.zeros(1, device=target, dtype=dtype))
            assert (moved.device, moved.dtype) == (target, dtype)
            if "Module" not in how:  # those move in place
                assert (moved is tensor) is (source == target and dtype == tensor.dtype)
                moved.sum().backward()
                assert tensor.grad.device == source


class Tagged(torch.Tensor):
    """A subclass, as torchvision has some."""


def test_a_gradient_of_a_subclass_is_a_plain_tensor(gpus):
    """As without virtual GPUs, and again after them."""
    for again in range(2):
        leaf = torch.ones(3, device="cpu" if again else ONE).as_subclass(Tagged).requires_grad_()
        leaf.sum().backward()
        assert type(leaf.grad) is torch.Tensor and type(leaf.data) is Tagged
        leaf.grad = None
        assert leaf.grad is None
        virtualgpu.reset()
    assert torch.Tensor.grad is torch._C.TensorBase.grad


def test_asarray_stays_where_its_tensor_is(gpus):
    x = torch.arange(3.0, device=ONE)
    assert torch.asarray(x).data_ptr() == x.data_ptr()
    for options in ({"dtype": torch.float64}, {"copy": True}, {"dtype": torch.int32, "copy": True}):
        made = torch.asarray(x, **options)
        assert made.device == ONE and made.dtype == options.get("dtype", x.dtype) and made.data_ptr() != x.data_ptr()
    assert torch.asarray(x, device=ZERO, dtype=torch.float64).device == ZERO
    with pytest.raises(ValueError, match="can't alias tensor from device 'cuda:1' to 'cuda:0'"):
        torch.asarray(x, device=ZERO, copy=False)
    with pytest.raises(ValueError, match="can't alias tensor with dtype 'Float' into dtype 'Double'"):
        torch.asarray(x, dtype=torch.float64, copy=False)


@pytest.mark.parametrize("dry", [False, True])
def test_a_number_is_copied(gpus, dry):
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        x = torch.ones(3, dtype=torch.int64, device=ONE)
        assert x.copy_(2.5) is x and x.device == ONE and (dry or x.tolist() == [2, 2, 2])


@pytest.mark.parametrize("dry", [False, True])
def test_a_gradient_is_where_its_tensor_is(gpus, dry):
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        for place, other in ((CPU, ONE), (ONE, CPU), (ZERO, ONE)):
            weight = torch.ones(3, device=place, requires_grad=True)
            with pytest.raises(RuntimeError, match="assigned grad has data located on a different device"):
                weight.grad = torch.ones(3, device=other)
            with pytest.raises(TypeError, match="expected to be a Tensor or None"):
                weight.grad = 0
            weight.grad = torch.ones(3, device=place)
            weight.sum().backward()
            assert weight.grad.device == place and (dry or weight.grad.tolist() == [2, 2, 2])
            del weight.grad
            assert weight.grad is None


def test_cuda_is_no_way_to_the_cpu(gpus):
    with pytest.raises(RuntimeError, match="Invalid device, must be cuda device"):
        torch.ones(2).cuda("cpu")


LAZY = {
    "cuda": lambda: nn.LazyLinear(4).cuda(ONE),
    "to": lambda: nn.LazyLinear(4).to(ONE),
    "to, and a type": lambda: nn.LazyLinear(4).to(ONE, torch.float64),
    "to, then a type": lambda: nn.LazyLinear(4).to(ONE).double(),
    "there and back": lambda: nn.LazyLinear(4).to(ONE).cpu().to(ONE),
    "a copy": lambda: copy.deepcopy(nn.LazyLinear(4).to(ONE)),
    "made there": lambda: nn.LazyLinear(4, device=ONE),
    "several": lambda: nn.Sequential(nn.LazyConv1d(4, 1), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(2)).to(ONE),
}


@pytest.mark.parametrize("how", LAZY)
@pytest.mark.parametrize("dry", [False, True])
def test_lazy_modules(gpus, how, dry):
    """Their parameters have no size before the first batch, and refuse all but a few of Tensor's methods."""
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        model = LAZY[how]()
        first = next(model.parameters())
        assert isinstance(first, nn.parameter.UninitializedParameter) and first.device == ONE
        model(
            torch.ones(2, 3, 1, device=ONE, dtype=first.dtype)[..., 0 if how != "several" else slice(None)]
        ).sum().backward()
        assert {parameter.device for parameter in model.parameters()} == {ONE}
        assert type(next(model.parameters())) is nn.Parameter and next(model.parameters()).grad.device == ONE


@pytest.mark.parametrize("dry", [False, True])
def test_a_mask_on_the_cpu_may_choose_what_is_written(gpus, dry):
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        x, mask = torch.arange(3.0, device=ONE), torch.tensor([True, False, True])
        x[mask] = 7
        assert dry or x.tolist() == [7, 1, 7]
        with pytest.raises(RuntimeError, match="mask is on cpu"):
            x.masked_fill_(mask, 7)


# -- results that C++ makes by itself


def test_one_hot_is_on_the_gpu_and_counted(gpus):
    classes = torch.zeros(1 << 17, dtype=torch.long, device="cuda")
    before = allocated()
    hot = F.one_hot(classes, 8)
    assert hot.device == ZERO and allocated() - before == 8 * classes.nbytes
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        hot.numpy()
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        hot + torch.ones(1 << 17, 8, dtype=torch.long)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: rnn.pad_sequence([x, x[:2]]),
        lambda x: rnn.pad_sequence([x, x[:2]], batch_first=True, padding_value=7.0),
        lambda x: rnn.unpad_sequence(rnn.pad_sequence([x, x[:2]]), torch.tensor([5, 2]))[1],
        lambda x: torch.vander(x),
        lambda x: torch.linalg.vander(x),
        lambda x: torch.block_diag(x, x),
        lambda x: torch.cartesian_prod(x, x),
        lambda x: torch.combinations(x),
        lambda x: torch.bucketize(x, x),
        lambda x: torch.histc(x),
        lambda x: torch.cov(torch.stack([x, x * x])),
        lambda x: torch.cumulative_trapezoid(x),
        lambda x: torch.stft(x.repeat(20), 16, window=torch.hann_window(16, device=x.device), return_complex=True),
        lambda x: torch.nn.utils.parameters_to_vector([x, x]),
    ],
)
def test_results_are_where_their_input_is(gpus, make):
    x = torch.arange(5.0)
    there = make(x.to(ONE))
    assert there.device == ONE and torch.equal(there.cpu(), make(x))
    with pytest.raises(RuntimeError, match="same device"):
        there + make(x)


def test_padding_a_packed_sequence_keeps_the_place(gpus):
    x = torch.randn(4, 2, 3)
    for sequence in (x, x.to(ONE)):
        packed = rnn.pack_padded_sequence(sequence, torch.tensor([4, 2]))
        padded, lengths = rnn.pad_packed_sequence(packed)
        assert packed.data.device == padded.device == sequence.device and lengths.device == CPU
    assert torch.equal(padded.cpu()[2:, 1], torch.zeros(2, 3)) and torch.equal(padded.cpu()[:, 0], x[:, 0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("sorted_lengths", [True, False])
def test_packed_recurrent_layers_train(gpus, kind, sorted_lengths):
    """Bidirectional, batch first: as on the CPU to the last bit, and all of it on the GPU."""
    torch.manual_seed(0)
    model, x = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True), torch.randn(3, 5, 3)
    lengths = torch.tensor([5, 3, 1] if sorted_lengths else [3, 5, 1])

    def grads(model, x):
        x = x.clone().requires_grad_()
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sorted_lengths)
        out, _ = rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        model.zero_grad()
        out.square().sum().backward()
        return [out.detach(), x.grad, *[parameter.grad for parameter in model.parameters()]]

    expected = [tensor.clone() for tensor in grads(model, x)]
    found = grads(model.to(ONE), x.to(ONE))
    assert {tensor.device for tensor in found} == {ONE}
    assert all(torch.equal(here.cpu(), there) for here, there in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: F.one_hot(torch.zeros(4, dtype=torch.long, device=ONE), 4),
        lambda: torch.vander(torch.ones(4, device=ONE)),
    ],
)
def test_what_cpp_made_can_be_resized(gpus, make):
    made = make()
    before = allocated(1) - 512 * -(-made.nbytes // 512)
    made.resize_(300, 300)
    assert made.device == ONE and allocated(1) - before == 512 * -(-made.nbytes // 512)
    made.untyped_storage().resize_(0)
    assert allocated(1) == before


# -- making tensors from tensors


def test_as_tensor_of_a_gpu_tensor_is_itself(gpus):
    x = torch.ones(2, device=ONE)
    assert torch.as_tensor(x) is x and torch.asarray(x).data_ptr() == x.data_ptr()
    copied = torch.asarray(x, copy=True)
    assert copied.device == ONE and copied.data_ptr() != x.data_ptr()
    with pytest.warns(UserWarning, match="To copy construct from a tensor"):
        made = torch.tensor(x)
    assert made.device == ONE
    assert torch.as_tensor(x, dtype=torch.float64).device == ONE
    assert torch.as_tensor(x, device="cpu").device == CPU and torch.as_tensor(x, device=ZERO).device == ZERO
    assert (x + torch.as_tensor(x)).tolist() == [2, 2]


def test_new_makes_tensors_where_x_is(gpus):
    x = torch.ones(2, dtype=torch.float16, device=ONE)
    for made in (x.new(2, 3), x.new([1, 2]), x.new(), x.new_tensor([1.0]), x.new_empty(3), x.new(x.size()), x.new(x)):
        assert (made.device, made.dtype) == (ONE, torch.float16)
    assert x.new(2, 3).shape == (2, 3) and x.new([1, 2]).tolist() == [1, 2]
    assert x.new_tensor([1, 2], dtype=torch.long).dtype is torch.long
    before = allocated(1)
    made = x.new(MIB)
    assert allocated(1) - before == 2 * MIB and (made.fill_(1) + x[0]).device == ONE


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_say_where_they_are(gpus):
    x = torch.ones(4, device=ONE)
    for storage in (x.untyped_storage(), x.storage(), x.detach().t().untyped_storage()):
        assert storage.device == ONE and storage.is_cuda
    assert torch.ones(4).untyped_storage().device == CPU
    assert torch.UntypedStorage(4, device="cuda:1").device == ONE


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.cpu(),
        lambda x: x.cuda(),
        lambda x: x.to("cpu"),
        lambda x: x.to("cpu", torch.float64),
        lambda x: nn.ParameterList([x]).to("cpu"),
        lambda x: torch.ops.aten._to_copy(x, device=CPU),
    ],
)
def test_what_is_on_meta_has_nothing_to_copy(gpus, move):
    """It stayed there, and nobody said so."""
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        move(torch.ones(2, device="meta"))


def test_what_is_on_meta_may_stay_there(gpus):
    x = torch.ones(2, device="meta")
    assert x.to("meta") is x and x.double().is_meta and torch.zeros_like(x, device="cuda").device == ZERO


def test_storages_on_meta_have_nothing_to_copy(gpus):
    storage = torch.empty(3, device="meta").untyped_storage()
    for move in (storage.cpu, storage.cuda, lambda: storage.to(device="cpu")):
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            move()


def test_a_storage_copied_in_the_background_is_pinned(gpus):
    storage = torch.ones(3, device=ONE).untyped_storage()
    assert storage.to(device="cpu", non_blocking=True).is_pinned() and not storage.cpu().is_pinned()


def test_another_gpus_storage_is_no_tensors_own(gpus):
    here, there = torch.ones(3, device=ZERO), torch.full((3,), 2.0, device=ONE)
    storage = there.untyped_storage()
    for source in ((there,), (storage,), (storage, 0, (3,), (1,))):
        with pytest.raises(RuntimeError, match='tensor on device "cuda:0" to a storage on different device "cuda:1"'):
            here.set_(*source)
    assert here.tolist() == [1] * 3 and here.device == ZERO
    own = torch.empty(0, device=ONE).set_(storage, 1, (2,), (1,))
    assert own.device == ONE and own.tolist() == [2, 2]


def test_storages_move(gpus):
    storage = torch.arange(4.0).untyped_storage()
    moved = storage.cuda(1)
    assert moved.device == ONE and moved.nbytes() == 16 and allocated(1) == 512
    x = torch.empty(0, device=ONE).set_(moved, 0, (4,))
    assert x.device == ONE and x.tolist() == [0, 1, 2, 3]
    back = moved.cpu()
    assert back.device == CPU and torch.empty(0).set_(back, 0, (4,)).tolist() == [0, 1, 2, 3]
    del x, moved
    assert allocated(1) == 0


# -- factories


FACTORIES = {
    "normal": lambda device: torch.normal(0.0, 1.0, (2,), device=device),
    "fftfreq": lambda device: torch.fft.fftfreq(4, device=device),
    "rfftfreq": lambda device: torch.fft.rfftfreq(4, device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "triu_indices": lambda device: torch.triu_indices(3, 3, device=device),
    "hann_window": lambda device: torch.hann_window(4, device=device),
    "kaiser_window": lambda device: torch.kaiser_window(4, device=device),
    "hamming": lambda device: torch.signal.windows.hamming(4, device=device),
    "randperm": lambda device: torch.randperm(4, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 4, device=device),
    "logspace": lambda device: torch.logspace(0, 1, 4, device=device),
    "eye": lambda device: torch.eye(2, device=device),
    "empty_strided": lambda device: torch.empty_strided((2, 3), (1, 2), device=device),
    "full": lambda device: torch.full((2,), 3.0, device=device),
    "complex": lambda device: torch.zeros(2, dtype=torch.complex64, device=device),
    "frombuffer": lambda device: torch.asarray(bytearray(b"abcd"), dtype=torch.uint8, device=device),
    "range": lambda device: torch.arange(0, 4, 2, device=device),
    "rand_like": lambda device: torch.rand_like(torch.empty(2, device=device)),
    "vander": lambda device: torch.from_numpy(pytest.importorskip("numpy").ones(3)).to(device),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_every_factory_knows_the_gpu(gpus, make):
    made = make("cuda:1")
    assert made.device == ONE and allocated(1) == 512
    assert make("cpu").device == CPU and allocated(1) == 512


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.normal(0.0, 1.0, (3,)),
        lambda: torch.fft.fftfreq(3),
        lambda: torch.Tensor(3),
        lambda: torch.FloatTensor([1, 2, 3]),
        lambda: torch.Tensor([1, 2, 3]),
        lambda: torch.hann_window(3),
        lambda: F.one_hot(torch.arange(3)),
        lambda: torch.from_numpy(pytest.importorskip("numpy").ones(3)),
        lambda: rnn.pad_sequence([torch.ones(3)])[:, 0],
        lambda: torch.eye(3)[0],
    ],
)
def test_cpu_tensors_do_not_join_a_gpu(gpus, make):
    """Not the tensor, and not what is computed from it: this is the mistake that notebook 02 teaches."""
    on_gpu, made = torch.ones(3, device="cuda"), make()
    for tensor in (made, made + 1, made * made, made.clone()):
        with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu"):
            on_gpu + tensor


def test_gpu_tensors_in_the_functions_of_cpu_factories(gpus):
    x = torch.ones(3, device=ONE)
    assert torch.normal(x, 1.0).device == torch.normal(0.0, x).device == ONE
    assert torch.normal(x, x).device == torch.bernoulli(x).device == torch.poisson(x).device == ONE


# -- indices and other tensors that may stay on the CPU


def test_assigning_numbers_by_indices(gpus):
    for index in ([0, 1], torch.tensor([0, 1]), torch.tensor([0, 1], device="cuda")):
        x = torch.ones(4, device="cuda")
        x[index] = 0.0
        assert x.tolist() == [0, 0, 1, 1] and x.device == ZERO
    y = torch.zeros(2, 3, device="cuda")
    y[:, [0, 1]] = 1.0
    y[[1], [2]] = 5.0
    y[torch.tensor([True, False])] += 1
    assert y.tolist() == [[2, 2, 1], [1, 1, 5]]
    y[[0]] = torch.zeros(3, device="cuda")
    y[[1], [0]] = torch.ones(1)  # one number may come from anywhere
    assert y[[0, 1]].tolist() == [[0, 0, 0], [1, 1, 5]]


@pytest.mark.parametrize(
    "attempt",
    [
        lambda x, there: x.__setitem__(there, 0.0),
        lambda x, there: x.__setitem__(there, torch.zeros(1, device="cuda")),
        lambda x, there: x.__setitem__([0, 1], torch.zeros(2)),
        lambda x, there: x.__setitem__([0, 1], torch.zeros(2, device="cuda:1")),
        lambda x, there: x.cpu().__setitem__([0, 1], torch.zeros(2, device="cuda")),
        lambda x, there: x[there],
        lambda x, there: x.index_select(0, there.cpu()),
        lambda x, there: x.gather(0, there.cpu()),
        lambda x, there: x.cpu()[there],
        lambda x, there: x.index_fill_(0, there.cpu(), 0.0),  # the CPU's only in a subscript
    ],
)
def test_indices_and_values_elsewhere_are_refused(gpus, attempt):
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        attempt(x, torch.tensor([0], device="cuda:1"))
    assert x.tolist() == [1, 1, 1, 1]


def test_lengths_of_a_packed_sequence_stay_on_the_cpu(gpus):
    with pytest.raises(
        RuntimeError, match=r"'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor"
    ):
        rnn.pack_padded_sequence(torch.ones(3, 2, 4, device="cuda"), torch.tensor([3, 2], device="cuda"))


def test_a_number_of_another_device_fills(gpus):
    x, y = torch.zeros(2, device=ONE), torch.zeros(2)
    x.fill_(torch.tensor(3.0, device=ZERO))
    with pytest.raises(RuntimeError):
        y.fill_(torch.ones(1))
    y.fill_(x[0])
    x[0] = torch.tensor(5.0)
    y[1] = x[0]
    assert (x.tolist(), y.tolist()) == ([5, 3], [3, 5]) and (x.device, y.device) == (ONE, CPU)


def test_default_device_reaches_every_factory(gpus):
    torch.set_default_device(ONE)
    try:
        made = [torch.tensor([1.0]), torch.as_tensor([1.0]), torch.asarray([1.0]), torch.ones(1), torch.Tensor([1.0])]
        made += [torch.as_tensor(torch.ones(1, device=ZERO)), torch.eye(1), nn.Linear(1, 1).weight]
    finally:
        torch.set_default_device(None)
    assert [tensor.device for tensor in made] == [ONE] * 4 + [CPU] + [ONE] * 3  # torch.Tensor does not ask


def test_ctc_loss_takes_lengths_on_the_cpu(gpus):
    torch.manual_seed(0)
    scores, targets = torch.randn(6, 2, 5), torch.randint(1, 5, (2, 3))
    lengths = torch.tensor([6, 5]), torch.tensor([3, 2])

    def loss_and_gradient(device):
        x = scores.to(device).requires_grad_()
        loss = nn.CTCLoss()(x.log_softmax(2), targets.to(device), *lengths)
        loss.backward()
        return loss.detach(), x.grad

    for there, here in zip(loss_and_gradient("cuda:1"), loss_and_gradient("cpu"), strict=True):
        assert there.device == ONE and torch.equal(there.cpu(), here)


@pytest.mark.parametrize("place", [CPU, ZERO], ids=str)
def test_ctc_loss_of_one_sequence_takes_its_length_as_a_number(gpus, place):
    scores, targets = torch.linspace(-1, 1, 30).reshape(6, 5).log_softmax(1), torch.tensor([1, 2, 2])
    lengths = torch.tensor(6), torch.tensor(3)
    there = F.ctc_loss(scores.cuda(), targets.cuda(), *(length.to(place) for length in lengths))
    assert there.device == ZERO and torch.equal(there.cpu(), F.ctc_loss(scores, targets, *lengths))


# -- errors in PyTorch's words


@pytest.mark.parametrize(
    "line",
    [
        lambda x: torch.add(x, 1, out=torch.empty(4)),
        lambda x: torch.add(x, x, out=torch.empty(4)),
        lambda x: torch.add(x, x, out=torch.empty(4, device="cuda:1")),
        lambda x: torch.mm(x.view(2, 2), x.view(2, 2), out=torch.empty(2, 2)),
        lambda x: torch.cat([x, x], out=torch.empty(8)),
        lambda x: torch.sum(x, 0, out=torch.empty(())),
        lambda x: torch.max(x, 0, out=(torch.empty((), device="cuda"), torch.empty((), dtype=torch.long))),
        lambda x: torch.zeros(()).add_(x.sum()),
        lambda x: torch.empty((), device="cuda:1").copy_(x[0]).mul_(x[0]),
    ],
)
def test_what_is_written_must_be_there_too(gpus, line):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as found:
        line(torch.ones(4, device="cuda"))
    assert "cuda:0" in str(found.value) and ("cpu" in str(found.value) or "cuda:1" in str(found.value))


@pytest.mark.parametrize("dry", [False, True])
def test_foreach_copies_go_from_place_to_place(dry):
    with (virtualgpu.dry_run if dry else virtualgpu.gpus)(2):
        values = [torch.arange(3.0), torch.arange(4.0)]
        for target in ("cuda:0", "cuda:1", "cpu"):
            copies = [torch.zeros_like(value, device=target) for value in values]
            torch._foreach_copy_(copies, values)
            assert [copy.device for copy in copies] == [torch.device(target)] * 2
            assert dry or all(torch.equal(copy.cpu(), torch.arange(len(copy) * 1.0)) for copy in copies)
            values = copies


def test_foreach_lists_must_lie_together(gpus):
    here, there, cpu = (torch.ones(3, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
    for pair in ([here], [there]), ([here], [cpu]), ([here, there], [there, here]):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch._foreach_add(*pair)
    sums = torch._foreach_add([here, there], [here, there])  # one GPU after the other is allowed
    assert [tensor.device for tensor in sums] == [ZERO, ONE]


@pytest.mark.parametrize("other", [ZERO, CPU], ids=str)
def test_gradients_on_two_devices_are_not_unscaled_together(gpus, other):
    gradients = [torch.ones(3, device=ONE), torch.ones(3, device=other)]
    found, inverse = torch.zeros(1, device=ONE), torch.full((1,), 0.5, device=ONE)
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        unscale(gradients, found, inverse)
    unscale(gradients[:1], found, inverse)
    assert [gradient.tolist() for gradient in gradients] == [[0.5] * 3, [1] * 3]


def test_an_optimizer_refuses_a_gradient_elsewhere(gpus):
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    weight.grad = torch.ones(3, device="cuda")
    weight.grad.data = torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.optim.SGD([weight], lr=0.1, foreach=True).step()
    assert weight.tolist() == [1, 1, 1]


def test_foreach_with_a_number_as_its_base(gpus):
    x = torch.tensor([1.0, 2.0], device=ONE)
    powers = torch._foreach_pow(2.0, [x, x + 1])
    assert [p.tolist() for p in powers] == [[2, 4], [4, 8]] and {p.device for p in powers} == {ONE}


@pytest.mark.parametrize("foreach", [True, False])
def test_adam_with_steps_on_the_gpu(gpus, foreach):
    def trained(device):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.Adam(model.parameters(), capturable=device != "cpu", foreach=foreach)
        for _ in range(3):
            model(torch.ones(4, 3, device=device)).sum().backward()
            optimizer.step()
        return model.weight.detach(), optimizer.state[model.weight]["step"]

    weight, step = trained("cuda:1")
    expected, steps = trained("cpu")
    assert step.device == weight.device == ONE and step.item() == steps.item() == 3
    torch.testing.assert_close(weight.cpu(), expected)  # capturable divides in another order


# -- two calls from one place in the program


def _in_a_loop(operations, r):
    for operation in operations:
        r = operation(r)
    return r


def _in_a_list(operations, r):
    kept = [r]
    for operation in operations:
        kept[0] = operation(kept[0])
    return kept[0]


def _in_an_object(operations, r):
    kept = nn.Module()
    kept.r = r
    for operation in operations:
        kept.r = operation(kept.r)
    return kept.r


TURNS = {
    "a loop": _in_a_loop,
    "a list": _in_a_list,
    "an object": _in_an_object,
    "reduce": lambda operations, r: functools.reduce(lambda r, operation: operation(r), operations, r),
}


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_what_a_call_has_returned_is_the_cpus_for_the_next(gpus, turns, mode, dry):
    """Also where both come from one instruction: the first makes its result from tensors of the CPU, which C++ made as well."""
    with mode(), virtualgpu.dry_run() if dry else contextlib.nullcontext():
        gpu, cpu = torch.ones(3, device=ONE), torch.arange(3.0)
        for then in (gpu.__add__, lambda r: torch.cat([gpu.view(1, 3), r]), lambda r: gpu.addmv(r, gpu)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                turns((torch.vander, then), cpu)
        assert turns((torch.vander, torch.Tensor.sum, gpu.__add__), cpu).device == ONE  # a number may join


def test_what_cpp_makes_joins_its_call_below_other_modes(gpus):
    """Another dispatch mode holds what it passes on, as Python would."""

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            held = args  # noqa: F841
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, device=ONE)
    with Passing(), Passing():
        assert torch.vander(x).device == ONE and torch.cov(torch.stack([x, x])).device == ONE
        assert F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 4, device=ONE)] * 3, is_causal=True).device == ONE


def test_a_shape_alone_is_refused_by_its_name(gpus):
    """PyTorch's CPU would read memory that is nobody's."""
    with pytest.raises(RuntimeError, match="got mat2 is on meta, different from other tensors on cuda:1"):
        torch.ones(5, 10, device=ONE) @ torch.ones(10, 1, device="meta")


def test_lists_and_scalars_of_another_gpu_are_refused(gpus):
    def ones(gpu, *size):
        return torch.ones(size, device=f"cuda:{gpu}")

    with pytest.raises(RuntimeError, match="scalar tensor expected to be on cuda:0 but is on cuda:1"):
        torch._foreach_mul([ones(0, 2), ones(0, 3)], ones(1))
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:1 and cuda:0"):
        torch._foreach_mul_([ones(0, 2), ones(1, 3)], ones(0))
    with pytest.raises(RuntimeError, match="Expected scalars to be on CPU, got cuda:0 instead"):
        torch._foreach_addcdiv([ones(0, 2)], [ones(0, 2)], [ones(0, 2)], ones(0, 1))
    assert torch._foreach_mul([ones(0, 2), ones(1, 3)], torch.tensor(2.0))[1].device == torch.device("cuda:1")


def test_an_optimizers_state_on_another_gpu_is_refused(gpus):
    parameter = torch.ones(3, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([parameter])
    for place in ("cuda:0", "cpu", "cuda:1"):
        parameter.grad = torch.ones_like(parameter)
        with (
            pytest.raises(RuntimeError, match="same index must be on the same device")
            if place == "cuda:1"
            else torch.no_grad()
        ):
            optimizer.step()
            optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].to(place)
            optimizer.step()


def test_the_cpu_records_no_stream(gpus):
    with pytest.raises(NotImplementedError, match="'aten::record_stream' with arguments from the 'CPU' backend"):
        torch.ones(1).record_stream(torch.cuda.Stream())
