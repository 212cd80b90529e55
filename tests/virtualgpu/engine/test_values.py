"""What a dry run knows: small tensors on the CPU and on a GPU, until something without values is written to them."""

import math

import pytest
import torch
from torch import nn

import virtualgpu


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
    assert torch.log(torch.tensor([1.0, math.e]))[1].item() == pytest.approx(1)


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


def counts_on(device):
    sizes = torch.tensor([3, 1, 2], device=device)
    sizes += 1
    sizes[1] = 7
    yield sizes.tolist(), sizes.cpu().tolist(), sizes.to("cpu")[1].item(), [int(size) for size in sizes]
    yield (
        sizes.sum().item(),
        sizes.max().item(),
        sizes.cumsum(0).tolist(),
        (sizes > 3).sum().item(),
        sizes.argmax().item(),
    )
    copy, back = torch.zeros(3, dtype=torch.int64, device=device), torch.empty(3, dtype=torch.int64)
    copy.copy_(torch.tensor([4, 5, 6]))
    back.copy_(copy + torch.arange(3, device=device))
    yield (
        back.tolist(),
        copy.view(3, 1)[2].item(),
        torch.stack([copy, copy]).max(0).values.tolist(),
        bool((copy > 4).any()),
    )
    norm = nn.BatchNorm1d(3).to(device)
    norm(torch.ones(4, 3, device=device))
    yield norm.num_batches_tracked.item(), torch.equal(copy, sizes), copy.new_tensor([8]).item()


@pytest.mark.filterwarnings("error")  # of a value that is not known
def test_on_a_gpu_whole_numbers_are_known():
    assert list(counts_on("cuda")) == list(counts_on("cpu"))


def measured():
    """As benchmarks and training loops have it: times, rates, averages and weights of the program's own."""
    device = "cuda"
    elapsed, total = torch.tensor([0.25], device=device), torch.zeros((), device=device)
    for step in range(3):
        total += elapsed[0] * step
    yield (
        total.item(),
        (total / 3).cpu().item(),
        float(total.detach().clone()),
        elapsed.to(torch.bfloat16).float().tolist(),
    )
    x = torch.arange(6.0, device=device).view(2, 3)
    yield (
        x.t().tolist(),
        x[1, 1:].tolist(),
        x.reshape(3, 2)[2].cpu().numpy().tolist(),
        x.mean(0).tolist(),
        x.flatten()[-1].item(),
    )
    yield (
        x.max(1).values.tolist(),
        x.max(1).indices.tolist(),
        x.min().item(),
        x.std().item(),
        (-x).pow(2).sum().sqrt().item(),
    )
    yield (
        torch.cat([x, x + 1]).sum(1).tolist(),
        torch.stack([x[0], x[1]], 1).tolist(),
        torch.where(x > 2, x, -x).tolist(),
    )
    yield bool((x >= 0).all()), bool((x == 7).any()), torch.equal(x, x.clone()), (x < 2).sum().item(), x.argmax().item()
    filled = torch.empty(4, device=device).fill_(1.5)
    filled[1:3] = torch.tensor([2.0, 3.0])  # of the host
    filled[filled > 2.5] = 0
    yield (
        filled.tolist(),
        filled.zero_().tolist(),
        torch.eye(2, device=device).tolist(),
        torch.full((2,), 0.5).cuda().tolist(),
    )
    both = torch.tensor([12.0, 5], device=device)
    both.div_(both[1].clone()).clamp_(max=2)
    yield [f"{number:.2f}" for number in both.tolist()], torch.linspace(0, 1, 5, device=device).half().tolist()
    copy, out = torch.zeros(2, device=device), torch.empty(0, device=device)
    copy.copy_(both)
    torch.add(copy, both, out=out)
    torch.mul(out, 2, out=out)
    torch._foreach_add_([copy, out], 1)
    yield copy.tolist(), out.tolist(), nn.Parameter(copy)[0].item(), copy.data.tolist(), copy.new_tensor([0.5]).tolist()
    weight = nn.Parameter(torch.ones(2, device=device))
    with torch.no_grad():
        weight.mul_(0.5)
    yield (
        weight.tolist(),
        weight.view(2, 1).detach()[1].item(),
        torch.tensor([1.0, math.inf], device=device).isinf().tolist(),
    )


