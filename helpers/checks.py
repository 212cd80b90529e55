"""Graders of the exercises. Each runs the reader's code and says what it found: numbers where there are numbers, and where to
look next. A grader never raises, so that *Run all* reaches the end with the exercises still open.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from helpers.launch import WorkerError, launch


def _grader(check: Callable) -> Callable:
    """Turn a check that returns a complaint (or None) into one that prints; the reader's own error becomes a complaint too."""

    @functools.wraps(check)
    def graded(*args, **kwargs) -> None:
        state = torch.get_rng_state()
        try:
            complaint = check(*args, **kwargs)
        except Exception as error:
            complaint = f"your code raised {type(error).__name__}: {error}"
        finally:
            torch.set_rng_state(state)  # grading changes nothing in the cells that follow
        print(f"[not yet] {complaint}" if complaint else "[passed] well done")

    return graded


@_grader
def resumes(pack: Callable, unpack: Callable) -> str | None:
    """Notebook 01: does a training cut in half by pack(model, optimizer, averaged) and unpack(saved, model, optimizer, averaged)
    end exactly where the uninterrupted one ends? Names the first part that was not brought back."""

    def fresh(seed: int):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        averaged = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averaged

    def train(model, optimizer, averaged):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).pow(2).mean().backward()
            optimizer.step()
            for name, tensor in model.state_dict().items():
                averaged[name].mul_(0.9).add_(tensor, alpha=0.1)

    whole = fresh(0)
    train(*whole)
    saved = copy.deepcopy(pack(*whole))
    middle = copy.deepcopy([part if isinstance(part, dict) else part.state_dict() for part in whole])
    draw = torch.get_rng_state()
    train(*whole)

    resumed = fresh(1)
    unpack(saved, *resumed)
    for name, part, then in zip(("model", "optimizer", "average"), resumed, middle, strict=True):
        now = part if isinstance(part, dict) else part.state_dict()
        if not _equal(now, then):
            return f"after unpack, the {name} is not what it was when pack was called"
    if not torch.equal(torch.get_rng_state(), draw):
        return "model, optimizer and average are back, but the next random number would be another one: dropout will drop other features"
    train(*resumed)
    if not _equal(resumed[0].state_dict(), whole[0].state_dict()) or not _equal(resumed[2], whole[2]):
        return "all seemed to be back, yet five steps later the weights differ"
    return None


@_grader
def loads_what_fits(load_what_fits: Callable, make: Callable[..., nn.Module]) -> str | None:
    """Notebook 01: load_what_fits(model, weights) with weights of a wrapped model whose head has 52 classes; make(classes) builds one."""
    torch.manual_seed(0)
    # + 1: equal to no fresh model
    weights = {f"module.{name}": tensor + 1 for name, tensor in make(52).state_dict().items()}
    model = make(10)
    head = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("head.")}
    left_out = load_what_fits(model, dict(weights))
    own = model.state_dict()
    body = [name for name in own if name not in head]
    loaded = sum(torch.equal(own[name], weights[f"module.{name}"]) for name in body)
    if loaded < len(body):
        return f"{loaded} of the {len(body)} tensors that fit hold the file's values. Did the names lose their prefix?"
    if any(not torch.equal(own[name], tensor) for name, tensor in head.items()):
        return "the head was changed; its shape does not fit, so it should stay as it was"
    if sorted(str(name).removeprefix("module.") for name in left_out) != sorted(head):
        return f"all that fits is loaded; now return the names left out: {sorted(head)}, not {sorted(left_out)}"
    return None


