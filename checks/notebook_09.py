"""The graders of notebook 09: ranks that leave together, and a training function that is killed anywhere and ends with the same bits."""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from checks.grader import grader, launched_on_gpus
from checks.notebook_04 import draw, on_own_gpu

RANKS, SAMPLES, BATCH, EPOCHS, EVERY = 2, 112, 8, 2, 3
A_SAVE = 0.15  # seconds for which who dies in a save lets the others write, too


class Kill(NamedTuple):
    """Which rank dies: at its batch number `batch`, counted from 1, or in the middle of its save number `save`."""

    rank: int
    batch: int = 0
    save: int = 0


class Batch(NamedTuple):
    """What a rank held when a batch came to the model, and the samples it had read until then."""

    weights: str
    generator: str
    samples: list[int]


class Run(NamedTuple):
    """Of each rank: its batches, and its weights at the end."""

    batches: list[list[Batch]]
    weights: list[list[torch.Tensor]]


@grader
def ends_the_same(train: Callable[[nn.Module, TensorDataset, Path], None]) -> str | None:
    """train(model, data, path) on two ranks: two epochs of DDP with dropout, saved at least after every third batch. Killed at moments
    that are drawn, and started again with the same path, it ends with the weights of the undisturbed run, bit for bit."""
    draws = random.Random(draw())
    in_all = EPOCHS * SAMPLES // BATCH // RANKS
    kills = [Kill(draws.randrange(RANKS), batch=draws.randint(in_all // EPOCHS + EVERY + 2, in_all))]
    return killed(train, kills, draws.randrange(1000), saves=True)


def killed(train: Callable, kills: list[Kill], seed: int, saves: bool = False) -> str | None:
    """What is said of `train` where each of `kills` befalls a run of its own. saves: each rank that writes is killed in a save, too."""
    with tempfile.TemporaryDirectory(prefix="graded-") as folder:
        whole = _run(train, Path(folder, "whole"), seed)
        if isinstance(whole, str):
            return whole
        if complaint := _as_ddp(whole):
            return complaint
        if saves:
            written = [int(Path(folder, "whole-notes", f"saves-{rank}").read_text()) for rank in range(RANKS)]
            draws = random.Random(seed)
            kills = [*kills, *(Kill(rank, save=draws.randint(2, n)) for rank, n in enumerate(written) if n > 1)]
        for number, kill in enumerate(kills):
            if complaint := _survives(train, kill, whole, Path(folder, str(number)), seed):
                return complaint
    return None


def _as_ddp(whole: Run) -> str | None:
    """Does the undisturbed run train two epochs, each sample once in each, and end with the same weights on both ranks?"""
    in_all = EPOCHS * SAMPLES // BATCH // RANKS
    counts = [len(batches) for batches in whole.batches]
    if set(counts) != {in_all}:
        return f"undisturbed, the ranks train {' and '.join(map(str, counts))} batches, and not {in_all} each"
    if not all(torch.equal(a, b) for a, b in zip(*whole.weights, strict=True)):
        return "undisturbed, the ranks end with different weights: who averages the gradients?"
    if whole.batches[0][0].weights == whole.batches[0][-1].weights:
        return "undisturbed, the weights do not change: the model that you are given is to be trained"
    orders = []
    for epoch in range(EPOCHS):
        part = slice(epoch * in_all // EPOCHS, (epoch + 1) * in_all // EPOCHS)
        orders.append([[i for batch in batches[part] for i in batch.samples] for batches in whole.batches])
        read = sorted(i for own in orders[-1] for i in own)
        if read and read != list(range(SAMPLES)):
            return f"undisturbed, epoch {epoch} reads {len(set(read))} of {SAMPLES} samples, {len(read)} times in all: who deals them out to the ranks?"
    if orders[0] == orders[1] != [[], []]:
        return "every epoch has the samples in the order of the first: what tells the sampler which epoch it is?"
    return None


def _survives(train: Callable, kill: Kill, whole: Run, folder: Path, seed: int) -> str | None:
    first = _run(train, folder, seed, kill)
    if isinstance(first, str):
        return first
    done = max(map(len, first.batches))
    died = f"rank {kill.rank} was killed {'in the middle of a save' if kill.save else f'in batch {done}'}"
    in_all = len(whole.batches[0])
    again = _run(train, folder, seed)
    if isinstance(again, str):
        return f"{died}; started again, {again}"
    counts = [len(batches) for batches in again.batches]
    if counts[0] != counts[1]:
        return f"{died}; started again, rank 0 trains {counts[0]} batches and rank 1 {counts[1]}: do they resume from the same batch?"
    differ = any(not torch.equal(a, b) for one in again.weights for a, b in zip(one, whole.weights[0], strict=True))
    if not differ and not counts[0]:
        return None  # it was killed in its very last save
    start = in_all - counts[0]  # so many batches it took as done
    at = f"{died}; started again, it trains {counts[0]} batches"
    if counts[0] == in_all and done > EVERY + 1:
        return f"killed and started again, it trains all {in_all} batches, as at first: nothing was saved, or nothing is read"
    if start < done - 1 - EVERY - (kill.save > 0) * EVERY:
        return f"{at}, though {in_all - done + 1} were left: are batches of its epoch trained twice, or is it saved too seldom?"
    if not differ:
        return None
    for rank, (batches, own) in enumerate(zip(whole.batches, again.batches, strict=True)):
        if not own or start < 0:
            return f"{at}, and ends with other weights"
        then, now = batches[start], own[0]
        if then.weights != now.weights:
            return f"{at}, and begins with weights that are not those after {start} batches"
        if then.generator != now.generator:
            if any(other[start].generator == now.generator for other in whole.batches):
                return f"{at}, and rank {rank} draws another rank's dropouts: each has a generator of its own"
            return f"{at}, with the right weights, but rank {rank}'s dropouts are others: its generator is not back"
        for then, now in zip(batches[start:], own, strict=True):
            if sorted(then.samples) != sorted(now.samples[-len(then.samples) :]):
                return f"{at}, but rank {rank} reads other samples than were left: is the epoch, and the place in it, back?"
    return f"{at}, with the right weights, dropouts and samples, and ends with other weights: what does the optimizer remember?"


def _run(train: Callable, folder: Path, seed: int, kill: Kill | None = None) -> Run | str:
    """One start, until it ends or is killed; or what went wrong."""
    notes = folder.with_name(f"{folder.name}-notes")
    for place in (folder, notes):
        place.mkdir(exist_ok=True)
    for rank in range(RANKS):
        (notes / str(rank)).write_text("")
    ask = "do both ranks come to the same collectives, also after a restart?"
    found = launched_on_gpus(_started, train, folder / "run.pt", notes, seed, kill, nprocs=RANKS, timeout=60, ask=ask)
    if isinstance(found, str):
        died = kill and (notes / f"died-{kill.rank}").exists()
        if not died:
            return found
        found = []
    lines = [(notes / str(rank)).read_text().splitlines() for rank in range(RANKS)]
    return Run([[Batch(*json.loads(line)) for line in own] for own in lines], found)


def _started(train: Callable, path: Path, notes: Path, seed: int, kill: Kill | None) -> list[torch.Tensor]:
    """A rank, as after torchrun's start."""
    on_own_gpu()
    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)).cuda()
    data = Read(torch.randn(SAMPLES, 8), torch.randint(4, (SAMPLES,)))
    torch.manual_seed(seed + 1 + rank)
    own = kill if kill and kill.rank == rank else None
    with open(notes / str(rank), "a", encoding="utf-8") as file:
        model.register_forward_pre_hook(_noting(model, data, file, notes, own))
        with _dying_in_a_save(path.parent, notes, own.save if own else 0):
            train(model, data, path)
    return [p.detach().cpu() for p in model.parameters()]


class Read(TensorDataset):
    """It notes which samples were asked for."""

    def __init__(self, *tensors: torch.Tensor):
        super().__init__(*tensors)
        self.samples: list[int] = []

    def __getitem__(self, index):
        self.samples += torch.arange(SAMPLES)[index].flatten().tolist()
        return super().__getitem__(index)


def _noting(model: nn.Module, data: Read, file: Any, notes: Path, kill: Kill | None) -> Callable:
    """A hook that notes each batch before it is computed, and dies at that of `kill`."""
    count = 0

    def hook(module, inputs) -> None:
        nonlocal count
        if not (model.training and torch.is_grad_enabled()):
            return
        count += 1
        weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
        generator = torch.cuda.get_rng_state().numpy().tobytes()
        note = [hashlib.sha1(part).hexdigest() for part in (weights, generator)]
        print(json.dumps([*note, data.samples]), file=file, flush=True)
        data.samples.clear()
        if kill and kill.batch == count:
            _die(notes, kill.rank)

    return hook


def _die(notes: Path, rank: int) -> None:
    (notes / f"died-{rank}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _dying_in_a_save(folder: Path, notes: Path, number: int) -> Iterator[None]:
    """In the rank's save of this number (0: in none): half of torch.save is written, or a file was just opened for writing. Notes how
    many there were."""
    saves, whole, rank, saving = 0, torch.save, dist.get_rank(), False

    def die() -> None:
        time.sleep(A_SAVE)
        _die(notes, rank)

    def opened(event: str, args: tuple) -> None:
        nonlocal saves
        if event != "open" or saving or torch.save is whole or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and folder.resolve() in Path(os.fsdecode(os.path.realpath(args[0]))).parents:
            saves += 1
            if saves == number:
                os.truncate(os.open(args[0], os.O_WRONLY | os.O_CREAT), 0)
                die()

    def half(state: Any, file: Any, *args, **options) -> None:
        nonlocal saves, saving
        if hasattr(file, "write"):  # it was opened for that
            return whole(state, file, *args, **options)
        saves += 1
        if saves != number:
            saving = True
            whole(state, file, *args, **options)
            saving = False
            return None
        content = io.BytesIO()
        whole(state, content, *args, **options)
        saving = True
        Path(file).write_bytes(content.getvalue()[: len(content.getvalue()) // 2])
        die()
        return None

    sys.addaudithook(opened)
    torch.save = half
    try:
        yield
    finally:
        torch.save = whole
        (notes / f"saves-{rank}").write_text(str(saves))


STEPS, TALKS, GRACE = (
    100,
    11,
    10,
)  # of a run without a notice: steps, and messages at most; steps from a notice to the end
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "barrier", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "reduce", "scatter",
)  # fmt: skip


@grader
def leaves_together(leave: Callable[[bool, int], bool]) -> str | None:
    """leave(noticed, step), called by each of three ranks after every step, is true for all of them after the same step, within ten
    steps of a notice that reached one of them; and the ranks do not talk at every step."""
    draws = random.Random(draw())
    for rank, step in ((None, 0), (draws.randrange(1, 3), draws.randrange(20, 80)), (0, draws.randrange(20, 80))):
        found = launched_on_gpus(_until_all_leave, leave, rank, step, nprocs=3, ask=ALL)
        if isinstance(found, str):
            alone = re.search("has ended|will not come to it|came to ", found)
            return f"some ranks wait for others that do not come: {ALL}" if alone else found
        ends, talks = zip(*found, strict=True)
        if max(talks) > TALKS:
            return (
                f"in {STEPS} steps the ranks talk to each other more than {TALKS} times: at every tenth step is enough"
            )
        if rank is None and any(end is not None for end in ends):
            return "the ranks leave, and there was no notice"
        if rank is not None and None in ends:
            return "one rank got a notice, and not every rank leaves"
        if len(set(ends)) > 1:
            return "after a notice to one of them the ranks leave after different steps"
        if rank is not None and not step <= ends[0] <= step + GRACE:
            return f"from a notice until the ranks leave, more than {GRACE} steps pass"
    return None


ALL = "does every rank call the collective at the same steps, whether it got the notice or not?"


def _until_all_leave(leave: Callable, rank: int | None, at: int) -> tuple[int | None, int]:
    """After which step this rank leaves, and how often it called a collective."""
    on_own_gpu()
    talks = 0

    def counted(collective: Callable) -> Callable:
        def called(*args, **kwargs):
            nonlocal talks
            talks += 1
            return collective(*args, **kwargs)

        return called

    for name in COLLECTIVES:  # this process ends with the run
        setattr(dist, name, counted(getattr(dist, name)))
    for step in range(STEPS):
        if leave(rank == dist.get_rank() and step >= at, step):
            return step, talks
    return None, talks