@pytest.mark.filterwarnings("error")
def test_on_a_gpu_small_tensors_of_the_host_are_known():
    found = list(measured())
    virtualgpu.reset()
    virtualgpu.gpus(1)
    with virtualgpu.engine.machine.dry_runs.set_here(False):
        assert found == list(measured())


def into(known, unknown, how):
    """Something that is not known is written to it, or to what shares its memory."""
    model = nn.Linear(2, 3).cuda()
    if how == "optimizer":
        model.bias = nn.Parameter(known)
        optimizer = torch.optim.AdamW([model.bias])
        model(on_gpu(1, 2)).square().sum().backward()
        optimizer.step()
    elif how == "batch norm":
        norm = nn.BatchNorm1d(3).cuda()
        norm.running_mean = known
        norm(torch.ones(4, 3, device="cuda"))
    elif how == "half batch norm":
        norm = nn.BatchNorm1d(3).cuda().half()
        norm.running_mean = known
        norm(torch.ones(4, 3, device="cuda", dtype=torch.float16))
    elif how == "bytes":
        known.view(torch.int32).copy_(unknown.view(torch.int32))
    elif how == "given back":
        known.untyped_storage().resize_(0)
        known.untyped_storage().resize_(12)
    elif how == "custom":
        torch.ops.dry_values.overwrite(known, unknown)
    else:
        WAYS[how](known, unknown)


WAYS = {
    "+=": lambda known, unknown: known.add_(unknown),
    "copy_": lambda known, unknown: known.copy_(unknown),
    "copy_ to a view": lambda known, unknown: known.view(3, 1).copy_(unknown.view(3, 1)),
    "a part": lambda known, unknown: known[:].__setitem__(slice(None), unknown),
    "data": lambda known, unknown: known.data.mul_(unknown),
    "detached": lambda known, unknown: known.detach().sub_(unknown),
    "set_": lambda known, unknown: torch.empty(0, device="cuda").set_(known).copy_(unknown),
    "as a parameter": lambda known, unknown: nn.Parameter(known, requires_grad=False).add_(unknown),
    "out=": lambda known, unknown: torch.add(unknown, 1, out=known),
    "out= of a product": lambda known, unknown: torch.mv(torch.ones(3, 3, device="cuda"), unknown, out=known),
    "index_put_": lambda known, unknown: known.index_put_((torch.tensor([0, 1, 2], device="cuda"),), unknown),
    "an unknown index": lambda known, unknown: known.index_fill_(0, (unknown * 3).long(), 1.0),
    "a mask": lambda known, unknown: known.masked_fill_(unknown > 2, 1.0),
    "where": lambda known, unknown: known.copy_(torch.where(unknown > 2, 1.0, 2.0)),
    "foreach": lambda known, unknown: torch._foreach_add_([known], [unknown]),
    "lists": lambda known, unknown: torch._foreach_copy_([known], [unknown]),
    "drawn": lambda known, unknown: known.normal_(),
    "a product": lambda known, unknown: known.copy_(torch.ones(3, 3, device="cuda") @ torch.ones(3, device="cuda")),
    "by the CPU": lambda known, unknown: known.copy_(unknown.cpu()),
    "swapped": lambda known, unknown: known.copy_(torch.stack([unknown, known]).flip(0)[1]),
    "scatter_": lambda known, unknown: known.scatter_(0, torch.arange(3, device="cuda"), unknown),
    "split": lambda known, unknown: [
        part.copy_(other) for part, other in zip(known.split(1), unknown.split(1), strict=True)
    ],
    "nan_to_num": lambda known, unknown: known.copy_(torch.nan_to_num(unknown)),
    "counted": lambda known, unknown: known.copy_((unknown > 0).sum() + torch.zeros(3, device="cuda")),
    "of what was written": lambda known, unknown: known.copy_(torch.ones(3, device="cuda").add_(unknown).gt(0).float()),
    "whole": lambda known, unknown: known.copy_(torch.ones(3, dtype=torch.int64, device="cuda").add_(unknown.long())),
}
OTHER_WAYS = ("optimizer", "batch norm", "half batch norm", "bytes", "given back", "custom")


