# ruff: noqa: F403, F405
"""What a dry run knows: small tensors on the CPU and on a GPU, until something without values is written to them."""

import math

import pytest

from tests.virtualgpu.engine.tools import *


@pytest.fixture(autouse=True)
def dry():
    with virtualgpu.dry_run(1):
        yield


def on_gpu(*shape):
    """What no dry run knows."""
    return torch.rand(*shape, device="cuda")


def unknown(*values) -> bool:
    return all(map(math.isnan, values))


def test_what_is_drawn_is_what_would_be_drawn():
    def draw():
        yield torch.rand(3).tolist()
        yield torch.randint(5, 9, (4,)).tolist()
        yield torch.randperm(6).tolist()
        yield torch.empty(1).uniform_(2, 3).item()
        yield [int(i) for i in torch.randperm(4)]
        yield torch.normal(0.0, 1.0, (2,)).numpy().tolist()

    torch.manual_seed(0)
    found = list(draw())
    virtualgpu.reset()  # this far it was dry
    torch.manual_seed(0)
    assert found == list(draw())


def test_the_host_computes_with_them():
    x = torch.zeros(3)
    x[1] = 5
    x += 1
    assert x.tolist() == [1, 6, 1] and x.sum().item() == 8 and x.view(3, 1)[1].item() == 6
    assert (x > 2).nonzero().tolist() == [[1]] and x[x > 2].item() == 6 and bool((x > 0).all())
    assert torch.cat([x, torch.ones(2)]).mean().item() == 2 and torch.equal(x, torch.tensor([1.0, 6.0, 1.0]))
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    assert out.tolist() == [2, 7, 2]
    there = torch.zeros(2, device="cuda")
    assert there.fill_(x[1]).tolist() == x[:2].fill_(there[0]).tolist() == [6, 6] and x.tolist() == [6, 6, 1]
    assert unknown(*x.fill_(on_gpu(1)[0]).tolist(), *x.tolist(), *there.fill_(x[0]).tolist())
    assert torch.log(torch.tensor([1.0, math.e]))[1].item() == pytest.approx(1)
    # a number that C++ makes beside numbers has one: torch.utils.benchmark asks for its median
    assert torch.tensor([1.0, 2.0, 4.0], dtype=DOUBLE).quantile(0.5).item() == 2


def test_a_list_is_written_to_in_place():
    steps = [torch.zeros(()), torch.ones(2)]
    torch._foreach_add_(steps, 1)
    assert [step.tolist() for step in steps] == [1, [2, 2]]
    torch._foreach_mul_(steps, [on_gpu(1).cpu().sum(), torch.tensor(2.0)])
    assert unknown(steps[0].item(), *steps[1].tolist())


def test_what_came_from_a_gpu_is_not_known():
    assert unknown(*on_gpu(3).cpu().tolist(), on_gpu(1).cpu().item())
    x, total, copy, part = torch.zeros(3), torch.tensor(0.0), torch.zeros(2), torch.zeros(2, 2)
    x += on_gpu(3).cpu()
    total += on_gpu(2).sum().cpu()
    copy.copy_(on_gpu(2))
    part[0] = on_gpu(2).cpu()
    assert unknown(*x.tolist(), total.item(), *copy.tolist(), *part[0].tolist())
    assert part[1].tolist() == [0, 0]
    x.fill_(2)
    assert x.tolist() == [2, 2, 2]


def test_a_generators_state_is_known():
    """Megatron asks whether one has changed."""
    before = torch.get_rng_state()
    torch.rand(3, device="cuda")
    assert torch.equal(before, torch.get_rng_state()) and bool(torch.all(before == torch.get_rng_state()))
    torch.rand(3)
    assert not torch.equal(before, torch.get_rng_state())


