"""Random programs on virtual GPUs, written by hypothesis: placements, views, in-place operations, deletions, backward passes.

Each runs twice, on two virtual GPUs and on the CPU alone. Numbers must be the CPU's to the last bit; places must be those that a
list of our own says; bytes must be those of an independent count, over the storages of the CPU's program. What one of them
refuses, both must.

    HYPOTHESIS_PROFILE=deep pytest tests/virtualgpu/engine/test_fuzz.py        25 times as many programs
"""

import contextlib

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import event, given, settings

import virtualgpu

CAPACITY = 48 << 20  # bytes; a large tensor of the program is up to 12 MiB
PLACES = st.sampled_from(["cpu", "cuda:0", "cuda:1"])

MAKE = {
    "arange": lambda n, device: torch.arange(n, device=device).float() / 7,
    "ones": lambda n, device: torch.ones(n, 3, device=device),
    "moved": lambda n, device: torch.linspace(-2, 2, 2 * n).view(n, 2).to(device),
    "integers": lambda n, device: torch.arange(n, device=device),
    "half": lambda n, device: torch.linspace(-1, 1, n, dtype=torch.float16).to(device),
    "nothing": lambda n, device: torch.empty(0, device=device),
    "new_full": lambda n, device: torch.zeros(1, device=device).new_full((n, 2), 0.5),
}
VIEW = {
    "every second": lambda t: t[::2],
    "transposed": lambda t: t.t() if t.dim() == 2 else t.view(-1),
    "flat": lambda t: t.reshape(-1),
    "narrow": lambda t: t.narrow(0, 0, 1),
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "last": lambda t: t.chunk(2)[-1],
    "diagonal": lambda t: t.diagonal(),
    "itself": lambda t: t.to(t.device),
    "contiguous": lambda t: t.contiguous(),
    "detached": lambda t: t.detach(),
}
NEW = {
    "twice": lambda t: t * 2,
    "sine": lambda t: t.float().sin(),
    "sum": lambda t: t.sum(),
    "sorted": lambda t: t.sort(0).values,
    "cat": lambda t: torch.cat([t, t]),
    "double": lambda t: t.double(),
    "gram": lambda t: t.float() @ t.float().t(),
    "mask": lambda t: t[t > 0],
    "cumsum": lambda t: t.cumsum(0),
    "softmax": lambda t: t.float().softmax(-1),
    "like": lambda t: torch.zeros_like(t),
    "number": lambda t: t.new_tensor(t.sum().item()),
}
INPLACE = {
    "add": lambda t: t.add_(1),
    "first": lambda t: t[0].fill_(3),
    "item": lambda t: t.__setitem__(slice(0, 1), 2),
    "zero": lambda t: t.zero_(),
    "relu": lambda t: t.relu_(),
    "clamp": lambda t: torch.clamp(t, 0, 1, out=t),
    "resize": lambda t: t.data.resize_(5),
}
TWO = {
    "plus sum": lambda a, b: a + b.sum(),
    "times": lambda a, b: a * b,
    "cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "where": lambda a, b: torch.where(a > 0, a, b.sum()),
    "copied over": lambda a, b: a.copy_(b),
    "added in": lambda a, b: a.add_(b.sum()),
    "stack": lambda a, b: torch.stack([a.sum(), b.sum()]),
}
LOSS = {
    "linear": lambda a: torch.nn.functional.linear(a, a[:1]).relu().sum(),
    "norm": lambda a: (a.exp().clamp(max=3) * a).norm(),
    "across": lambda a: a.sum(0).to("cpu").square().sum(),
}


class Pair:
    """A tensor of the program on virtual GPUs, its twin on the CPU, and where ours must be."""

    def __init__(self, ours, twin, place):
        self.ours, self.twin, self.place = ours, twin, place


