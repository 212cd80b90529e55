"""The graders of notebook 07, make it fit: accumulation that is exact, and 1.26 billion parameters on one T4."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import checks
from notebooks.figures.lesson_07 import Adam8bit
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def cross_entropy(net, x, y, **how):
    return F.cross_entropy(net(x), y.flatten(), **how)


def in_micro_batches(net, x, y, size, divisor):
    """divisor(xs, ys): what the sum of a micro-batch's losses is divided by."""
    total = 0.0
    for xs, ys in zip(x.split(size), y.split(size), strict=True):
        loss = cross_entropy(net, xs, ys, reduction="sum") / divisor(xs, ys)
        loss.backward()
        total += loss.item()
    return total


def by_counted(net, x, y, size):
    return in_micro_batches(net, x, y, size, lambda xs, ys: (y != -100).sum())


def mean_of_means(net, x, y, size):
    parts = list(zip(x.split(size), y.split(size), strict=True))
    losses = [cross_entropy(net, *part) / len(parts) for part in parts]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses)


def by_texts(net, x, y, size):
    return in_micro_batches(net, x, y, size, lambda xs, ys: y.numel())


def not_divided(net, x, y, size):
    return in_micro_batches(net, x, y, size, lambda xs, ys: (ys != -100).sum().clamp_min(1))


def weighted_means(net, x, y, size):
    """Right gradients, but where no label counts the mean is nan."""
    total = 0.0
    for xs, ys in zip(x.split(size), y.split(size), strict=True):
        loss = cross_entropy(net, xs, ys) * (ys != -100).sum() / (y != -100).sum()
        loss.backward()
        total += loss.item()
    return total


def masks_by_hand(net, x, y, size):
    """Right, but where no label counts it divides by zero."""
    total = 0.0
    for xs, ys in zip(x.split(size), y.split(size), strict=True):
        kept, scores = ys.flatten() != -100, net(xs).log_softmax(1)
        losses = -scores.gather(1, ys.flatten().clamp_min(0)[:, None])[:, 0] * kept
        loss = losses.sum() / kept.sum() * (kept.sum() / (y != -100).sum())
        loss.backward()
        total += loss.item()
    return total


def whole(net, x, y, size):
    loss = cross_entropy(net, x, y)
    loss.backward()
    return loss.item()


def one_backward(net, x, y, size):
    losses = [cross_entropy(net, xs, ys, reduction="sum") for xs, ys in zip(x.split(size), y.split(size), strict=True)]
    loss = sum(losses) / (y != -100).sum()
    loss.backward()
    return loss.item()


def without_a_loss(net, x, y, size):
    by_counted(net, x, y, size)


def the_last_loss(net, x, y, size):
    by_counted(net, x, y, size)
    return cross_entropy(net, x[-size:], y[-size:]).item()


def one_by_one_from_the_end(net, x, y, size):
    """Logarithms by hand."""
    counted, total = (y != -100).sum(), 0
    for at in reversed(range(len(x))):
        kept = y[at] != -100
        loss = -net(x[at : at + 1]).log_softmax(1)[kept, y[at][kept]].sum() / counted
        loss.backward()
        total += loss.detach()
    return total


def by_hand(net, x, y, size):
    """torch.autograd.grad, and a loss that is a tensor."""
    parameters, total = list(net.parameters()), 0
    for xs, ys in zip(x.split(size), y.split(size), strict=True):
        loss = cross_entropy(net, xs, ys, reduction="none").sum() / (y >= 0).sum()
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient if p.grad is None else p.grad + gradient
        total = total + loss.detach()
    return total


def sums_divided_at_the_end(net, x, y, size):
    counted = int((y != -100).sum())
    loss = in_micro_batches(net, x, y, size, lambda xs, ys: 1) / counted
    for p in net.parameters():
        p.grad /= counted
    return loss


def checkpointed(net, x, y, size):
    run = partial(checkpoint, net, use_reentrant=False)
    return by_counted(run, x, y, size)


