"""The graders of notebook 02: where to cut a model."""

import copy
import random
from collections.abc import Callable, Mapping

import torch
from torch import nn

from checks.grader import Computing, grader, launched, launched_on_gpus
from checks.notebook_03 import answers


@grader
def most_even(choose: Callable, peaks: Mapping) -> str | None:
    """choose(peaks) returns the cut whose fuller GPU is the least full; peaks: {cut: (MiB, MiB)}."""
    tables = [(table,) for table in (peaks, *_tables(peaks))]
    found = launched(answers, choose, tables, ask="does your loop end?")
    if isinstance(found, str):
        return found
    for (table,), cut in zip(tables, found[0], strict=True):
        best = min(table, key=lambda cut: max(table[cut]))
        if cut not in list(table):
            return f"it returned {cut!r}, which is not one of the cuts {min(table)} to {max(table)}"
        if max(table[cut]) > max(table[best]):
            where = "" if table is peaks else "right for these peaks, but not for those of another model: "
            return f"{where}at cut {cut} the fuller GPU holds {max(table[cut]):,.0f} MiB; another cut needs {max(table[best]):,.0f}"
    return None


@grader
def fastest_that_fits(choose: Callable, peaks: Mapping, times: Mapping, budget: float) -> str | None:
    """choose(peaks, times, budget) returns the fastest cut that needs no more than budget MiB on either GPU, or None."""
    given = [(peaks, times, budget)]
    given += [(table, _shuffled(times, seed), budget) for seed, table in enumerate(_tables(peaks), 3)]
    fullest = {cut: 1 / max(peaks[cut]) for cut in peaks}  # the fastest, where all fit: not the most even
    given += [
        (peaks, times, 0),
        (peaks, times, min(map(max, peaks.values()))),
        (peaks, fullest, max(map(max, peaks.values()))),
    ]
    found = launched(answers, choose, given, ask="does your loop end?")
    if isinstance(found, str):
        return found
    for (table, times, limit), cut in zip(given, found[0], strict=True):
        fitting = [cut for cut in table if max(table[cut]) <= limit]
        if cut is None and fitting:
            exactly = ", which needs just that" if max(table[fitting[0]]) == limit else ""
            return f"it found no cut for {limit:,.0f} MiB, but {len(fitting)} fit, cut {fitting[0]} among them{exactly}"
        if cut is not None and not fitting:
            return f"nothing fits in {limit:,.0f} MiB, and it should return None, not {cut!r}"
        if cut is not None and cut not in list(table):
            return f"it returned {cut!r}, which is not one of the cuts {min(table)} to {max(table)}"
        if cut is not None and cut not in fitting:
            return f"cut {cut} needs {max(table[cut]):,.0f} MiB on one GPU, and the budget is {limit:,.0f}"
        if cut is not None and times[cut] > min(times[c] for c in fitting):
            return f"cut {cut} fits, with {1e3 * times[cut]:.1f} ms a step; another that fits takes {1e3 * min(times[c] for c in fitting):.1f} ms"
    return None


@grader
def skip_repaired(make: Callable[[], nn.Module]) -> str | None:
    """A model of `below` on cuda:0 and `above` on cuda:1 computes above(relu(below(x))) + x there, and trains."""
    found = launched_on_gpus(_skip_said, make, ask="does your forward end?")
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


def _tables(peaks: Mapping) -> list[dict]:
    """The same figures in other orders, so that an answer typed by hand does not pass; and figures of which those that look
    best in another way (least on one GPU, least in all, even but full) are not the least full."""
    lures = [(500, 450), (600, 600), (700, 10), (10, 700)]
    made_up = [*lures, *[(800 + cut, 900) for cut in range(len(peaks))]][: len(peaks)]
    return [*[_shuffled(peaks, seed) for seed in range(3)], _shuffled(dict(zip(peaks, made_up, strict=True)))]


def _shuffled(table: Mapping, seed: int = 0) -> dict:
    """The same keys, and the same values in another order."""
    return dict(zip(table, random.Random(seed).sample(list(table.values()), len(table)), strict=True))