# sizes, copy, x, filled and so on: see `counts`
COUNTED = table("""
    sizes
    sizes.cpu()
    sizes.to("cpu")[1].item()
    [int(size) for size in sizes]
    sizes.sum().item()
    sizes.max()
    sizes.cumsum(0)
    (sizes > 3).sum()
    sizes.argmax()
    back
    copy.view(3, 1)[2].item()
    torch.stack([copy, copy]).max(0).values
    bool((copy > 4).any())
    torch.equal(copy, sizes)
    copy.new_tensor([8])
    norm.num_batches_tracked.item()
    total.item()
    (total / 3).cpu().item()
    float(total.detach().clone())
    elapsed.to(BRAIN).float()
    x.t()
    x[1, 1:]
    x.reshape(3, 2)[2].cpu().numpy().tolist()
    x.mean(0)
    x.flatten()[-1].item()
    x.max(1).indices
    x.min().item()
    x.std()
    (-x).pow(2).sum().sqrt()
    torch.cat([x, x + 1]).sum(1)
    torch.stack([x[0], x[1]], 1)
    torch.where(x > 2, x, -x)
    bool((x >= 0).all())
    torch.equal(x, x.clone())
    (x < 2).sum().item()
    filled
    filled.zero_()
    torch.eye(2, device="cuda")
    torch.full((2,), 0.5).cuda()
    torch.linspace(0, 1, 5, device="cuda").half()
    both.mul(100).round()
    out
    nn.Parameter(both)[0].item()
    weight.view(2, 1).detach()[1].item()
    torch.tensor([1.0, math.inf], device="cuda").isinf()
""")


def counts() -> list:
    """As benchmarks and training loops have it: times, rates, averages and weights of the program's own, on a GPU."""
    sizes, copy, back = torch.tensor([3, 1, 2], device="cuda"), whole(3), torch.empty(3, dtype=LONG)
    sizes += 1
    sizes[1] = 7
    copy.copy_(torch.tensor([4, 5, 6]))
    back.copy_(copy + torch.arange(3, device="cuda"))
    norm = nn.BatchNorm1d(3).cuda()
    norm(ones(4, 3))
    elapsed, total = torch.tensor([0.25], device="cuda"), torch.zeros((), device="cuda")
    for step in range(3):
        total += elapsed[0] * step
    x, filled = torch.arange(6.0, device="cuda").view(2, 3), torch.empty(4, device="cuda").fill_(1.5)
    filled[1:3] = torch.tensor([2.0, 3.0])  # of the host
    filled[filled > 2.5] = 0
    both, out = torch.tensor([12.0, 5], device="cuda"), torch.empty(0, device="cuda")
    both.div_(both[1].clone()).clamp_(max=2)
    torch.add(both, both, out=out)
    torch.mul(out, 2, out=out)
    torch._foreach_add_([both, out], 1)
    weight = nn.Parameter(ones(2))
    with torch.no_grad():
        weight.mul_(0.5)
    names = dict(locals())
    found = [eval(call, globals(), names) for call in COUNTED]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in found]


@pytest.mark.filterwarnings("error")  # of a value that is not known
def test_on_a_gpu_small_tensors_of_the_host_are_known():
    found = counts()
    virtualgpu.reset()
    virtualgpu.gpus(1)
    with virtualgpu.engine.machine.dry_runs.set_here(False):
        assert found == counts()


# How something that is not known, u, is written to a tensor x, or to what shares its memory
WAYS = table("""
    x.add_(u)
    x.copy_(u)
    x.view(3, 1).copy_(u.view(3, 1))
    x[:].__setitem__(slice(None), u)
    x.data.mul_(u)
    x.detach().sub_(u)
    torch.empty(0, device="cuda").set_(x).copy_(u)
    nn.Parameter(x, requires_grad=False).add_(u)
    torch.add(u, 1, out=x)
    torch.mv(ones(3, 3), u, out=x)
    x.index_put_((torch.tensor([0, 1, 2], device="cuda"),), u)
    x.index_fill_(0, (u * 3).long(), 1.0)
    x.masked_fill_(u > 2, 1.0)
    x.copy_(torch.where(u > 2, 1.0, 2.0))
    torch._foreach_add_([x], [u])
    torch._foreach_copy_([x], [u])
    x.normal_()
    x.copy_(ones(3, 3) @ ones(3))
    x.copy_(u.cpu())
    x.copy_(torch.stack([u, x]).flip(0)[1])
    x.scatter_(0, torch.arange(3, device="cuda"), u)
    [part.copy_(other) for part, other in zip(x.split(1), u.split(1))]
    x.copy_(torch.nan_to_num(u))
    x.copy_((u > 0).sum() + torch.zeros(3, device="cuda"))
    x.copy_(ones(3).add_(u).gt(0).float())
    x.copy_(ones(3, dtype=LONG).add_(u.long()))
    x.view(INT).copy_(u.view(INT))
    [x.untyped_storage().resize_(0), x.untyped_storage().resize_(12)]
    by_an_optimizer(x)
    by_batch_norm(x)
    by_batch_norm(x.half())
    by_a_custom_operation(x, u)
""")


