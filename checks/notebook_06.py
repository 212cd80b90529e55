"""The graders of notebook 06: out of memory. Both run the reader's code in processes of its own: an endless loop ends with them."""

import gc
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from checks.grader import Computing, NoRoom, alone, grader

ITERATIONS = 12
Runs = list[tuple[str, list[float], float]]  # the cause, MiB in tensors after each iteration, MiB of one output


def riddle(device: torch.device) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Four short runs on the GPU: {name: MiB in tensors at the end of each iteration}, and {name: MiB of the network's output of
    one iteration}."""
    runs = _runs(device, random.Random(3), 1)
    names = "ABCD"[: len(runs)]
    return (
        {name: curve for name, (_, curve, _) in zip(names, runs, strict=True)},
        {name: output for name, (_, _, output) in zip(names, runs, strict=True)},
    )


def _runs(device: torch.device, draw: random.Random, each: int) -> Runs:
    """So many runs of each cause, shuffled, their sizes drawn: no cause has a size of its own."""
    causes = [cause for cause in SITUATIONS for _ in range(each)]
    draw.shuffle(causes)
    gc.collect()  # what a cell above left would go in the middle of a curve
    try:
        return [(cause, *_watched(SITUATIONS[cause](device, draw), device)) for cause in causes]
    except torch.OutOfMemoryError:
        pass  # outside: the error has let go of what it kept
    raise NoRoom(_no_room(device))


def _watched(run: Iterator[float], device: torch.device) -> tuple[list[float], float]:
    before = torch.cuda.memory_allocated(device)
    curve, output = [], 0.0
    for output in run:  # noqa: B007 - the last one is as large as the others, or larger
        curve.append((torch.cuda.memory_allocated(device) - before) / 2**20)
    return curve, output


def _no_room(device: torch.device) -> str:
    """Who holds the GPU, before the reader's code has begun."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{(total - free) / 2**20:,.0f} of the GPU's {total / 2**20:,.0f} MiB are taken before your code begins, and the grader "
        "finds no room. Did a cell end in an error? It keeps what it held: run the cell of section 11 that forgets it "
        "(helpers.forget_error() does the same), `del` what you have named, then run this cell again"
    )


def _keep_graphs(device, draw) -> Iterator[float]:
    rows, width = draw.choice([512, 1024, 2048]), draw.choice([128, 256])
    net, total = nn.Linear(256, width, device=device), 0
    for _ in range(ITERATIONS):
        output = net(torch.ones(rows, 256, device=device))
        total = total + output.square().sum()
        yield _mib(output)


def _step_every_few(device, draw) -> Iterator[float]:
    width, every = draw.choice([768, 1024, 1280, 1536]), draw.choice([2, 3, 4, 5])
    net = nn.Linear(width, width, device=device)
    optimizer = torch.optim.Adam(net.parameters())
    for iteration in range(1, ITERATIONS + 1):
        output = net(torch.ones(1, width, device=device))
        output.sum().backward()
        if iteration % every == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        yield _mib(output)


def _longer_inputs(device, draw) -> Iterator[float]:
    rows, period = draw.choice([1024, 2048]), draw.choice([3, 4, 6])
    net = nn.Linear(256, 256, device=device)
    for iteration in range(ITERATIONS):
        output = net(torch.ones(rows * (1 + iteration % period), 256, device=device))
        output.sum().backward()
        yield _mib(output)


def _keep_outputs(device, draw) -> Iterator[float]:
    rows, width = draw.choice([1024, 2048, 4096]), draw.choice([64, 128, 256])
    net, kept = nn.Linear(64, width, device=device), []
    for _ in range(ITERATIONS):
        kept.append(net(torch.ones(rows, 64, device=device)).detach())
        yield _mib(kept[-1])


SITUATIONS: dict[str, Callable[..., Iterator[float]]] = {
    "graph kept": _keep_graphs,
    "optimizer state": _step_every_few,
    "longer inputs": _longer_inputs,
    "outputs kept": _keep_outputs,
}


def _mib(tensor: torch.Tensor) -> float:
    return tensor.nbytes / 2**20


@grader
def causes(cause: Callable, device: torch.device, timeout: float = 20) -> str | None:
    """cause(curve, output) names what each of 16 runs has, of all four causes and of sizes that are drawn; says how many are
    right, and describes one that is not."""
    runs = _runs(device, random.Random(60), 4)
    said = alone(_named, cause, [(curve, output) for _, curve, output in runs], timeout=timeout)
    if isinstance(said, str):
        return said
    wrong = [(name, *run) for name, run in zip(said, runs, strict=True) if name != run[0]]
    if not wrong:
        return None
    if unknown := [name for name, *_ in wrong if name not in SITUATIONS]:
        return f"it returns {unknown[0]!r}; the names are {sorted(SITUATIONS)}"
    name, _, curve, output = wrong[0]
    return f"it names {len(runs) - len(wrong)} of {len(runs)} runs. One that it takes for {name!r}: {_described(curve, output)}"