@pytest.mark.parametrize("accumulate, said", [
    (mean_of_means, "with 8 full texts, 3 at a time, the gradients are ... off those of the whole batch: over which labels"),
    (by_texts, "with 8 padded texts the gradients are ... 0.44 times as long: over which labels is the mean?"),
    (not_divided, "with 8 full texts the gradients are 300% off those of the whole batch, 4.00 times as long"),
    (weighted_means, "whose labels are all -100, the gradients are right; the loss should be 5.5 ... it returned nan"),
    (masks_by_hand, "whose labels are all -100, the gradients are nan: is anything divided by"),
    (whole, "with 8 full texts net is given 8 texts at once: at most size=2 are wanted"),
    (one_backward, "right gradients, but the peak is ... times that of one micro-batch at a time"),
    (without_a_loss, "the gradients are right; the loss should be 5.5 ... it returned None"),
    (the_last_loss, "the gradients are right; the loss should be 5.5"),
    (lambda net, x, y, size: 5.4, "some parameters have no gradient"),
    (lambda net, x, y, size: net.nothing, "your code raised AttributeError"),
    (no_end, "after 60 seconds ... does your code come to an end?"),
    (by_counted, "[passed]"),
    (by_hand, "[passed]"),
    (sums_divided_at_the_end, "[passed]"),
    (checkpointed, "[passed]"),
    (one_by_one_from_the_end, "[passed]"),
])  # fmt: skip
def test_accumulates(says, accumulate, said):
    says(said, checks.accumulates, accumulate)


def trainer(net, make=Adam8bit, again=True, learn=lambda name: True):
    """An optimizer for each parameter, in backward."""
    for block in net.blocks if again else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    each = {p: make([p]) for name, p in net.named_parameters() if learn(name)}

    def update(p):
        each[p].step()
        p.grad = None

    for p in each:
        p.register_post_accumulate_grad_hook(update)

    def step(x, y):
        loss = cross_entropy(net, x, y)
        loss.backward()
        return loss

    return step


def plainly(net, make=torch.optim.Adam):
    optimizer = make(net.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = cross_entropy(net, x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def on_the_host(net):
    """Parameters and averages on the CPU, whose Adam is exact."""
    copies = {p: p.detach().cpu().clone() for p in net.parameters()}
    each = {p: torch.optim.Adam([copy]) for p, copy in copies.items()}

    def update(p):
        copies[p].grad = p.grad.cpu()
        p.grad = None
        each[p].step()
        p.data.copy_(copies[p])

    for p in copies:
        p.register_post_accumulate_grad_hook(update)
    return lambda x, y: whole(net, x, y, None)


def without_what_it_returns(net):
    step = trainer(net)
    return lambda x, y: step(x, y) and None


def blocks_alone(net):
    net.requires_grad_(False)
    net.blocks.requires_grad_(True)
    return trainer(net, learn=lambda name: name.startswith("blocks"))


sgd = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("answer, said", [
    (plainly, "it learns, but 1.26 billion parameters run out of a T4's memory: 11.8 GiB are wanted at most"),
    (partial(plainly, make=Adam8bit), "it learns, and 1.26 billion parameters take 12.7 GiB: at most 11.8 are wanted"),
    (partial(trainer, make=torch.optim.Adam), "it learns, but 1.26 billion parameters run out"),
    (partial(trainer, make=sgd), "30 steps bring the loss from ... with Adam it comes to"),
    (blocks_alone, "words.weight has not moved in 30 steps: all parameters are to train"),
    (without_what_it_returns, "step returned None: the loss of the batch is wanted"),
    (lambda net: None, "trainer returns NoneType: a function step(x, y) is wanted"),
    (lambda net: net.nothing, "your code raised AttributeError"),
    (trainer, "[passed]"),
    (partial(trainer, again=False), "[passed]"),
    (on_the_host, "[passed]"),
    (partial(trainer, make=partial(torch.optim.Adafactor, lr=0.01)), "[passed]"),
])  # fmt: skip
def test_trains_a_billion(says, answer, said):
    says(said, checks.trains_a_billion, answer)
