"""The graders of notebook 06: out of memory."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from checks.grader import grader


def riddle(device: torch.device, iterations: int = 12) -> dict[str, list[float]]:
    """Four short runs on the GPU: {name: MiB in tensors at the end of each iteration}. checks.causes knows the answers."""
    runs = {"A": _keep_graphs, "B": _step_every_fourth, "C": _longer_inputs, "D": _keep_outputs}
    curves = {}
    for name, run in runs.items():
        before = torch.cuda.memory_allocated(device)
        curves[name] = [(torch.cuda.memory_allocated(device) - before) / 2**20 for _ in run(device, iterations)]
    return curves


def _keep_graphs(device, iterations) -> Iterator[None]:
    net, total = nn.Linear(256, 256, device=device), 0
    for _ in range(iterations):
        total = total + net(torch.ones(2048, 256, device=device)).square().sum()
        yield


def _step_every_fourth(device, iterations) -> Iterator[None]:
    net = nn.Linear(1536, 1536, device=device)
    optimizer = torch.optim.Adam(net.parameters())
    for iteration in range(1, iterations + 1):
        net(torch.ones(1, 1536, device=device)).sum().backward()
        if iteration % 4 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        yield


def _longer_inputs(device, iterations) -> Iterator[None]:
    net = nn.Linear(256, 256, device=device)
    for iteration in range(iterations):
        length = 1 + iteration % (iterations // 2)
        hidden = net(torch.ones(2048 * length, 256, device=device))
        hidden.sum().backward()
        yield


def _keep_outputs(device, iterations) -> Iterator[None]:
    net, kept = nn.Linear(256, 64, device=device), []
    for _ in range(iterations):
        kept.append(net(torch.ones(2048, 256, device=device)).detach())
        yield


@grader
def causes(answer: Mapping[str, str], curves: Mapping[str, list[float]]) -> str | None:
    """which cause each memory curve (MiB an iteration) has; says what to look at in the first that is wrong."""
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


@grader
def within_budget(step: Callable, make_net: Callable, x: torch.Tensor, y: torch.Tensor, budget: int) -> str | None:
    """step(net, x, y) leaves the gradients of the mean loss over the whole batch in net, returns that loss, and needs
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
