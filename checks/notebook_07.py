"""The graders of notebook 07, make it fit. Both run the reader's code in processes of its own: an endless loop ends with them."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

import virtualgpu
from checks.grader import Computing, alone, grader
from checks.notebook_06 import no_room
from virtualgpu.session import suspended

SMALL = {"layers": 2, "dim": 64, "heads": 2, "hidden": 192, "words": 100}


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
        return no_room(torch.device("cuda", torch.cuda.current_device()))
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
            if 0.9 < ratio < 1.1:
                return f"the gradients are nearly those of the whole batch: where pieces are unequal, weigh each by its images, of {len(x)}"
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


@grader
def slims(slim: Callable, make: Callable, sizes: Mapping, budget: float, timeout: float = 60) -> str | None:
    """slim(net) leaves a model that begins as it was, learns in every block and nowhere in what was there before, and needs
    at most `budget` GiB of a T4 for a step with one text of 512 tokens."""
    return alone(_slimmed, slim, make, dict(sizes), budget, timeout=timeout)


def _slimmed(slim, make, sizes, budget) -> str | None:
    with suspended():  # the notebook's own GPUs are left alone
        return _small(slim, make) or _large(slim, make, sizes, budget)


def _small(slim, make) -> str | None:
    """With numbers, on the CPU: does it begin as it was, and who learns?"""
    torch.manual_seed(0)
    net, text = make(**SMALL), torch.randint(SMALL["words"], (2, 16))
    there = list(net.parameters())  # kept: where one is freed, a new one may get its id
    with torch.no_grad():
        before = net(text)
    slim(net)
    with torch.autocast("cpu", dtype=torch.float16):
        after = net(text)
    now = after.detach()
    apart = float((now - before).norm() / before.norm())
    if not apart < 0.25:
        return f"the model does not begin as it was: its output is {apart:.0%} off. Does what you add begin with zeros?"
    if any(p.requires_grad and any(p is old for old in there) for p in net.parameters()):
        return "parameters that were there before still train: freeze them"
    learn = [p for p in net.parameters() if p.requires_grad]
    if not learn:
        return "nothing is left that trains: add adapters"
    after.float().square().mean().backward()
    for at, block in enumerate(net.blocks):
        if not any(p.grad is not None and p.grad.any() for p in block.parameters() if p.requires_grad):
            return f"block {at} does not learn: no parameter of it gets a gradient"
    return None


def _large(slim, make, sizes, budget) -> str | None:
    """The peak of a T4, of a second step, and without numbers. It has more memory here: the model is made whole, then slimmed."""
    with virtualgpu.dry_run(1, like="T4", memory="64 GB"):
        with torch.device("cuda"):
            net = make(**sizes)
        slim(net)
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
        text = torch.zeros(1, 512, dtype=torch.long, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(net(text).flatten(0, 1), text.flatten())
            loss.backward()
            optimizer.step()
        peak = torch.cuda.max_memory_allocated() / 2**30
    if peak > budget:
        return f"it begins as it was, and every block learns; the peak is {peak:.1f} GiB, and the budget {budget:.1f}. What holds the rest?"
    return None