def by_an_optimizer(x):
    model = nn.Linear(2, 3).cuda()
    model.bias = nn.Parameter(x)
    optimizer = torch.optim.AdamW([model.bias])
    model(on_gpu(1, 2)).square().sum().backward()
    optimizer.step()


def by_batch_norm(x):
    norm = nn.BatchNorm1d(3).cuda().to(x.dtype)
    norm.running_mean = x
    norm(ones(4, 3, dtype=x.dtype))
    return x


def by_a_custom_operation(x, u):
    library = torch.library.Library("dry_values", "FRAGMENT")
    library.define("overwrite(Tensor(a!) x, Tensor y) -> ()")
    library.impl("overwrite", lambda x, y: None, "Meta")
    torch.ops.dry_values.overwrite(x, u)
    library._destroy()


@pytest.mark.parametrize("call", WAYS)
@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
def test_a_number_that_was_overwritten_is_never_read(call):
    is_half = "half" in call
    x = torch.zeros(3, device="cuda", dtype=HALF if is_half else SINGLE)
    view = x.view(3, 1)
    eval(call.replace("x.half()", "x"), globals(), {"x": x, "u": on_gpu(3)})
    read = *x.tolist(), x[0].item(), *view.flatten().tolist(), x.cpu().sum().item(), (x + 1).max().item()
    assert unknown(*read, *x.detach().numpy(force=True).tolist(), float(x.data[2]), *x.clone().double().tolist())
    x.data.fill_(2)
    assert x.tolist() == view.flatten().tolist() == [2, 2, 2]


def test_what_comes_of_what_is_not_known_is_not_known():
    loss, weight, total = on_gpu(1000).mean(), torch.tensor(0.5, device="cuda"), torch.zeros(2, device="cuda")
    total[0] += loss
    total[1] += 3
    assert (
        unknown(loss.item(), (loss * weight).item(), (weight - loss).item(), total[0].item()) and total[1].item() == 3
    )
    assert unknown(*(total * 2).tolist()[:1], total.sum().item(), total.nansum().item(), total.nan_to_num()[0].item())
    assert unknown(torch.where(total > 1, weight, -weight)[1].item(), (total > 1).float()[0].item())
    assert unknown(total.long().float()[1].item())
    correct = torch.tensor(0, device="cuda")
    correct += (on_gpu(8, 10).argmax(1) == torch.zeros(8, device="cuda")).sum()
    assert correct.item() == 0 and unknown((correct / 8).item(), correct.float().item(), (correct * weight).item())
    turned = torch.polar(on_gpu(2), on_gpu(2))
    assert all(number != number for number in (turned[0].item(), *turned.tolist()))
    large = ones(300)
    assert unknown(large[0].item(), large.sum().item(), ones(1).expand(10_000).sum().item())
    large = torch.zeros(10, 1000)  # of the host
    large += 1
    assert large.sum(1).shape == (10,) and unknown(large[0, 0].item(), large.sum().item(), *large.sum(1).tolist())


NAMED = table("""
    ones(300).tolist() | larger tensors keep no numbers
    (ones(2, 2) @ ones(2, 2)).sum().item() | the result of mm was not computed
    (on_gpu(1000, 3).mean() * torch.tensor(2.0, device="cuda")).cpu().tolist() | the result of mean was not computed
    torch.zeros(3, device="cuda").add_(on_gpu(3)).max().cpu().numpy() | the result of rand was not computed
    (on_gpu(100, 900).argmax(1)[:3] == torch.zeros(3, device="cuda")).sum().item() | the result of argmax was not computed
    float(F.cross_entropy(on_gpu(100, 10), whole(100))) | the result of nll_loss_forward was not computed
    [norm := nn.BatchNorm1d(3).cuda(), norm(on_gpu(400, 3))][0].running_var[1].item() | the result of native_batch_norm was not computed
    torch.zeros((), device="cuda").add_(on_gpu(2).sum()).item() | the result of rand was not computed
    float(torch.zeros((), device="cuda").add_(on_gpu(2).sum())) | the result of rand was not computed
""")


@pytest.mark.parametrize("call, why", NAMED)
def test_what_is_not_known_says_since_when(call, why):
    code = compile(call, __file__, "eval")
    with pytest.warns(UserWarning, match=f"here because {why}") as caught:
        eval(code)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("error")
