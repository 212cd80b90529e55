"""The graders of notebook 11: the loop that works through a pipeline's order, with small messages and with large ones."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import checks
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")


class Runner:
    """The lesson's own way, each step of which an answer below does in another way."""

    def __init__(self):
        self.rank, self.last, self.kept, self.most = dist.get_rank(), dist.get_world_size() - 1, {}, 0

    def __call__(self, order, part, inputs, targets):
        for work in order:
            (self.forward if work[0] == "F" else self.backward)(int(work[1:]), part, inputs, targets)
        return self.most

    send, receive = staticmethod(dist.send), staticmethod(dist.recv)

    def forward(self, i, part, inputs, targets):
        x = torch.empty_like(inputs[i]) if self.rank else inputs[i]
        if self.rank:
            self.receive(x, self.rank - 1)
            x.requires_grad_()
        out = self.compute(part, x)
        if self.rank < self.last:
            self.send(out.detach(), self.rank + 1)
        else:
            out = self.loss(out, targets[i], len(inputs))
        self.kept[i] = x, out
        self.most = max(self.most, len(self.kept))

    def compute(self, part, x):
        return part(x)

    def loss(self, out, target, m):
        return F.mse_loss(out, target) / m

    def backward(self, i, part, inputs, targets):
        x, out = self.kept.pop(i)
        gradient = torch.empty_like(out) if self.rank < self.last else None
        if gradient is not None:
            self.receive(gradient, self.rank + 1)
        out.backward(gradient)
        if self.rank:
            self.send(x.grad, self.rank - 1)


def plainly(*args):
    return Runner()(*args)


class Batched(Runner):
    """A send waits for the next receive, and both go together."""

    def __init__(self):
        super().__init__()
        self.waiting = []

    def __call__(self, *args):
        most = super().__call__(*args)
        self.together()
        return most

    def together(self, *more):
        operations, self.waiting = [*self.waiting, *more], []
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def send(self, tensor, to):
        self.together()
        self.waiting.append(dist.P2POp(dist.isend, tensor, to))

    def receive(self, tensor, source):
        self.together(dist.P2POp(dist.irecv, tensor, source))


def batched(*args):
    return Batched()(*args)


class TwoGroups(Runner):
    """A communicator for each direction: its own streams."""

    def __init__(self):
        super().__init__()
        self.down, self.up = dist.new_group(), dist.new_group()

    def send(self, tensor, to):
        self.sent = [*getattr(self, "sent", []), dist.isend(tensor, to, self.down if to > self.rank else self.up)]

    def receive(self, tensor, source):
        dist.recv(tensor, source, self.down if source < self.rank else self.up)

    def __call__(self, *args):
        most = super().__call__(*args)
        for work in self.sent:
            work.wait()
        return most


def two_groups(*args):
    return TwoGroups()(*args)


def asynchronously(order, part, inputs, targets):
    sent = []

    class Asynchronous(Runner):
        def send(self, tensor, to):
            sent.append((dist.isend(tensor, to), tensor))

    most = Asynchronous()(order, part, inputs, targets)
    for work, _ in sent:
        work.wait()
    return most


def computed_again(*args):
    class Again(Runner):
        def compute(self, part, x):
            return checkpoint(part, x, use_reentrant=False)

    return Again()(*args)


def by_autograd_grad(*args):
    """Gradients by autograd.grad, added up by hand; how many were held as a tensor."""

    class Added(Runner):
        def backward(self, i, part, inputs, targets):
            x, out = self.kept.pop(i)
            gradient = torch.empty_like(out) if self.rank < self.last else None
            if gradient is not None:
                self.receive(gradient, self.rank + 1)
            parameters = list(part.parameters())
            found = torch.autograd.grad(out, [*parameters, *([x] if self.rank else [])], gradient)
            for parameter, more in zip(parameters, found, strict=False):
                parameter.grad = more if parameter.grad is None else parameter.grad + more
            if self.rank:
                self.send(found[-1], self.rank - 1)

    return torch.tensor(Added()(*args))