@_grader
def frozen(model: nn.Module, frozen: str) -> str | None:
    """Notebook 01: one training step of `model`; `frozen` ("backbone[:8]") must not move, everything else must."""
    name, end = frozen.removesuffix("]").split("[:")
    still = [f"{name}.{i}." for i in range(int(end))]
    device = next(model.parameters()).device
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    nn.functional.cross_entropy(
        model(torch.rand(16, 1, 8, 8, device=device)), torch.arange(16, device=device) % 10
    ).backward()
    optimizer.step()
    moved = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    wrong = [key for key in before if key.startswith(tuple(still)) and key in moved]
    learned = {key for key, _ in model.named_parameters()}
    if any(key in learned for key in wrong):
        return f"{len([key for key in wrong if key in learned])} frozen parameters moved, {next(k for k in wrong if k in learned)} first"
    if wrong:
        return f"no frozen parameter moved, but {len(wrong)} BatchNorm buffers did, {wrong[0]} first: which mode is that layer in?"
    stuck = [key for key in before if not key.startswith(tuple(still)) and key not in moved]
    if stuck:
        return f"too much is frozen: {stuck[0]} should have moved and did not"
    return None


@_grader
def most_even(choose: Callable, peaks: Mapping) -> str | None:
    """Notebook 02: choose(peaks) returns the cut whose fuller GPU is the least full; peaks: {cut: (MiB, MiB)}."""
    for table in (peaks, *_tables(peaks)):
        cut, best = choose(table), min(table, key=lambda cut: max(table[cut]))
        if cut not in table:
            return f"it returned {cut!r}, which is not one of the cuts {min(table)} to {max(table)}"
        if max(table[cut]) > max(table[best]):
            where = "" if table is peaks else "right for these peaks, but not for those of another model: "
            return f"{where}at cut {cut} the fuller GPU holds {max(table[cut]):,.0f} MiB; another cut needs {max(table[best]):,.0f}"
    return None


@_grader
def fastest_that_fits(choose: Callable, peaks: Mapping, times: Mapping, budget: float) -> str | None:
    """Notebook 02: choose(peaks, times, budget) returns the fastest cut that needs no more than budget MiB on either GPU, or None."""
    for table, limit in ((peaks, budget), *((table, budget) for table in _tables(peaks)), (peaks, 0)):
        cut = choose(table, times, limit)
        fitting = [cut for cut in table if max(table[cut]) <= limit]
        if cut is None and fitting:
            return f"it found no cut for {limit:,} MiB, but {len(fitting)} fit, cut {fitting[0]} among them"
        if cut is not None and not fitting:
            return f"nothing fits in {limit:,} MiB, and it should return None, not {cut!r}"
        if cut is not None and cut not in fitting:
            return f"cut {cut} needs {max(table[cut]):,.0f} MiB on one GPU, and the budget is {limit:,}"
        if cut is not None and times[cut] > min(times[c] for c in fitting):
            return f"cut {cut} fits, with {1e3 * times[cut]:.1f} ms a step; another that fits takes {1e3 * min(times[c] for c in fitting):.1f} ms"
    return None


@_grader
def causes(answer: Mapping[str, str], curves: Mapping[str, list[float]]) -> str | None:
    """Notebook 06: which cause each memory curve (MiB an iteration) has; says what to look at in the first that is wrong."""
    right = {"A": "graph kept", "B": "optimizer state", "C": "longer inputs", "D": "outputs kept"}
    for name, cause in right.items():
        if answer.get(name) != cause:
            curve = curves[name]
            steps = [after - before for before, after in itertools.pairwise(curve)]
            grown = sum(step > 0.01 for step in steps)
            return (
                f"{name} is not {answer.get(name)!r}. It starts at {curve[0]:.1f} MiB, grows in {grown} of {len(steps)} iterations, by "
                f"{max(steps):.1f} MiB at most, and {'falls' if min(steps) < -0.01 else 'never falls'}"
            )
    return None