def test_what_is_filled_is_known_whatever_it_is_like():
    """A padding mask like tokens that are not known."""
    tokens = torch.randint(9, (2, 8), device="cuda")
    mask = torch.ones_like(tokens)
    assert mask.all() and torch.full_like(tokens, 3).sum().item() == 48
    mask[:, -2:] = 0
    assert not mask.bool().all() and mask.sum(1).tolist() == [6, 6]
    large = torch.empty(1 << 13, 1 << 20, device="cuda", dtype=torch.int8)
    assert large.new_full((2,), 5).tolist() == torch.full_like(large[::1024, :1], 5)[:2, 0].tolist() == [5, 5]
    assert tokens.new_zeros(2).tolist() == torch.zeros_like(tokens)[0, :2].tolist() == [0, 0]


@pytest.mark.filterwarnings("error")
def test_a_fused_optimizers_steps_are_known():
    """It counts them on the GPU, in a single float32."""
    model = nn.Linear(3, 2, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(on_gpu(4, 3)).sum().backward()
        optimizer.step()
    steps = [state["step"] for state in optimizer.state.values()]
    assert [step.item() for step in steps] == [step.cpu().item() for step in steps] == [2, 2]
    assert torch.equal(steps[0].cpu(), steps[1].cpu())


def test_on_a_gpu_what_is_drawn_or_comes_of_other_numbers_is_not_known():
    with pytest.warns(UserWarning, match="a dry run computes shapes"):
        drawn = torch.randint(5, 9, (3,), device="cuda")
        assert drawn.tolist() == drawn.cpu().tolist() == [0, 0, 0] and drawn.sum().item() == 0
    counts = torch.tensor([1, 2, 3], device="cuda")
    assert counts.float().tolist() == [1, 2, 3] and (counts / 2)[0].item() == 0.5 and on_gpu(3).argmax().item() == 0
    counts[0] = on_gpu(2).argmax()
    assert counts.tolist() == [0, 2, 3]
    more = torch.tensor([1, 2, 3], device="cuda")
    more.random_()
    torch._foreach_add_([counts], [on_gpu(3).argmax()])
    assert more.tolist() == counts.tolist() == [0, 0, 0]


def test_true_or_anything_is_true():
    """As generate() asks, token by token: has each text come to its end, or is it long enough?"""
    unknown, false = on_gpu(3) > 0, whole(3, dtype=BOOL)
    true = torch.tensor([True] * 3, device="cuda")
    for found in (unknown | true, true | unknown, unknown.logical_or(true), unknown | true[0], true[:, None] | unknown):
        assert found.all().item() and not (~found).any().item()
    for found in (unknown & false, ~true & unknown, unknown.logical_and(false), unknown.long() & false.long()):
        assert found.dtype in (BOOL, LONG) and (found == 0).all().item()
    true |= unknown
    assert true.tolist() == [True] * 3
    some = torch.tensor([True, False, True], device="cuda")
    for not_known in (unknown | some, unknown & true, unknown.long() | true.long(), false | unknown, unknown ^ true):
        assert not (not_known == 1).any().item() and not (not_known == 0).any().item()


def test_a_list_of_tensors_becomes_one():
    """torch.tensor(losses)."""
    count, loss = torch.tensor(3, device="cuda"), on_gpu(2).sum()
    assert torch.tensor([count, 4]).tolist() == torch.as_tensor([count, torch.tensor([4])]).tolist() == [3, 4]
    assert torch.tensor([count, count]).dtype is LONG and torch.tensor([[count], [count]], device="cuda").shape == (
        2,
        1,
    )
    losses = torch.tensor([loss, loss.double()])
    assert losses.dtype is DOUBLE and unknown(*losses.tolist(), losses.mean().item())
    assert unknown(*loss.new_tensor([loss, 2.0])[:1].tolist())


# -- parameters of the host, and from a file


def tied():
    """As transformers makes one from a file: its parameters are the file's tensors."""
    numpy, model = pytest.importorskip("numpy"), nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[0].weight = model[1].weight = nn.Parameter(torch.from_numpy(numpy.ones((7, 4), "float32")))
    return model


def test_parameters_stay_themselves_and_tied():
    model = nn.Linear(3, 2)
    optimizer, bias = torch.optim.Adam(model.parameters()), model.bias
    model.cuda()
    for _ in range(2):
        model(on_gpu(4, 3)).sum().backward()
        optimizer.step()
    assert model.bias is bias and bias.device.type == "cuda" and optimizer.state[bias]["step"].item() == 2
    model = tied()
    weight, optimizer = model[0].weight, torch.optim.SGD(model.parameters())
    assert used(model.cuda)[1][0] == 512
    assert model[0].weight is model[1].weight is weight is optimizer.param_groups[0]["params"][0] and weight.is_cuda
    model(torch.tensor([1, 2], device="cuda")).sum().backward()
    model.half()
    assert model[1].weight is weight and weight.dtype is weight.grad.dtype is HALF
    model.cpu()
    assert model[1].weight is weight and weight.device.type == weight.grad.device.type == "cpu"


def test_parameters_assigned_from_a_file_can_be_cut_before_they_move():
    """As gpt-fast cuts a model for tensor parallel on the CPU, where gradients are on."""
    numpy = pytest.importorskip("numpy")
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    state = {"weight": numpy.ones((4, 3), "float32"), "bias": numpy.ones(4, "float32")}
    model.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()}, assign=True)
    halves = model.weight.split(2)
    model.weight = nn.Parameter(torch.cat((halves[1], halves[0]))[:2])
    assert model.bias.requires_grad and not model.bias.is_meta and model.weight.device.type == "cpu"
    assert used(model.cuda)[1][0] == 2 * 512 and model.weight.shape == (2, 3)