class Program:
    """The tensors of one random program, and the checks after each of its steps."""

    def __init__(self):
        self.live: list[Pair] = []

    def pick(self, number: int) -> Pair:
        if not self.live:
            self.make("ones", number, "cuda:0")
        return self.live[number % len(self.live)]

    def keep(self, ours, twin, place) -> None:
        if ours.dim() < 5:  # expanded over and over, it would grow without end
            self.live.append(Pair(ours, twin, place))

    def both(self, function, pairs, place, keep=True) -> None:
        """The function on our tensors and on the twins; where the CPU refuses, so must we."""
        try:
            twin = function(*(pair.twin for pair in pairs))
        except (RuntimeError, IndexError) as error:
            event("refused by both")
            with pytest.raises(type(error)):
                function(*(pair.ours for pair in pairs))
            return
        ours = function(*(pair.ours for pair in pairs))
        if keep:
            self.keep(ours, twin, place)

    def make(self, how, number, place):
        self.keep(MAKE[how](number, place), MAKE[how](number, "cpu"), place)

    def make_large(self, number, place):
        nbytes, before = 60_000 * number, requested(place)
        try:
            ours = torch.zeros(nbytes, dtype=torch.int8, device=place)
        except torch.OutOfMemoryError:
            event("out of memory")
            assert requested(place) == before and place != "cpu"
        else:
            assert place == "cpu" or before + nbytes <= CAPACITY
            self.keep(ours, torch.zeros(nbytes, dtype=torch.int8), place)

    def view(self, how, a):
        self.both(VIEW[how], [a], a.place)

    def compute(self, how, a):
        self.both(NEW[how], [small(a)], a.place)

    def change(self, how, a):
        self.both(INPLACE[how], [a], a.place, keep=False)

    def combine(self, how, a, b):
        number = any(t.place == "cpu" and t.twin.dim() == 0 for t in (a, b))  # goes with any GPU's tensor
        if a.place == b.place or how == "copied over":
            self.both(TWO[how], [small(a), small(b)], a.place)
        elif not number and not (how in SUMMED and b.place == "cpu"):
            event("refused: two places")
            with pytest.raises(RuntimeError, match=r"same device|at least two devices"):
                TWO[how](small(a).ours, small(b).ours)

    def move(self, a, place):
        ours = a.ours.to(place)
        self.keep(ours, a.twin if place == a.place else a.twin.clone(), place)

    def backward(self, how, a):
        """A graph of its own: when it is done, only the gradient stays."""
        if a.twin.dim() == 2 and 0 < a.twin.numel() < 10_000:
            ours, twin = (t.float().clone().requires_grad_() for t in (a.ours, a.twin))
            LOSS[how](ours).backward()
            LOSS[how](twin).backward()
            event("backward")
            self.keep(ours.grad, twin.grad, a.place)

    def step(self, what, how, first, second, place):
        try:
            if what == "make":
                self.make(how, first, place)
            elif what == "make_large":
                self.make_large(first, place)
            elif what == "delete":
                self.live.remove(self.pick(first))
            elif what == "empty_cache":
                torch.cuda.empty_cache()
            elif what == "move":
                self.move(self.pick(first), place)
            elif what == "combine":
                self.combine(how, self.pick(first), self.pick(second))
            else:
                getattr(self, what)(how, self.pick(first))
        except torch.OutOfMemoryError:  # then nothing has changed, as the check sees
            event("out of memory")

    def check(self):
        """Numbers and places of each tensor; bytes: each storage of the twins once, where its tensor must be."""
        for a in self.live:
            assert str(a.ours.device) == a.place
            assert a.ours.shape == a.twin.shape and a.ours.stride() == a.twin.stride() and a.ours.dtype == a.twin.dtype
            assert torch.equal(a.ours.cpu().nan_to_num(), a.twin.nan_to_num())
        storages = {(a.place, a.twin.untyped_storage()._cdata): a.twin.untyped_storage().nbytes() for a in self.live}
        for index in range(2):
            sizes = [size for (place, _), size in storages.items() if place == f"cuda:{index}"]
            blocks, allocated = sum(-(-size // 512) * 512 for size in sizes), torch.cuda.memory_allocated(index)
            assert requested(index) == sum(sizes)
            assert blocks <= allocated <= torch.cuda.memory_reserved(index) <= CAPACITY
            if all(size <= 1 << 20 for size in sizes):  # a larger one may keep a rest that is not worth splitting off
                assert allocated == blocks


SUMMED = ("plus sum", "added in", "where")  # of b a number only
STEPS = [*(("make", how) for how in MAKE), *(("view", how) for how in VIEW), *(("compute", how) for how in NEW),
         *(("change", how) for how in INPLACE), *(("combine", how) for how in TWO), *(("backward", how) for how in LOSS),
         *[("move", ""), ("delete", ""), ("make_large", "")] * 4, ("empty_cache", "")]  # fmt: skip
NUMBERS = st.integers(1, 300)


@pytest.mark.judge
@settings(max_examples=settings.default.max_examples // 2)  # each has some thirty steps
@given(st.lists(st.tuples(st.sampled_from(STEPS), NUMBERS, NUMBERS, PLACES), min_size=10, max_size=40))
def test_a_random_program(steps):
    with contextlib.redirect_stdout(None), virtualgpu.gpus(2, memory=CAPACITY):
        torch.cuda.init()
        program = Program()
        for (what, how), first, second, place in steps:
            program.step(what, how, first, second, place)
            program.check()


def small(pair: Pair) -> Pair:
    """Large tensors are there for memory's sake; computing with a part of them is enough."""
    if pair.twin.numel() <= 10_000:
        return pair
    return Pair(pair.ours.reshape(-1)[:100], pair.twin.reshape(-1)[:100], pair.place)


def requested(place) -> int:
    return 0 if place == "cpu" else torch.cuda.memory_stats(place)["requested_bytes.all.current"]