@_grader
def within_budget(step: Callable, make_net: Callable, x: torch.Tensor, y: torch.Tensor, budget: int) -> str | None:
    """Notebook 06: step(net, x, y) leaves the gradients of the mean loss over the whole batch in net, returns that loss, and needs
    at most `budget` bytes for network and step."""
    reference = make_net()
    device = next(reference.parameters()).device
    expected = nn.functional.cross_entropy(reference(x.to(device)), y.to(device))
    expected.backward()
    wanted, expected = [p.grad.cpu() for p in reference.parameters()], expected.item()
    del reference

    before = torch.cuda.memory_allocated(device)
    net, x, y = make_net(), x.to(device), y.to(device)
    torch.cuda.reset_peak_memory_stats(device)
    loss = step(net, x, y)
    peak = torch.cuda.max_memory_allocated(device) - before
    if any(p.grad is None for p in net.parameters()):
        return "some parameters have no gradient: call backward() on every part, and leave zero_grad() to the caller"
    got = [p.grad.cpu() for p in net.parameters()]
    for found, want in zip(got, wanted, strict=True):
        if not torch.allclose(found, want, rtol=1e-3, atol=1e-5):
            ratio = float(found.norm() / want.norm())
            return f"the gradients are not those of the whole batch: {ratio:.2f} times as long. The mean is over {len(x)} images"
    if loss is None or not math.isclose(float(loss), expected, rel_tol=1e-3):
        return f"gradients are right; the loss should be {expected:.4f}, and it returned {loss!r}"
    if peak > budget:
        return f"right gradients, and a peak of {peak / 2**20:.1f} MiB: the budget is {budget / 2**20:.1f}"
    return None


def _tables(peaks: Mapping) -> list[dict]:
    """The same figures in other orders, so that an answer typed by hand does not pass."""
    generator = torch.Generator().manual_seed(0)
    pairs = list(peaks.values())
    return [
        dict(zip(peaks, [pairs[i] for i in torch.randperm(len(pairs), generator=generator)], strict=True))
        for _ in range(3)
    ]


@_grader
def skip_repaired(make: Callable[[], nn.Module]) -> str | None:
    """Notebook 02: a model of `below` on cuda:0 and `above` on cuda:1 computes above(relu(below(x))) + x, and trains."""
    torch.manual_seed(0)
    model = make()
    places = [str(layer.weight.device) for layer in (model.below, model.above)]
    if places != ["cuda:0", "cuda:1"]:
        return f"the layers should stay on cuda:0 and cuda:1; they are on {places[0]} and {places[1]}"
    x = torch.randn(4, 16, device="cuda:0", requires_grad=True)
    out = model(x)
    plain = [copy.deepcopy(layer).to("cpu") for layer in (model.below, model.above)]
    expected = plain[1](torch.relu(plain[0](x.detach().cpu()))) + x.detach().cpu()
    if out.shape != expected.shape or not torch.allclose(out.detach().cpu(), expected, atol=1e-5):
        return "it runs, but the numbers are not those of above(relu(below(x))) + x"
    out.sum().backward()
    if x.grad is None or model.below.weight.grad is None:
        return "the numbers are right, but no gradient arrives at x and below: was something detached?"
    return None


@_grader
def slots(table: Callable[[int, int], list]) -> str | None:
    """Notebook 03: table(stages, micro_batches) is a list of rows, one a stage: which micro-batch (or None) it works on in each slot."""
    for stages, pieces in ((2, 4), (3, 4), (4, 8)):
        rows = [list(row) for row in table(stages, pieces)]
        here = f"with {stages} stages and {pieces} micro-batches"
        if len(rows) != stages or len({len(row) for row in rows}) != 1:
            return f"{here}, there should be {stages} rows of one length, not {[len(row) for row in rows]}"
        for stage, row in enumerate(rows):
            if sorted(piece for piece in row if piece is not None) != list(range(pieces)):
                return f"{here}, stage {stage} should work on each of 0 to {pieces - 1} once; it works on {row}"
            for piece in range(pieces):
                if stage and row.index(piece) <= rows[stage - 1].index(piece):
                    return f"{here}, stage {stage} begins {piece} in slot {row.index(piece)}, before stage {stage - 1} has finished it"
        if len(rows[0]) > pieces + stages - 1:
            return f"{here}, stage {stages - 1} waits {rows[-1].count(None)} of {len(rows[-1])} slots; it need not wait more than {stages - 1}"
    return None