def _described(curve: Sequence[float], output: float) -> str:
    steps = [after - before for before, after in itertools.pairwise(curve)]
    grown = sum(step > 0.01 for step in steps)
    return (
        f"it starts at {curve[0]:.1f} MiB, grows in {grown} of {len(steps)} iterations, by {max(steps):.2f} MiB at most, and "
        f"{'falls' if min(steps) < -0.01 else 'never falls'}; one output has {output:.2f} MiB"
    )


def _named(cause: Callable, runs: Sequence[tuple[list[float], float]]) -> list[str] | str:
    try:
        return [cause(list(curve), output) for curve, output in runs]
    except Exception as error:
        return f"your code raised {type(error).__name__}: {error}"


@grader
def within_budget(
    step: Callable, make_net: Callable, x: torch.Tensor, y: torch.Tensor, budget: int, timeout: float = 30
) -> str | None:
    """step(net, x, y) leaves the gradients of the mean loss over the whole batch in net, returns that loss, and needs
    at most `budget` bytes for network and step, on the GPU of the net."""
    torch.cuda.empty_cache()  # the process that does it shares the GPU
    return alone(_trained, step, make_net, x, y, budget, timeout=timeout)


def _trained(step, make_net, x, y, budget) -> str | None:
    try:
        wanted, expected, device = _by_the_whole_batch(make_net, x, y)
        torch.empty(2 * budget, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        device = None
    if device is None:  # outside: the error has let go of what it kept
        return _no_room(torch.device("cuda", torch.cuda.current_device()))
    statistics = torch.cuda.max_memory_allocated  # by this name, whatever the step makes of the other
    try:
        got, loss, peak, places = _measured(step, make_net, x.to(device), y.to(device), device, statistics)
        forged = _forged(step, make_net, x.to(device), y.to(device), device, budget, statistics)
    except Exception as error:
        return f"your code raised {type(error).__name__}: {str(error).split('. ')[0]}"
    if any(gradient is None for gradient in got):
        return "some parameters have no gradient: call backward() on every part, and leave zero_grad() to the caller"
    for found, want in zip(got, wanted, strict=True):
        if not torch.allclose(found, want, rtol=1e-3, atol=1e-5):
            ratio = float(found.norm() / want.norm())
            return f"the gradients are not those of the whole batch: {ratio:.2f} times as long. The mean is over {len(x)} images"
    if loss is None or not math.isclose(float(loss), expected, rel_tol=1e-3):
        return f"gradients are right; the loss should be {expected:.4f}, and it returned {loss!r}"
    if elsewhere := places - {str(device)}:
        return f"right gradients, computed on {', '.join(sorted(elsewhere))}: the task is to stay on {device}"
    if forged:
        return "right gradients, but the peak was reset within the step: leave the statistics to the grader"
    if peak > budget:
        return f"right gradients, and a peak of {peak / 2**20:.1f} MiB: the budget is {budget / 2**20:.1f}"
    return None


def _by_the_whole_batch(make_net, x, y) -> tuple[list[torch.Tensor], float, torch.device]:
    """Gradients and loss that are wanted, and the GPU of the net."""
    net = make_net()
    device = next(net.parameters()).device
    loss = nn.functional.cross_entropy(net(x.to(device)), y.to(device))
    loss.backward()
    return [p.grad.cpu() for p in net.parameters()], loss.item(), device


def _measured(step, make_net, x, y, device, statistics) -> tuple[list, float | None, int, set[str]]:
    """Gradients, the loss returned, bytes of the peak, and where the step computes."""
    before = torch.cuda.memory_allocated(device)
    net = make_net()
    torch.cuda.reset_peak_memory_stats(device)
    with Computing() as computing:
        loss = step(net, x, y)
    peak = statistics(device) - before
    return [None if p.grad is None else p.grad.cpu() for p in net.parameters()], loss, peak, computing.places


def _forged(step, make_net, x, y, device, budget, statistics) -> bool:
    """Does the step reset the peak? It starts from one that is twice the budget, and which only a reset lowers."""
    net = make_net()
    torch.empty(2 * budget, dtype=torch.uint8, device=device)  # gone at once; its peak stays
    peak = statistics(device)
    step(net, x, y)
    return statistics(device) < peak
