"""The graders of notebook 03: a pipeline in one process, and two schedules on paper."""

import copy
import random
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate

import torch
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

import virtualgpu
from checks.grader import grader, launched, launched_on_gpus, plain
from virtualgpu import Timeline

IMAGES, SPLIT_SIZE = 120, 20
SLOWER = 1.15  # times the shortest loop: a pipeline that copies at a bad moment takes 1.12, one that reads in each round 1.19


@grader
def keeps_both_busy(forward: Callable) -> str | None:
    """forward(first, second, x, split_size) is second(first(x)), row by row, in micro-batches of split_size rows. first and x are on cuda:0,
    second is on cuda:1, the result on cuda:0. Its training step is about as short as that of the shortest loop, on two T4s."""
    ask = "does your loop end?"
    found = launched_on_gpus(_busy_said, forward, nprocs=1, gpus=2, like="T4", timeout=60, ask=ask)
    return found if isinstance(found, str) else found[0]


def _busy_said(forward: Callable) -> str | None:
    try:
        for rows, split_size in ((12, 4), (10, 4), (3, 5)):
            if complaint := _numbers_complaint(forward, rows, split_size):
                return f"with {rows} rows and split_size={split_size}, {complaint}"
        with warnings.catch_warnings(), virtualgpu.dry_run():
            warnings.simplefilter("ignore")  # what a dry run says of a value that is read
            return _step_complaint(forward) or _size_complaint(forward)
    except Exception as error:
        return f"your code raised {type(error).__name__}: {error}"


def _numbers_complaint(forward: Callable, rows: int, split_size: int) -> str | None:
    """Beside one device: values, place, gradients."""
    torch.manual_seed(rows)
    plain_parts = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)
    parts = [copy.deepcopy(part).to(f"cuda:{gpu}") for gpu, part in enumerate(plain_parts)]
    plain_x = torch.randn(rows, 6, requires_grad=True)
    x = plain_x.detach().to("cuda:0").requires_grad_()
    out, expected = forward(*parts, x, split_size), plain_parts[1](plain_parts[0](plain_x))
    if not isinstance(out, torch.Tensor):
        return f"it returns {type(out).__name__}; one tensor is wanted"
    if out.shape != expected.shape:
        return f"the result has the shape {tuple(out.shape)}, not {tuple(expected.shape)}"
    if not torch.allclose(out.detach().cpu(), expected, atol=1e-5):
        return "the numbers are not those of second(first(x)): does each row come out in its place?"
    if str(out.device) != "cuda:0":
        return f"the numbers are right, but the result is on {out.device}; the labels wait on cuda:0"
    weights = torch.randn_like(expected)  # each row counts, and each differently
    if out.requires_grad:
        (out * weights.to("cuda:0")).sum().backward()
    (expected * weights).sum().backward()
    mine, theirs = [x, *parts[0].parameters(), *parts[1].parameters()], [plain_x]
    theirs += [*plain_parts[0].parameters(), *plain_parts[1].parameters()]
    for own, other in zip(mine, theirs, strict=True):
        if own.grad is None or not torch.allclose(own.grad.cpu(), other.grad, atol=1e-4):
            return (
                "the numbers are right, but the gradients are not one GPU's: was something detached, or computed twice?"
            )
    return None


class _Watched:
    """The two halves of a ResNet-50, which note who is called with what, and whether the host has waited for cuda:1."""

    def __init__(self):
        net = ResNet(Bottleneck, [3, 4, 6, 3])
        parts = [*net.children()]  # the stem has four
        self.first = nn.Sequential(*parts[:6]).to("cuda:0")
        self.second = nn.Sequential(*parts[6:-1], nn.Flatten(), net.fc).to("cuda:1")
        self.calls, self.sizes, self.waited = "", [], False
        self.first.register_forward_pre_hook(self.first_begins)
        self.second.register_forward_pre_hook(self.second_begins)

    def first_begins(self, module: nn.Module, inputs: tuple) -> None:
        self.waited |= "S" in self.calls and torch.cuda.current_stream("cuda:1").query()
        self.calls += "F"
        self.sizes.append(len(inputs[0]))

    def second_begins(self, module: nn.Module, inputs: tuple) -> None:
        self.calls += "S"

    def step(self, forward: Callable) -> float:
        """Milliseconds of the lesson's training step."""
        optimizer = torch.optim.SGD([*self.first.parameters(), *self.second.parameters()], lr=0.01)
        x, labels = torch.randn(IMAGES, 3, 128, 128), torch.zeros(IMAGES, dtype=torch.long)
        with Timeline() as timeline:
            output = forward(self.first, self.second, x.to("cuda:0"), SPLIT_SIZE)
            nn.functional.cross_entropy(output, labels.to(output.device)).backward()
            optimizer.step()
        return 1e3 * timeline.seconds


def _in_turns(first, second, x, split_size):
    return second(first(x).to("cuda:1")).to("cuda:0")


def _shortest(first, second, x, split_size):
    return torch.cat([second(first(part).to("cuda:1")) for part in x.split(split_size)]).to("cuda:0")