@_grader
def micro_batches(choose: Callable[[int, float, float], int]) -> str | None:
    """Notebook 03: choose(stages, batch_mib, budget) is the smallest n with a bubble under 10 % and 1F1B's pieces within the budget."""
    for stages, batch, budget in ((2, 4000, 4000), (4, 4000, 1000), (4, 4000, 100), (8, 1000, 10), (1, 500, 500)):
        n = choose(stages, batch, budget)
        here = f"for {stages} stages, {batch} MiB and a budget of {budget}, n = {n}"
        bubble, held = (lambda n, m=stages: (m - 1) / (n + m - 1)), (lambda n, m=stages, b=batch: b * min(m, n) / n)
        if not isinstance(n, int) or n < 1:
            return f"{here}: it should be a whole number from 1 on"
        if bubble(n) >= 0.1:
            return f"{here}: the bubble is {bubble(n):.0%}, not under 10 %"
        if held(n) > budget:
            return f"{here}: a stage holds {held(n):,.0f} MiB"
        if n > 1 and bubble(n - 1) < 0.1 and held(n - 1) <= budget:
            return f"{here}: right, but {n - 1} would do, and needs fewer launches"
    return None


@_grader
def exchanged(worker: Callable[[], list]) -> str | None:
    """Notebook 03: in two processes, each rank returns [the other's rank] * 2, within three seconds."""
    try:
        found = launch(worker, nprocs=2, timeout=3)
    except WorkerError as error:
        if error.rank is None:
            waits = [line.split(", which ")[-1] for line in str(error).splitlines()[1:]]
            return f"after 3 seconds rank 0 {waits[0]} and rank 1 {waits[-1]}: who sends first?"
        return f"rank {error.rank} raised {str(error).splitlines()[-1]}"
    if found != [[1.0, 1.0], [0.0, 0.0]]:
        return (
            f"it ends, but returns {found[0]} on rank 0 and {found[1]} on rank 1; each should have the other's number"
        )
    return None


@_grader
def shards(shard: Callable[[int, int, int], list[int]]) -> str | None:
    """Notebook 04: shard(length, rank, world_size) as DistributedSampler(shuffle=False) deals samples out."""
    for length, world_size in ((8, 2), (10, 4), (7, 3), (2, 5)):
        for rank in range(world_size):
            sampler = DistributedSampler(range(length), num_replicas=world_size, rank=rank, shuffle=False)
            if list(shard(length, rank, world_size)) != list(sampler):
                got, here = list(shard(length, rank, world_size)), f"{length} samples, rank {rank} of {world_size}"
                return f"{here}: it gives {got}, DistributedSampler {list(sampler)}"
    return None


@_grader
def averages(average_gradients: Callable[[nn.Module], None]) -> str | None:
    """Notebook 04: after average_gradients(model) in each of two processes, the gradients are DDP's."""
    found = _launched(_gradients_both_ways, average_gradients)
    if isinstance(found, str):
        return found
    for rank, (own, by_ddp) in enumerate(found):
        for mine, theirs in zip(own, by_ddp, strict=True):
            if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6):
                ratio = float(mine.norm() / theirs.norm())
                return f"on rank {rank} a gradient is {ratio:.2f} times as long as DDP's"
    return None


@_grader
def stays_together(train: Callable[[nn.Module, list], None]) -> str | None:
    """Notebook 04: train(model, batches) in two processes leaves the same weights on both, and those of DDP."""
    found = _launched(_weights_after, train)
    if isinstance(found, str):
        return found
    (first, right), (second, _) = found
    apart = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
    if apart > 1e-6:
        return f"after 20 steps the weights of the two ranks differ by up to {apart:.2f}: who averages the gradients?"
    if not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(first, right, strict=True)):
        return (
            "the ranks agree with each other, but not with DDP on the same batches: were all batches used, once each?"
        )
    return None


