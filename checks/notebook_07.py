"""The graders of notebook 07, make it fit. Both run the reader's code in processes of their own, on a virtual T4."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu
from checks.grader import alone_on_t4, grader, plain

IGNORED = -100
STEPS, ROOM = 30, 0.8  # of training with numbers; of a T4's memory
LOWER = 0.9  # how much of Adam's fall the loss must make


@grader
def accumulates(accumulate: Callable) -> str | None:
    """accumulate(net, x, y, size) leaves in net the gradients of the mean loss over all labels that count, returns that loss, gives
    net at most `size` texts at a time, and holds the activations of one such micro-batch alone."""
    return alone_on_t4(_accumulates_said, accumulate, ask=ENDS)


@grader
def trains_a_billion(trainer: Callable) -> str | None:
    """trainer(net) returns step(x, y), which trains all parameters of net and returns the loss: as well as Adam on a small model, and
    within four fifths of a T4 on one of 1.26 billion parameters."""
    return alone_on_t4(_billion_said, trainer, ask=ENDS, timeout=120)


ENDS = "does your code come to an end?"


def _model() -> nn.Module:
    from notebooks.figures.lesson_07 import tiny  # of the lesson alone: `import checks` does without notebooks/

    return tiny().to("cuda:0")


def _batch(texts: int, lengths: list[int] | None = None, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts, and what to predict; where `lengths` are given, labels beyond them do not count."""
    from notebooks.figures.lesson_07 import WORDS

    x = torch.randint(WORDS, (texts, length), generator=torch.Generator().manual_seed(texts))
    y = x.roll(-1, 1)
    for labels, end in zip(y, lengths or [], strict=False):
        labels[end:] = IGNORED
    return x.to("cuda:0"), y.to("cuda:0")


def _cases() -> Iterator[tuple[str, torch.Tensor, torch.Tensor, int]]:
    """In words, texts, labels, size."""
    yield "with 8 full texts", *_batch(8), 2
    yield "with 8 full texts, 3 at a time,", *_batch(8), 3
    yield "with 8 padded texts", *_batch(8, [16, 14, 10, 6, 4, 3, 2, 1]), 4
    yield "with 7 padded texts, 3 at a time,", *_batch(7, [2, 16, 9, 1, 5, 5, 12]), 3
    yield "with a micro-batch whose labels are all -100,", *_batch(6, [9, 3, 0, 0, 7, 16]), 2
    yield "with fewer texts than size,", *_batch(3, [16, 2, 5]), 8


def _accumulates_said(accumulate: Callable) -> str | None:
    try:
        for words, x, y, size in _cases():
            if complaint := _accumulation_complaint(accumulate, x, y, size):
                return f"{words} {complaint}"
        return _held_complaint(accumulate)
    except Exception as error:
        return f"your code raised {type(error).__name__}: {str(error).split('. ')[0]}"


def _accumulation_complaint(accumulate: Callable, x: torch.Tensor, y: torch.Tensor, size: int) -> str | None:
    """Beside the whole batch: how many texts at a time, gradients, loss."""
    whole, net, most = _model(), _model(), []
    expected = F.cross_entropy(whole(x), y.flatten())
    expected.backward()
    net.words.register_forward_pre_hook(lambda _, args: most.append(len(args[0])))
    loss = accumulate(net, x.clone(), y.clone(), size)
    if max(most, default=0) > size:
        return f"net is given {max(most)} texts at once: at most size={size} are wanted"
    if any(p.grad is None for p in net.parameters()):
        return "some parameters have no gradient: call backward() for every micro-batch, and leave zero_grad() to the caller"
    got, wanted = (torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (net, whole))
    if got.isnan().any():
        return "the gradients are nan: is anything divided by a number of labels that may be zero?"
    off = float((got - wanted).norm() / wanted.norm())
    if off > 1e-3:
        ratio = float(got.norm() / wanted.norm())
        longer = f", {ratio:.2f} times as long" if not 0.8 < ratio < 1.25 else ""
        return f"the gradients are {off:.0%} off those of the whole batch{longer}: over which labels is the mean?"
    loss = plain(loss)
    if not isinstance(loss, (int, float)) or not math.isclose(loss, expected.item(), rel_tol=1e-3):
        return f"the gradients are right; the loss should be {expected.item():.4f}, and it returned {loss!r}"
    return None