@pytest.mark.parametrize("how", [*WAYS, *OTHER_WAYS])
@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
def test_a_number_that_was_overwritten_is_never_read(how):
    library = torch.library.Library("dry_values", "FRAGMENT") if how == "custom" else None
    if library is not None:
        library.define("overwrite(Tensor(a!) x, Tensor y) -> ()")
        library.impl("overwrite", lambda x, y: None, "Meta")
    known, unknown_ = torch.zeros(3, device="cuda", dtype=torch.float16 if how.startswith("half") else None), on_gpu(3)
    view = known.view(3, 1)
    into(known, unknown_, how)
    read = (
        *known.tolist(),
        known[0].item(),
        *view.flatten().tolist(),
        known.cpu().sum().item(),
        (known + 1).max().item(),
    )
    assert unknown(
        *read, *known.detach().numpy(force=True).tolist(), float(known.data[2]), *known.clone().double().tolist()
    )
    known.data.fill_(2)
    assert known.tolist() == view.flatten().tolist() == [2, 2, 2]


def test_what_comes_of_what_is_not_known_is_not_known():
    loss, weight, total = on_gpu(1000).mean(), torch.tensor(0.5, device="cuda"), torch.zeros(2, device="cuda")
    total[0] += loss
    total[1] += 3
    assert (
        unknown(loss.item(), (loss * weight).item(), (weight - loss).item(), total[0].item()) and total[1].item() == 3
    )
    assert unknown(*(total * 2).tolist()[:1], total.sum().item(), total.nansum().item(), total.nan_to_num()[0].item())
    assert unknown(
        torch.where(total > 1, weight, -weight)[1].item(), (total > 1).float()[0].item(), total.long().float()[1].item()
    )
    correct = torch.tensor(0, device="cuda")
    correct += (on_gpu(8, 10).argmax(1) == torch.zeros(8, device="cuda")).sum()
    assert correct.item() == 0 and unknown((correct / 8).item(), correct.float().item(), (correct * weight).item())
    turned = torch.polar(on_gpu(2), on_gpu(2))
    assert turned[0].item() != turned[0].item() and all(number != number for number in turned.tolist())
    large = torch.ones(300, device="cuda")
    assert unknown(large[0].item(), large.sum().item(), torch.ones(1, device="cuda").expand(10_000).sum().item())


NAMED = {
    "mm": lambda: (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).sum().item(),
    "mean": lambda: (on_gpu(1000, 3).mean() * torch.tensor(2.0, device="cuda")).cpu().tolist(),
    "rand": lambda: torch.zeros(3, device="cuda").add_(on_gpu(3)).max().cpu().numpy(),
    "argmax": lambda: (on_gpu(100, 900).argmax(1)[:3] == torch.zeros(3, device="cuda")).sum().item(),
    "nll_loss_forward": lambda: float(
        nn.functional.cross_entropy(on_gpu(100, 10), torch.zeros(100, device="cuda").long())
    ),
    "native_batch_norm": lambda: batch_normed().running_var[1].item(),
}


def batch_normed():
    norm = nn.BatchNorm1d(3).cuda()
    norm(on_gpu(400, 3))
    return norm


def test_a_large_tensor_says_that_it_is_one():
    with pytest.warns(UserWarning, match="here because larger tensors keep no numbers"):
        torch.ones(300, device="cuda").tolist()


@pytest.mark.parametrize("origin", NAMED)
def test_what_is_not_known_says_since_when(origin):
    with pytest.warns(UserWarning, match=f"here because the result of {origin} was not computed") as caught:
        NAMED[origin]()
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


@pytest.mark.parametrize("read", (torch.Tensor.item, float))
def test_a_single_number_that_something_unknown_is_added_to_is_not_known(read):
    loss = torch.zeros((), device="cuda")
    loss += on_gpu(2).sum()
    with pytest.warns(UserWarning, match="a dry run computes shapes"):
        assert unknown(read(loss))


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
    unknown, false = on_gpu(3) > 0, torch.zeros(3, dtype=torch.bool, device="cuda")
    true = torch.tensor([True] * 3, device="cuda")
    for found in (unknown | true, true | unknown, unknown.logical_or(true), unknown | true[0], true[:, None] | unknown):
        assert found.all().item() and not (~found).any().item()
    for found in (unknown & false, ~true & unknown, unknown.logical_and(false), unknown.long() & false.long()):
        assert found.dtype in (torch.bool, torch.int64) and (found == 0).all().item()
    true |= unknown
    assert true.tolist() == [True] * 3
    some = torch.tensor([True, False, True], device="cuda")
    for not_known in (unknown | some, unknown & true, unknown.long() | true.long(), false | unknown, unknown ^ true):
        assert not (not_known == 1).any().item() and not (not_known == 0).any().item()


