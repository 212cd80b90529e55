# ruff: noqa: F403, F405
"""Where tensors are, and which may meet: nothing is silently on the CPU, and nothing joins a GPU that PyTorch would refuse.

In the tables z lies on cuda:0, x on cuda:1, c on the CPU: three ones each; i are indices on cuda:1, k on the CPU, v what a file of the
CPU gave, m is on meta.
"""

import copy  # noqa: F401
import functools

import pytest
from torch.nn.utils import rnn

from tests.virtualgpu.engine.tools import *

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:To copy"),
]

# A call, and where its result is
PLACED = table("""
    # as x is
    torch.as_tensor(x) | cuda:1
    torch.asarray(x, dtype=DOUBLE) | cuda:1
    torch.asarray(x, device=ZERO, dtype=DOUBLE) | cuda:0
    torch.as_tensor(x, device="cpu") | cpu
    torch.as_tensor(x, device=ZERO) | cuda:0
    x + torch.as_tensor(x) | cuda:1
    x.new() | cuda:1
    x.new(x) | cuda:1
    x.new_tensor([1.0]) | cuda:1
    x.new(MIB).fill_(1) + x[0] | cuda:1
    x.copy_(2.5) | cuda:1
    x.untyped_storage() | cuda:1
    x.untyped_storage().cpu() | cpu
    c.untyped_storage().cuda(1) | cuda:1
    c.untyped_storage() | cpu
    torch.UntypedStorage(4, device="cuda:1") | cuda:1
    torch.empty(0, device=ONE).set_(x.untyped_storage(), 1, (2,), (1,)) | cuda:1
    torch.zeros_like(m, device="cuda") | cuda:0
    # one number may come from anywhere, and so may indices and lengths
    x.fill_(z[0]) | cuda:1
    c.fill_(x[0]) | cpu
    c.index_put_((k,), x[0]) | cpu
    torch._foreach_mul([z, x], torch.tensor(2.0))[1] | cuda:1
    torch._foreach_add([z, x], [z, x])[0] | cuda:0
    torch._foreach_pow(2.0, [x, x + 1])[1] | cuda:1
    x.masked_fill(x > 0, torch.tensor(1.0)) | cuda:1
    x[k] | cuda:1
    rnn.pack_padded_sequence(x.view(3, 1, 1), torch.tensor([3])).data | cuda:1
    rnn.pad_packed_sequence(rnn.pack_padded_sequence(x.view(3, 1, 1), [3]))[0] | cuda:1
    rnn.pad_packed_sequence(rnn.pack_padded_sequence(x.view(3, 1, 1), [3]))[1] | cpu
    # factories, of tensors and of numbers
    torch.normal(x, 1.0) | cuda:1
    torch.bernoulli(x) | cuda:1
    torch.poisson(x) | cuda:1
    F.one_hot(i, 4) | cuda:1
""")
FACTORIES = table("""
    torch.normal(0.0, 1.0, (2,), device=device)
    torch.fft.fftfreq(4, device=device)
    torch.tril_indices(3, 3, device=device)
    torch.hann_window(4, device=device)
    torch.linspace(0, 1, 4, device=device)
    torch.eye(2, device=device)
    torch.empty_strided((2, 3), (1, 2), device=device)
    torch.asarray(bytearray(b"abcd"), dtype=BYTE, device=device)
    torch.rand_like(torch.empty(2, device=device))
""")
# A call of x of five numbers: the CPU's numbers, there
RESULTS = table("""
    rnn.pad_sequence([x, x[:2]])
    rnn.unpad_sequence(rnn.pad_sequence([x, x[:2]]), torch.tensor([5, 2]))[1]
    torch.vander(x)
    torch.block_diag(x, x)
    torch.histc(x)
    torch.stft(x.repeat(20), 16, window=torch.hann_window(16, device=x.device), return_complex=True)
    torch.nn.utils.parameters_to_vector([x, x])
    F.ctc_loss(x.repeat(6, 1).log_softmax(1), torch.tensor([1, 2, 2], device=x.device), torch.tensor(6), torch.tensor(3))
    F.ctc_loss(x.repeat(6, 1).log_softmax(1), torch.tensor([1, 2, 2], device=x.device), torch.tensor(6, device=x.device), torch.tensor(3, device=x.device))
""")
# A call, and the error
REFUSED = table(f"""
    # the CPU's tensors, and what comes of them
    x + c | found at least two devices, cuda:1 and cpu
    x + torch.normal(0.0, 1.0, (3,)) | found at least two devices, cuda:1 and cpu
    x + torch.Tensor(3) | found at least two devices, cuda:1 and cpu
    x + F.one_hot(torch.arange(3)) | found at least two devices, cuda:1 and cpu
    x + v | found at least two devices, cuda:1 and cpu
    x + rnn.pad_sequence([c])[:, 0] | found at least two devices, cuda:1 and cpu
    # two GPUs, in PyTorch's words
    z + x | ^{SAME_DEVICE}, but found at least two devices, cuda:0 and cuda:1!
    nn.Linear(3, 3).to(ONE)(z[None]) | ^{SAME_DEVICE}, but got mat1 is on cuda:0, different from other tensors on cuda:1 .*wrapper_CUDA_addmm
    torch.cat([z, x]) | ^{SAME_DEVICE}, but got tensors is on cuda:1, different from other tensors on cuda:0 .*wrapper_CUDA_cat
    nn.Conv1d(1, 1, 1)(x[None]) | ^Input type \\(torch.cuda.FloatTensor\\) and weight type \\(torch.FloatTensor\\) should be the same
    c[i] | ^indices should be either on cpu or on the same device as the indexed tensor \\(cpu\\)
    x @ torch.ones(3, 1, device="meta") | got mat2 is on meta, different from other tensors on cuda:1
    # indices and values elsewhere
    z.__setitem__(i, 0.0) | same device
    z.__setitem__(i, z[:1]) | same device
    z.__setitem__([0, 1], c[:2]) | same device
    z.__setitem__([0, 1], x[:2]) | same device
    c.__setitem__([0, 1], z[:2]) | same device
    z[i] | same device
    z.index_select(0, k) | same device
    z.gather(0, k) | same device
    z.index_fill_(0, k, 0.0) | same device
    x.masked_fill_(c > 0, 7) | mask is on cpu
    c.fill_(torch.ones(1)) | fill_ only supports 0-dimension value tensor
    rnn.pack_padded_sequence(z.view(3, 1, 1), i) | 'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:. Long tensor
    # what is written must be there, too
    torch.add(z, 1, out=torch.empty(3)) | {SAME_DEVICE}.*cpu
    torch.add(z, z, out=c) | {SAME_DEVICE}.*cpu
    torch.add(z, z, out=x) | {SAME_DEVICE}.*cuda:1
    torch.mm(z.view(3, 1), z.view(1, 3), out=torch.empty(3, 3)) | {SAME_DEVICE}.*cpu
    torch.max(z, 0, out=(torch.empty((), device="cuda"), torch.empty((), dtype=LONG))) | {SAME_DEVICE}.*cpu
    torch.zeros(()).add_(z.sum()) | {SAME_DEVICE}.*cpu
    torch.empty((), device="cuda:1").copy_(z[0]).mul_(z[0]) | {SAME_DEVICE}.*cuda:1
    z.set_(x) | tensor on device "cuda:0" to a storage on different device "cuda:1"
    z.set_(x.untyped_storage()) | tensor on device "cuda:0" to a storage on different device "cuda:1"
    z.set_(x.untyped_storage(), 0, (3,), (1,)) | tensor on device "cuda:0" to a storage on different device "cuda:1"
    # lists
    torch._foreach_add([z], [x]) | {SAME_DEVICE}
    torch._foreach_add([z], [c]) | {SAME_DEVICE}
    torch._foreach_add([z, x], [x, z]) | {SAME_DEVICE}
    torch._foreach_mul([z, z], x[0]) | scalar tensor expected to be on cuda:0 but is on cuda:1
    torch._foreach_mul_([z, x], z[0]) | found at least two devices, cuda:1 and cuda:0
    torch._foreach_addcdiv([z], [z], [z], z[:1]) | Expected scalars to be on CPU, got cuda:0 instead
    torch._amp_foreach_non_finite_check_and_unscale_([x, z], torch.zeros(1, device=ONE), x[:1]) | {SAME_DEVICE}
    torch._amp_foreach_non_finite_check_and_unscale_([x, c], torch.zeros(1, device=ONE), x[:1]) | {SAME_DEVICE}
    # moves
    c.cuda("cpu") | Invalid device, must be cuda device
    torch.asarray(x, device=ZERO, copy=False) | can't alias tensor from device 'cuda:1' to 'cuda:0'
    torch.asarray(x, dtype=DOUBLE, copy=False) | can't alias tensor with dtype 'Float' into dtype 'Double'
    F.one_hot(i, 4).numpy() | can't convert cuda:1 device type tensor to numpy
    # what is on meta has nothing to copy
    m.cpu() | Cannot copy out of meta tensor; no data!
    nn.ParameterList([m]).to("cpu") | Cannot copy out of meta tensor; no data!
    torch.ops.aten._to_copy(m, device=CPU) | Cannot copy out of meta tensor; no data!
    m.untyped_storage().to(device="cpu") | Cannot copy out of meta tensor
    # the CPU records no stream
    c.record_stream(torch.cuda.Stream()) | ^Could not run 'aten::record_stream' with arguments from the 'CPU' backend
""")
ONLY_WITH_NUMBERS = ("x.untyped_storage(), 1", "m.untyped_storage", "_to_copy(m")