def _held_complaint(accumulate: Callable) -> str | None:
    """Bytes beside the model at the peak, and those of the plainest right way."""
    x, y = _batch(48, [64, 40, 3] * 16, length=64)
    needed, found = (_bytes_held(run, x, y) for run in (_plainest, accumulate))
    if found > 1.6 * needed:
        return (
            f"right gradients, but the peak is {found / needed:.1f} times that of one micro-batch at a time: "
            "what keeps the activations of the others?"
        )
    return None


def _plainest(net: nn.Module, x: torch.Tensor, y: torch.Tensor, size: int) -> None:
    for xs, ys in zip(x.split(size), y.split(size), strict=True):
        (F.cross_entropy(net(xs), ys.flatten(), reduction="sum") / (y != IGNORED).sum()).backward()


def _bytes_held(run: Callable, x: torch.Tensor, y: torch.Tensor) -> int:
    net = _model()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(net, x, y, 4)
    return torch.cuda.max_memory_allocated() - before


def _billion_said(trainer: Callable) -> str | None:
    try:
        if complaint := _learning_complaint(trainer):
            return complaint
        with warnings.catch_warnings(), virtualgpu.dry_run(1, like="T4"):
            warnings.simplefilter("ignore")  # what a dry run says of a value that is read
            return _room_complaint(trainer)
    except Exception as error:
        return f"your code raised {type(error).__name__}: {str(error).split('. ')[0]}"


def _learning_complaint(trainer: Callable) -> str | None:
    """With numbers: does every parameter move, and does the loss fall as with Adam?"""
    x, y = _batch(8)
    net = _model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    step = trainer(net)
    if not callable(step):
        return f"trainer returns {type(step).__name__}: a function step(x, y) is wanted"
    losses = [plain(step(x, y)) for _ in range(STEPS)]
    if any(not isinstance(loss, (int, float)) for loss in losses):
        return f"step returned {losses[0]!r}: the loss of the batch is wanted"
    with torch.no_grad():
        first, last = losses[0], F.cross_entropy(net(x).float(), y.flatten()).item()
    after: Mapping[str, torch.Tensor] = dict(net.named_parameters())
    for name, value in before.items():
        if name not in after or torch.equal(after[name].detach().float(), value):
            return f"{name} has not moved in {STEPS} steps: all parameters are to train"
    at_first, adams = _by_adam(x, y)
    if not math.isclose(first, at_first, rel_tol=0.02):
        return f"the first step returns a loss of {first:.3f}; this model's is {at_first:.3f}"
    if not at_first - last >= LOWER * (at_first - adams):
        return f"{STEPS} steps bring the loss from {at_first:.2f} to {last:.2f}; with Adam it comes to {adams:.2f}"
    return None


def _by_adam(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Its loss before the first and after the last step."""
    net = _model()
    optimizer, losses = torch.optim.Adam(net.parameters()), []
    for _ in range(STEPS + 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y.flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1]


def _room_complaint(trainer: Callable) -> str | None:
    """Without numbers: bytes reserved over two steps. The model is made outside of them."""
    from notebooks.figures.lesson_07 import SIZES, Model

    budget = ROOM * torch.cuda.get_device_properties(0).total_memory / 2**30
    try:
        with torch.device("cuda"):
            net, text = Model(**SIZES["1.26 billion"]), torch.zeros(1, 512, dtype=torch.long)
        step = trainer(net)
        for _ in range(2):
            step(text, text)
    except torch.OutOfMemoryError:
        return f"it learns, but 1.26 billion parameters run out of a T4's memory: {budget:.1f} GiB are wanted at most"
    peak = torch.cuda.max_memory_reserved() / 2**30
    if peak > budget:
        return f"it learns, and 1.26 billion parameters take {peak:.1f} GiB: at most {budget:.1f} are wanted. What do you keep of each parameter?"
    return None
