"""The graders of notebook 02: where to cut a model."""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

from checks.grader import grader, launched, launched_on_gpus
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
        if cut not in table:
            return f"it returned {cut!r}, which is not one of the cuts {min(table)} to {max(table)}"
        if max(table[cut]) > max(table[best]):
            where = "" if table is peaks else "right for these peaks, but not for those of another model: "
            return f"{where}at cut {cut} the fuller GPU holds {max(table[cut]):,.0f} MiB; another cut needs {max(table[best]):,.0f}"
    return None


@grader
def fastest_that_fits(choose: Callable, peaks: Mapping, times: Mapping, budget: float) -> str | None:
    """choose(peaks, times, budget) returns the fastest cut that needs no more than budget MiB on either GPU, or None."""
    given = [(table, times, budget) for table in (peaks, *_tables(peaks))] + [(peaks, times, 0)]
    found = launched(answers, choose, given, ask="does your loop end?")
    if isinstance(found, str):
        return found
    for (table, _, limit), cut in zip(given, found[0], strict=True):
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


@grader
def skip_repaired(make: Callable[[], nn.Module]) -> str | None:
    """A model of `below` on cuda:0 and `above` on cuda:1 computes above(relu(below(x))) + x, and trains."""
    found = launched_on_gpus(_skip_said, make, ask="does your forward end?")
    return found if isinstance(found, str) else found[0]


def _skip_said(make: Callable[[], nn.Module]) -> str | None:
    try:
        return _skip_complaint(make)
    except Exception as error:
        return f"your code raised {type(error).__name__}: {error}"


def _skip_complaint(make: Callable[[], nn.Module]) -> str | None:
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


def _tables(peaks: Mapping) -> list[dict]:
    """The same figures in other orders, so that an answer typed by hand does not pass."""
    generator = torch.Generator().manual_seed(0)
    pairs = list(peaks.values())
    return [
        dict(zip(peaks, [pairs[i] for i in torch.randperm(len(pairs), generator=generator)], strict=True))
        for _ in range(3)
    ]