@pytest.fixture(params=["numbers", "dry"])
def names(request, gpus):
    """What the tables call z, x and so on."""
    numpy = pytest.importorskip("numpy")
    with perhaps_dry(request.param == "dry"):
        z, x, c = (torch.ones(3, device=device) for device in (ZERO, ONE, CPU))
        i, k = torch.tensor([0], device=ONE), torch.tensor([0])
        yield {
            "z": z,
            "x": x,
            "c": c,
            "i": i,
            "k": k,
            "v": torch.from_numpy(numpy.ones(3)),
            "m": torch.ones(2, device="meta"),
        }


@pytest.mark.parametrize("call, place", PLACED)
def test_where_results_are(names, call, place):
    if not (virtualgpu.machine().dry and any(part in call for part in ONLY_WITH_NUMBERS)):
        assert eval(call, globals(), names).device == torch.device(place)


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_does_not_belong_together_is_refused(names, call, message):
    if virtualgpu.machine().dry and any(part in call for part in ONLY_WITH_NUMBERS):
        return
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        eval(call, globals(), names)
    if not virtualgpu.machine().dry:
        assert names["z"].tolist() == names["x"].tolist() == [1] * 3  # and nothing was written


@pytest.mark.parametrize("call", FACTORIES)
def test_every_factory_knows_the_gpu(gpus, call):
    made = eval(call, globals(), {"device": "cuda:1"})
    assert made.device == ONE and torch.cuda.memory_allocated(1) == 512
    assert eval(call, globals(), {"device": "cpu"}).device == CPU and torch.cuda.memory_allocated(1) == 512


