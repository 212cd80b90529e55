"""The graders of notebook 02: a skip over the cut, and a model that the reader splits."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

import virtualgpu
from checks.grader import Computing, grader, launched_on_gpus


@grader
def skip_repaired(make: Callable[[], nn.Module]) -> str | None:
    """A model of `below` on cuda:0 and `above` on cuda:1 computes above(relu(below(x))) + x there, and trains."""
    found = launched_on_gpus(_skip_said, make, nprocs=1, gpus=2, ask="does your forward end?")
    return found if isinstance(found, str) else found[0]


def _skip_said(make: Callable[[], nn.Module]) -> str | None:
    try:
        return _skip_complaint(make)
    except Exception as error:
        return f"your code raised {type(error).__name__}: {error}"


def _skip_complaint(make: Callable[[], nn.Module]) -> str | None:
    model = make()
    x = torch.randn(4, 16, device="cuda:0", requires_grad=True)
    with Computing() as computing:
        out = model(x)
    places = [str(layer.weight.device) for layer in (model.below, model.above)]
    if places != ["cuda:0", "cuda:1"]:
        return f"the layers should stay on cuda:0 and cuda:1; they are on {places[0]} and {places[1]}"
    plain = [copy.deepcopy(layer).to("cpu") for layer in (model.below, model.above)]
    plain_x = x.detach().cpu().requires_grad_()
    expected = plain[1](torch.relu(plain[0](plain_x))) + plain_x
    if out.shape != expected.shape or not torch.allclose(out.detach().cpu(), expected, atol=1e-5):
        return "it runs, but the numbers are not those of above(relu(below(x))) + x"
    if not out.requires_grad:
        return "the numbers are right, but backward cannot go through them: was something detached, or under no_grad?"
    out.sum().backward()
    expected.sum().backward()
    for name, mine, theirs in [("x", x, plain_x), *_parameters(model, plain)]:
        if mine.grad is None or not torch.allclose(mine.grad.cpu(), theirs.grad, atol=1e-5):
            what = "no gradient arrives at" if mine.grad is None else "another gradient arrives than without GPUs at"
            return f"the numbers are right, but {what} {name}: was something detached on the way?"
    if astray := sorted({str(out.device), *computing.places} - set(places)):
        return f"numbers and gradients are right, but {astray[0]} computes: let each GPU work on what it holds"
    if idle := sorted(set(places) - computing.places):
        return f"numbers and gradients are right, but {idle[0]} computes nothing: let the activations travel, not the weights"
    return None


def _parameters(model: nn.Module, plain: list[nn.Module]) -> list[tuple]:
    """(name, the model's, the plain one's) of each parameter."""
    return [
        (f"{name}.{part}", getattr(getattr(model, name), part), getattr(layer, part))
        for name, layer in zip(("below", "above"), plain, strict=True)
        for part in ("weight", "bias")
    ]


@grader
def split_in_two(
    make: Callable[[], nn.Module], plain: Callable[[], nn.Module], shape: Sequence[int], memory: str
) -> str | None:
    """make() is plain() on two GPUs: the same names, outputs and gradients; and a step on inputs of `shape` fits into two
    GPUs of `memory`."""
    case, ask = (make, plain, tuple(shape), memory), "does your forward end?"
    results = launched_on_gpus(_split_said, *case, nprocs=1, gpus=2, timeout=60, ask=ask)
    return results if isinstance(results, str) else results[0]


def _split_said(make: Callable, plain: Callable, shape: tuple[int, ...], memory: str) -> str | None:
    try:
        return _split_complaint(make(), plain(), shape) or _memory_complaint(make, shape, memory)
    except Exception as error:
        return f"your code raised {type(error).__name__}: {error}"


def _split_complaint(model: nn.Module, whole: nn.Module, shape: tuple[int, ...]) -> str | None:
    twice = [name for name in model.state_dict() if name not in whole.state_dict()]
    if twice:
        return f"its state_dict has the name {twice[0]}, which the plain model has not: register no layer a second time"
    places = {name: str(parameter.device) for name, parameter in model.named_parameters()}
    if left := [name for name, place in places.items() if not place.startswith("cuda")]:
        return f"{left[0]} is still on the CPU"
    model.load_state_dict(whole.state_dict())
    x = torch.randn(2, *shape[1:-2], 16, 16)
    with Computing() as computing:
        out = model(x.to("cuda:0"))
    if moved := [name for name, parameter in model.named_parameters() if str(parameter.device) != places[name]]:
        return f"{moved[0]} was moved in forward: let the activations travel, not the weights"
    expected = whole(x)
    if out.shape != expected.shape or not torch.allclose(out.detach().cpu(), expected, atol=1e-4):
        return "it runs, but its outputs are not the plain model's"
    if not out.requires_grad:
        return "the outputs are right, but backward cannot go through them: was something detached, or under no_grad?"
    out.square().sum().backward()
    expected.square().sum().backward()
    for (name, theirs), mine in zip(whole.named_parameters(), model.parameters(), strict=True):
        if mine.grad is None or not torch.allclose(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4):
            return f"the outputs are right, but not the gradient of {name}: was something detached on the way?"
    if astray := sorted(computing.places - {"cuda:0", "cuda:1"}):
        return f"outputs and gradients are right, but {astray[0]} computes: let each GPU work on what it holds"
    return None


def _memory_complaint(make: Callable, shape: tuple[int, ...], memory: str) -> str | None:
    """A step of training in a dry run, on GPUs of that size."""
    virtualgpu.reset()
    with virtualgpu.dry_run(2, like="T4", memory=memory):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            model(torch.zeros(shape, device="cuda:0")).square().mean().backward()
            optimizer.step()
        except torch.OutOfMemoryError as error:
            full = 0 if "GPU 0" in str(error) else 1
            other = torch.cuda.max_memory_allocated(1 - full) / 2**20
            what = f"and cuda:{1 - full} has held {other:,.0f} MiB so far: move work to it"
            return f"{shape[0]} images do not fit into two GPUs of {memory}: cuda:{full} is full, {what}"
        if not all(torch.cuda.max_memory_allocated(gpu) for gpu in range(2)):
            return "it fits on one GPU, and the other does nothing"
    return None