def stub(order, part, inputs, targets):
    return 0


def always_gpipe(order, part, inputs, targets):
    return Runner()(sorted(order, key=lambda work: work[0] == "B"), part, inputs, targets)


def sums(*args):
    class Sum(Runner):
        def loss(self, out, target, m):
            return F.mse_loss(out, target)

    return Sum()(*args)


def alone(order, part, inputs, targets):
    """Each rank with its own inputs and targets."""
    for i, x in enumerate(inputs):
        (F.mse_loss(part(x), targets[i]) / len(inputs)).backward()
    return 1


def in_turns(order, part, inputs, targets):
    """One micro-batch after the other, whatever the order says."""
    return Runner()([f"{kind}{i}" for i in range(len(inputs)) for kind in "FB"], part, inputs, targets)


def asks_for_no_gradient(*args):
    class Forgets(Runner):
        def compute(self, part, x):
            return part(x.detach())

    return Forgets()(*args)


def sends_the_wrong_way(*args):
    class Swapped(Runner):
        def send(self, tensor, to):
            dist.send(torch.ones_like(tensor), to)

    return Swapped()(*args)


def sends_no_gradient(*args):
    class Silent(Runner):
        def send(self, tensor, to):
            if to > self.rank:
                dist.send(tensor, to)

    return Silent()(*args)


def counts_nothing(*args):
    Runner()(*args)


def says_the_last(*args):
    runner = Runner()
    runner(*args)
    return len(runner.kept)


GPIPE = "with 3 stages, 4 micro-batches and the order of GPipe, "


@pytest.mark.parametrize(
    "run, said",
    [
        (stub, GPIPE + "rank 0 does nothing; its order says F F F F B B B B"),
        (always_gpipe, "and the order of 1F1B, rank 0 does F F F F B B B B; its order says F F F B F B B B"),
        (in_turns, GPIPE + "rank 0 does F B F B F B F B; its order says F F F F B B B B"),
        (sums, GPIPE + "rank 0 has gradients 4 times one GPU's: the loss is the mean over the whole batch"),
        (alone, GPIPE + "rank 0 does F B F B"),
        (asks_for_no_gradient, GPIPE + "rank 2 sends None: what it receives has a .grad only where requires_grad_() was called"),
        (sends_the_wrong_way, GPIPE + "rank 0 has other gradients than one GPU: they differ by "),
        (sends_no_gradient, "after 20 seconds rank 0 ... which message does each of them wait for"),
        (counts_nothing, GPIPE + "rank 0 returns None; it held 4 micro-batches at most"),
        (says_the_last, GPIPE + "rank 0 returns 0; it held 4"),
        (no_end, "after 20 seconds rank 0 ... in no_end"),
        (lambda *args: 1 / 0, "raised ZeroDivisionError"),
        (plainly, "[passed]"),
        (batched, "[passed]"),
        (two_groups, "[passed]"),
        (asynchronously, "[passed]"),
        (computed_again, "[passed]"),
        (by_autograd_grad, "[passed]"),
    ],
)  # fmt: skip
def test_runs_in_order(says, run, said):
    says(said, checks.runs_in_order, run)


@pytest.mark.parametrize(
    "run, said",
    [
        (plainly, "[not yet] with 3 stages, 4 micro-batches of 2 MiB and the order of 1F1B, both ranks send first, and NCCL would hang"),
        (asynchronously, "of 2 MiB and the order of 1F1B, both ranks send first, and NCCL would hang"),
        (stub, "4 micro-batches of 2 MiB and the order of GPipe, rank 0 does nothing"),
        (always_gpipe, "and the order of 1F1B, rank 0 does F F F F B B B B"),
        (sums, "gradients 4 times one GPU's"),
        (batched, "[passed]"),
        (two_groups, "[passed]"),
    ],
)  # fmt: skip
def test_runs_large(says, run, said):
    says(said, checks.runs_large, run)