@pytest.mark.parametrize("call", RESULTS)
def test_results_are_where_their_input_is(gpus, call):
    here = eval(call, globals(), {"x": torch.arange(5.0)})
    there = eval(call, globals(), {"x": torch.arange(5.0, device=ONE)})
    assert there.device == ONE and torch.equal(there.cpu(), here)
    with pytest.raises(RuntimeError, match="same device"):
        there + here.expand(2, *here.shape)


ELSEWHERE = {
    "to": lambda tensor, other: tensor.to(other),
    "type_as": lambda tensor, other: tensor.type_as(other),
    "Module.to": lambda tensor, other: nn.ParameterList([tensor]).to(other)[0],
    "Module.to, by name": lambda tensor, other: nn.ParameterList([tensor]).to(tensor=other)[0],
}


@pytest.mark.parametrize("how", ELSEWHERE)
@pytest.mark.parametrize("source, target", [*HERE_AND_THERE, (ONE, ONE)], ids=str)
@pytest.mark.parametrize("dry", [False, True])
def test_to_the_place_and_type_of_another_tensor(gpus, how, source, target, dry):
    with perhaps_dry(dry):
        for dtype in (SINGLE, DOUBLE):
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
    for device in (ONE, CPU):
        leaf = torch.ones(3, device=device).as_subclass(Tagged).requires_grad_()
        leaf.sum().backward()
        assert type(leaf.grad) is torch.Tensor and type(leaf.data) is Tagged
        leaf.grad = None
        assert leaf.grad is None
        virtualgpu.reset()
    assert torch.Tensor.grad is torch._C.TensorBase.grad