def test_a_list_of_tensors_becomes_one():
    """torch.tensor(losses)."""
    count, loss = torch.tensor(3, device="cuda"), on_gpu(2).sum()
    assert torch.tensor([count, 4]).tolist() == torch.as_tensor([count, torch.tensor([4])]).tolist() == [3, 4]
    assert torch.tensor([count, count]).dtype is torch.int64 and torch.tensor(
        [[count], [count]], device="cuda"
    ).shape == (2, 1)
    losses = torch.tensor([loss, loss.double()])
    assert losses.dtype is torch.float64 and unknown(*losses.tolist(), losses.mean().item())
    assert unknown(*loss.new_tensor([loss, 2.0])[:1].tolist())


def test_large_ones_are_shapes():
    large = torch.zeros(10, 1000)
    assert unknown(large[0, 0].item(), large.sum().item())
    large += 1
    assert large.sum(1).shape == (10,) and unknown(*large.sum(1).tolist())


def test_they_stay_shapes_and_parameters_themselves():
    model = nn.Linear(3, 2)
    optimizer, bias = torch.optim.Adam(model.parameters()), model.bias
    model.cuda()
    assert model.bias is bias and bias.device.type == "cuda"
    for _ in range(2):
        model(on_gpu(4, 3)).sum().backward()
        optimizer.step()
    assert optimizer.state[bias]["step"].item() == 2


def tied():
    """As transformers makes one from a file: its parameters are the file's tensors."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[0].weight = model[1].weight = nn.Parameter(
        torch.from_numpy(pytest.importorskip("numpy").ones((7, 4), "float32"))
    )
    return model


def test_parameters_from_a_file_stay_tied():
    model = tied()
    weight, optimizer = model[0].weight, torch.optim.SGD(model.parameters())
    before = torch.cuda.memory_allocated()
    model.cuda()
    assert model[0].weight is model[1].weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.device.type == "cuda" and torch.cuda.memory_allocated() - before == 512
    model(torch.tensor([1, 2], device="cuda")).sum().backward()
    model.half()
    assert model[1].weight is weight and weight.dtype is weight.grad.dtype is torch.float16
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
    before = torch.cuda.memory_allocated()
    model.cuda()
    assert model.weight.shape == (2, 3) and torch.cuda.memory_allocated() - before == 2 * 512


def test_data_of_a_parameter_from_a_file_can_be_replaced():
    """As a library cuts a weight for tensor parallel, or gives a new one its numbers."""
    weight = tied()[0].weight
    weight.mark = "mine"
    optimizer = torch.optim.SGD([weight])
    before = torch.cuda.memory_allocated()
    weight.data = weight.data[:3].cuda()
    assert weight.shape == weight.data.shape == (3, 4) and weight.device.type == "cuda" and weight.requires_grad
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
    assert plain.tolist() == [1, 1] and plain.dtype is torch.float64 and not plain.requires_grad


def test_data_that_a_graph_knows_stays():
    """A hook stays with what swap_tensors would put away."""
    weight = tied()[0].weight
    weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        weight.data = torch.empty(7, 4)


def test_numpys_arrays_change_as_the_program_says():
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(10_000.0)
    x = torch.from_numpy(array)
    x += 1
    assert array[3] == 4 and x[3].item() == 4
    x[3] = on_gpu(1).double().cpu()[0]
    assert unknown(x[3].item()) and array[4] == 5


def test_torchvisions_transforms():
    """In this process: a loader's workers are no part of a dry run."""
    transforms = pytest.importorskip("torchvision").transforms
    data = pytest.importorskip("torchvision").datasets.FakeData(
        8,
        (3, 80, 80),
        transform=transforms.Compose(
            [
                transforms.RandomResizedCrop(64),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
                transforms.RandAugment(),
                transforms.RandomRotation(10),
                transforms.ToTensor(),
                transforms.RandomErasing(1.0),
                transforms.Normalize([0.5] * 3, [0.5] * 3),
            ]
        ),
    )
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


def test_a_number_that_cpp_makes_beside_numbers_has_one():
    """torch.utils.benchmark asks for its median."""
    assert torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).quantile(0.5).item() == 2