def test_data_of_a_parameter_from_a_file_can_be_replaced():
    """As a library cuts a weight for tensor parallel, or gives a new one its numbers."""
    weight = tied()[0].weight
    weight.mark = "mine"
    optimizer = torch.optim.SGD([weight])
    before = torch.cuda.memory_allocated()
    weight.data = weight.data[:3].cuda()
    assert weight.shape == weight.data.shape == (3, 4) and weight.is_cuda and weight.requires_grad
    assert type(weight) is nn.Parameter and weight.mark == "mine" and torch.cuda.memory_allocated() - before == 512
    weight.sum().backward()
    assert weight.grad.shape == (3, 4) and optimizer.param_groups[0]["params"][0] is weight

    weight = nn.Parameter(torch.empty(3, 4, device="cuda"))
    before = torch.cuda.memory_allocated()
    weight.data = tied()[0].weight.data[:3]
    assert weight.device.type == "cpu" and weight.data.sum().item() == 12 and weight.requires_grad
    assert torch.cuda.memory_allocated() == before - 512
    plain = torch.empty(2)
    plain.data = torch.from_numpy(pytest.importorskip("numpy").ones(2))
    assert plain.tolist() == [1, 1] and plain.dtype is DOUBLE and not plain.requires_grad

    weight = tied()[0].weight
    weight.register_hook(lambda gradient: gradient * 2)  # stays with what swap_tensors would put away
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        weight.data = torch.empty(7, 4)


def test_numpys_arrays_change_as_the_program_says():
    array = pytest.importorskip("numpy").arange(10_000.0)
    x = torch.from_numpy(array)
    x += 1
    assert array[3] == 4 and x[3].item() == 4
    x[3] = on_gpu(1).double().cpu()[0]
    assert unknown(x[3].item()) and array[4] == 5


def test_torchvisions_transforms():
    """In this process: a loader's workers are no part of a dry run."""
    t, datasets = (getattr(pytest.importorskip("torchvision"), name) for name in ("transforms", "datasets"))
    steps = [t.RandomResizedCrop(64), t.RandomHorizontalFlip(), t.ColorJitter(0.4, 0.4, 0.4, 0.1), t.RandAugment()]
    steps += [t.RandomRotation(10), t.ToTensor(), t.RandomErasing(1.0), t.Normalize([0.5] * 3, [0.5] * 3)]
    data = datasets.FakeData(8, (3, 80, 80), transform=t.Compose(steps))
    with pytest.warns(RuntimeWarning, match="invalid value"):  # images are larger than what is kept
        (images, labels), _ = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    assert images.shape == (4, 3, 64, 64) and images.cuda().device.type == "cuda" and len(labels.tolist()) == 4


def test_what_is_known_is_shown_and_what_is_not_is_a_shape():
    times = torch.tensor([1.0, 2.0, 4.0], device="cuda", requires_grad=True)
    assert repr(times) == "tensor([1., 2., 4.], device='cuda:0', requires_grad=True)"
    assert repr(torch.arange(3) * 2) == "tensor([0, 2, 4])"
    assert repr(on_gpu(3)) == "tensor(..., device='cuda:0', size=(3,), dtype=torch.float32)"
    times.detach()[1] = on_gpu(1)[0]
    assert repr(times) == "tensor(..., device='cuda:0', size=(3,), dtype=torch.float32)"