@pytest.mark.parametrize("place, other", HERE_AND_THERE, ids=str)
@pytest.mark.parametrize("dry", [False, True])
def test_a_gradient_is_where_its_tensor_is(gpus, place, other, dry):
    with perhaps_dry(dry):
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


LAZY = table("""
    nn.LazyLinear(4).cuda(ONE)
    nn.LazyLinear(4).to(ONE)
    nn.LazyLinear(4).to(ONE).cpu().to(ONE)
    copy.deepcopy(nn.LazyLinear(4).to(ONE))
    nn.Sequential(nn.LazyConv1d(4, 1), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(2)).to(ONE)
""")


@pytest.mark.parametrize("call", LAZY)
@pytest.mark.parametrize("dry", [False, True])
def test_lazy_modules(gpus, call, dry):
    """Their parameters have no size before the first batch, and refuse all but a few of Tensor's methods."""
    with perhaps_dry(dry):
        model = eval(call)
        first = next(model.parameters())
        assert isinstance(first, nn.parameter.UninitializedParameter) and first.device == ONE
        model(torch.ones(*((2, 3, 1) if "Conv" in call else (2, 3)), device=ONE, dtype=first.dtype)).sum().backward()
        assert {parameter.device for parameter in model.parameters()} == {ONE}
        first = next(model.parameters())
        assert type(first) is nn.Parameter and first.grad.device == ONE


@pytest.mark.parametrize("dry", [False, True])
def test_assigning_numbers_by_indices_and_masks_of_the_cpu(gpus, dry):
    with perhaps_dry(dry):
        for index in ([0, 1], torch.tensor([0, 1]), torch.tensor([0, 1], device="cuda"), torch.arange(4) < 2):
            x = ones(4)
            x[index] = 0.0
            assert x.device == ZERO and (dry or x.tolist() == [0, 0, 1, 1])
    y = torch.zeros(2, 3, device="cuda")
    y[:, [0, 1]] = 1.0
    y[[1], [2]] = 5.0
    y[torch.tensor([True, False])] += 1
    assert y.tolist() == [[2, 2, 1], [1, 1, 5]]
    y[[0]] = torch.zeros(3, device="cuda")
    y[[1], [0]] = torch.ones(1)  # one number may come from anywhere
    assert y[[0, 1]].tolist() == [[0, 0, 0], [1, 1, 5]]
    x, c = torch.zeros(2, device=ONE), torch.zeros(2)
    x[0] = torch.tensor(5.0)
    c[1] = x[0]
    assert (x.tolist(), c.tolist()) == ([5, 0], [0, 5]) and (x.device, c.device) == (ONE, CPU)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("lengths", [[5, 3, 1], [3, 5, 1]])
def test_packed_recurrent_layers_train(gpus, kind, lengths):
    """Bidirectional, batch first: as on the CPU to the last bit, and all of it on the GPU."""
    torch.manual_seed(0)
    model, x = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True), torch.randn(3, 5, 3)

    def grads(model, x):
        x = x.clone().requires_grad_()
        packed = rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=lengths[0] == 5)
        out, _ = rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        model.zero_grad()
        out.square().sum().backward()
        return [out.detach(), x.grad.clone(), *[parameter.grad.clone() for parameter in model.parameters()]]

    expected, found = grads(model, x), grads(model.to(ONE), x.to(ONE))
    assert {tensor.device for tensor in found} == {ONE}
    assert all(torch.equal(here.cpu(), there) for here, there in zip(found, expected, strict=True))