def _step_complaint(forward: Callable) -> str | None:
    """Where the step is long: why."""
    mine = _Watched()
    ms = mine.step(forward)
    if ms <= SLOWER * _Watched().step(_shortest):
        return None
    took = f"a step takes {ms:.0f} ms, one in turns {_Watched().step(_in_turns):.0f}"
    if IMAGES in mine.sizes:
        return f"{took}: first gets all {IMAGES} images at once, and until it is through, cuda:1 has nothing to do"
    if mine.waited:
        return f"{took}: each round waits until cuda:1 is done (.item(), print, synchronize?), and cuda:0 has nothing in its queue meanwhile"
    if not mine.calls.lstrip("F").strip("S"):
        return (
            f"{took}: all of first is queued before any of second, with all copies between them: when can cuda:1 begin?"
        )
    return f"{took}: in each round one GPU waits for the other; which copy in your loop has to wait for second?"


def _size_complaint(forward: Callable) -> str | None:
    for split_size in (40, 10):
        mine = _Watched()
        with torch.no_grad():
            forward(mine.first, mine.second, torch.randn(IMAGES, 3, 32, 32, device="cuda:0"), split_size)
        if mine.sizes and max(mine.sizes) != split_size:
            return f"with split_size={split_size}, first gets {max(mine.sizes)} images at once"
    return None


@grader
def schedules(gpipe: Callable[[int, int], list], one_f_one_b: Callable[[int, int], list]) -> str | None:
    """Each is a function of (stages, micro_batches) and returns a list of rows, one a stage: in each slot "F3" (forward of 3), "B3" (its
    backward) or None. In GPipe a stage's forwards come before its backwards; in 1F1B stage s holds at most stages - s micro-batches."""
    draw = random.Random()
    sizes = ((2, 4), (3, 4), (4, 8), (5, 2), (1, 3), (draw.randint(2, 9), draw.randint(1, 20)))
    for name, table, rule in (("gpipe", gpipe, _gpipe_complaint), ("one_f_one_b", one_f_one_b, _held_complaint)):
        found = launched(answers, partial(_rows, table), sizes, nprocs=1, ask="does your loop end?")
        if isinstance(found, str):
            return f"{found} (in {name})"
        for (stages, pieces), rows in zip(sizes, found[0], strict=True):
            if complaint := _table_complaint(stages, pieces, rows) or rule(stages, pieces, rows):
                return f"{name}, {stages} stages and {pieces} micro-batches: {complaint}"
    return None


def _gpipe_complaint(stages: int, pieces: int, rows: list[list]) -> str | None:
    for stage, row in enumerate(rows):
        backward = next(work for work in row if work and work[0] == "B")
        if late := [work for work in row[row.index(backward) :] if work and work[0] == "F"]:
            return f"a good schedule, but not GPipe: stage {stage} begins {backward} before {late[0]}"
    return None


def _held_complaint(stages: int, pieces: int, rows: list[list]) -> str | None:
    for stage, row in enumerate(rows):
        if (most := held(row)) > stages - stage:
            return f"stage {stage} holds {most} micro-batches at once; in 1F1B at most {stages - stage}"
    return None


def held(row: Iterable[str | None]) -> int:
    """Micro-batches that a stage holds at once, from their forward (F0) to their backward (B0)."""
    return max(accumulate({"F": 1, "B": -1}.get((work or " ")[0], 0) for work in row))


def _table_complaint(stages: int, pieces: int, rows: list[list] | None) -> str | None:
    """Of a schedule: each pass once, none before what it needs, and no slot more than the bubble."""
    if rows is None:
        return "it returns None; a list of rows is wanted"
    if len(rows) != stages or len({len(row) for row in rows}) != 1:
        return f"there should be {stages} rows of one length, not {[len(row) for row in rows]}"
    for stage, row in enumerate(rows):
        for way in "FB":
            expected = [f"{way}{piece}" for piece in range(pieces)]
            if sorted(work for work in row if str(work).startswith(way)) != sorted(expected):
                return f"stage {stage} should have each of {way}0 to {expected[-1]} once; it has {row} (None: nothing)"
        if len(row) - row.count(None) != 2 * pieces:
            return f"stage {stage} has something besides F, B and None: {row}"
        for piece in range(pieces):
            forward, backward = f"F{piece}", f"B{piece}"
            if stage and row.index(forward) <= rows[stage - 1].index(forward):
                return f"stage {stage} begins {forward} in slot {row.index(forward)}, before stage {stage - 1} has finished it"
            if stage and rows[stage - 1].index(backward) <= row.index(backward):
                slot = rows[stage - 1].index(backward)
                return f"stage {stage - 1} begins {backward} in slot {slot}, before stage {stage} has finished it"
            if row.index(backward) <= row.index(forward):
                return f"stage {stage} begins {backward} in slot {row.index(backward)}, before its own {forward}"
    if len(rows[0]) > 2 * (pieces + stages - 1):
        waits = len(rows[0]) - 2 * pieces
        return f"each stage waits {waits} of {len(rows[0])} slots; it need not wait more than {2 * (stages - 1)}"
    return None


def _rows(table: Callable, stages: int, pieces: int) -> list[list] | None:
    """As lists of plain words, whatever sequences the reader's are; ("F", 3) is "F3"."""
    rows = table(stages, pieces)
    return None if rows is None else [[_word(work) for work in row] for row in rows]


def _word(work):
    return "".join(map(str, work)) if isinstance(work, tuple | list) else plain(work)


def answers(function: Callable, cases: Iterable[tuple]) -> list:
    """In a process of its own, which ends also where the reader's loop does not."""
    return [plain(function(*copy.deepcopy(case))) for case in cases]