@_grader
def search_space(space: Mapping) -> str | None:
    """Notebook 05: lr log-uniform from 1e-4 to 0.1, batch_size one of 16, 32, 64, dropout uniform from 0 to 0.5; judged by drawing."""
    if set(space) != {"lr", "batch_size", "dropout"}:
        return f"it has {sorted(space)}, and should have batch_size, dropout, lr"
    try:
        drawn = {name: sorted(domain.sample(size=2000, random_state=0)) for name, domain in space.items()}
    except AttributeError:
        return "each entry should be something of tune's that can be drawn from, such as tune.uniform(0, 1)"
    for name, (low, middle, high) in {"lr": (1e-4, 10**-2.5, 0.1), "dropout": (0, 0.25, 0.5)}.items():
        first, median, last = drawn[name][0], drawn[name][1000], drawn[name][-1]
        if first < low or last > high or last < 0.8 * high:
            return f"{name}: 2,000 draws lie between {first:.4f} and {last:.4f}, not {low} and {high}"
        if not 0.8 * middle < median < 1.25 * middle:
            return f"{name}: half of the draws are below {median:.4f}; it should be about {middle:.4f}"
    if set(drawn["batch_size"]) != {16, 32, 64}:
        return f"batch_size: it draws {sorted(set(drawn['batch_size']))[:5]}"
    return None


@_grader
def epochs_spent(spent: Callable[[int, int, int], int]) -> str | None:
    """Notebook 05: spent(n, max_t, factor) as successive halving in step needs."""
    for n, max_t, factor in ((8, 8, 2), (12, 16, 2), (27, 9, 3), (10, 12, 4), (1, 5, 2)):
        if (got := spent(n, max_t, factor)) != (right := _halving(n, max_t, factor)):
            return f"{n} trials, at most {max_t} epochs, factor {factor}: {got} epochs; it should be {right}"
    return None


@_grader
def reduction_factor(choose: Callable[[int, int, int], int]) -> str | None:
    """Notebook 05: choose(n, max_t, budget) is the smallest factor from 2 whose halving stays within the budget."""
    for n, max_t, budget in ((12, 16, 40), (12, 16, 34), (27, 27, 75), (64, 16, 150)):
        got = choose(n, max_t, budget)
        if (needs := _halving(n, max_t, got)) > budget:
            return f"{n} trials of at most {max_t} epochs: factor {got} needs {needs}, and the budget is {budget}"
        if got > 2 and _halving(n, max_t, got - 1) <= budget:
            return f"{n} trials of at most {max_t} epochs: factor {got - 1} stays within {budget} as well"
    return None


def _halving(n: int, max_t: int, factor: int) -> int:
    spent, reached, rung = 0, 0, 1
    while reached < max_t:
        rung = min(rung, max_t)
        spent += n * (rung - reached)
        reached, rung, n = rung, rung * factor, max(1, n // factor)
    return spent


def _launched(worker: Callable, *args) -> list | str:
    """What two ranks return, or the complaint."""
    try:
        return launch(worker, *args, nprocs=2, timeout=20)
    except WorkerError as error:
        if error.rank is None:
            return "after 20 seconds they still wait for each other: do both ranks call the same collectives?"
        return f"rank {error.rank} raised {str(error).splitlines()[-1]}"


def _small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _own_batches(count: int) -> list:
    draw = torch.Generator().manual_seed(dist.get_rank())
    return [(torch.randn(16, 8, generator=draw), torch.randint(4, (16,), generator=draw)) for _ in range(count)]


def _gradients_both_ways(average_gradients: Callable) -> tuple[list, list]:
    ((x, y),) = _own_batches(1)
    model, wrapped = _small_model(), DistributedDataParallel(_small_model())
    for network in (model, wrapped):
        nn.functional.cross_entropy(network(x), y).backward()
    average_gradients(model)
    return [p.grad for p in model.parameters()], [p.grad for p in wrapped.parameters()]


def _weights_after(train: Callable) -> tuple[list, list]:
    model, wrapped = _small_model(), DistributedDataParallel(_small_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for x, y in _own_batches(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    train(model, _own_batches(20))
    return [[p.detach() for p in network.parameters()] for network in (model, wrapped)]


def _equal(a, b) -> bool:
    """Two nested states (dicts, lists, tensors, plain values), number by number."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b