@pytest.mark.parametrize("call", ["F.one_hot(whole(4, device=ONE), 4)", "torch.vander(torch.ones(4, device=ONE))"])
def test_what_cpp_made_is_counted_and_can_be_resized(gpus, call):
    made = eval(call)
    before = torch.cuda.memory_allocated(1) - 512 * -(-made.nbytes // 512)
    assert before in (0, 512)
    made.resize_(300, 300)
    assert made.device == ONE and torch.cuda.memory_allocated(1) - before == 512 * -(-made.nbytes // 512)
    made.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated(1) == before


def test_numbers_and_identity_of_what_is_made_of_tensors(gpus):
    x = torch.arange(3.0, device=ONE)
    assert torch.as_tensor(x) is x and torch.asarray(x).data_ptr() == x.data_ptr()
    for options in ({"dtype": DOUBLE}, {"copy": True}, {"dtype": INT, "copy": True}):
        made = torch.asarray(x, **options)
        assert made.dtype == options.get("dtype", x.dtype) and made.data_ptr() != x.data_ptr()
    half = x.half()
    assert {
        made.dtype for made in (half.new(2), half.new([1]), half.new(), half.new_tensor([1.0]), half.new(half))
    } == {HALF}
    assert (
        x.new(2, 3).shape == (2, 3) and x.new([1, 2]).tolist() == [1, 2] and x.new_tensor([1], dtype=LONG).dtype is LONG
    )
    meta = torch.ones(2, device="meta")
    assert meta.to("meta") is meta and meta.double().is_meta


def test_storages_move(gpus):
    moved = torch.arange(4.0).untyped_storage().cuda(1)
    assert moved.device == ONE and moved.is_cuda and moved.nbytes() == 16 and torch.cuda.memory_allocated(1) == 512
    x = torch.empty(0, device=ONE).set_(moved, 0, (4,))
    assert x.device == x.storage().device == ONE and x.tolist() == [0, 1, 2, 3]
    assert torch.empty(0).set_(moved.cpu(), 0, (4,)).tolist() == [0, 1, 2, 3]
    assert moved.to(device="cpu", non_blocking=True).is_pinned() and not moved.cpu().is_pinned()
    del x, moved
    assert torch.cuda.memory_allocated(1) == 0


@pytest.mark.parametrize("dry", [False, True])
def test_foreach_copies_go_from_place_to_place(gpus, dry):
    with perhaps_dry(dry):
        values = [torch.arange(3.0), torch.arange(4.0)]
        for target in (ZERO, ONE, CPU):
            copies = [torch.zeros_like(value, device=target) for value in values]
            torch._foreach_copy_(copies, values)
            assert [copy.device for copy in copies] == [target] * 2
            assert dry or all(torch.equal(copy.cpu(), torch.arange(len(copy) * 1.0)) for copy in copies)
            values = copies


def test_an_optimizer_refuses_a_gradient_or_a_state_elsewhere(gpus):
    weight = nn.Parameter(ones(3))
    weight.grad = ones(3)
    weight.grad.data = torch.ones(3)
    with pytest.raises(RuntimeError, match=SAME_DEVICE):
        torch.optim.SGD([weight], lr=0.1, foreach=True).step()
    assert weight.tolist() == [1, 1, 1]
    weight.grad, optimizer = ones(3), torch.optim.Adam([weight])
    optimizer.step()
    for place in ("cuda:0", "cpu", "cuda:1"):
        optimizer.state[weight]["step"] = optimizer.state[weight]["step"].to(place)
        refused = pytest.raises(RuntimeError, match="same index must be on the same device")
        with refused if place == "cuda:1" else contextlib.nullcontext():
            optimizer.step()


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

    (weight, step), (expected, steps) = trained("cuda:1"), trained("cpu")
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


def _by_reduce(operations, r):
    return functools.reduce(lambda r, operation: operation(r), operations, r)


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("turns", [_in_a_loop, _in_a_list, _in_an_object, _by_reduce])
def test_what_a_call_has_returned_is_the_cpus_for_the_next(gpus, turns, mode, dry):
    """Also where both come from one instruction: the first makes its result from tensors of the CPU, which C++ made as well."""
    with mode(), perhaps_dry(dry):
        gpu, cpu = torch.ones(3, device=ONE), torch.arange(3.0)
        for then in (gpu.__add__, lambda r: torch.cat([gpu.view(1, 3), r]), lambda r: gpu.addmv(r, gpu)):
            with pytest.raises(RuntimeError, match=SAME_DEVICE):
                turns((torch.vander, then), cpu)
        assert turns((torch.vander, torch.Tensor.sum, gpu.__add__), cpu).device == ONE  # a number may join
