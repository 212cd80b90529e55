"""The graders of notebook 08: DDP in the wild."""

import itertools
import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from checks.grader import grader, launched_on_gpus
from checks.notebook_04 import RANKS, draw, on_own_gpu, own_batches, small_model

SAMPLES, BATCH, EPOCHS = 110, 20, 3  # with three ranks the last batch is smaller than the others


@grader
def trains_on_all(train: Callable[[nn.Module, TensorDataset, int], list[float]]) -> str | None:
    """train(model, data, epochs) returns, on each of three ranks, the mean loss over all samples of each epoch."""
    found = launched_on_gpus(_histories, train, draw(), nprocs=RANKS, ask="do all ranks call all_reduce?")
    if isinstance(found, str):
        if calls := re.findall(r"came to (\w+) of ([\d,]+)", found):  # whichever rank was the first to see it
            return "the ranks do not call the same collectives: one is in " + ", another in ".join(
                f"{call} of {count} {'number' if count == '1' else 'numbers'}" for call, count in sorted(calls, key=str)
            )
        return found
    for rank, (history, references) in enumerate(found):
        if history is None or len(history) != EPOCHS:
            return f"rank {rank} returns {history}; {EPOCHS} numbers are wanted, one an epoch"
        if any(_alike(history, references[case]) for case in ((False, False), (False, True))):
            return "every epoch has the samples in the order of the first: what tells the sampler which epoch it is?"
        if _alike(history, references[True, True]):
            return f"it returns means of means, and the last batch has fewer samples than {BATCH}: add up sums, and divide once"
    apart = max(abs(a - b) for history, _ in found for a, b in zip(history, found[0][0], strict=True))
    wrong = [rank for rank, (history, references) in enumerate(found) if not _alike(history, references[True, False])]
    if apart > 1e-4 and 0 not in wrong:
        return f"rank 0 returns the right losses, and rank {wrong[0]} others: to which ranks does the sum come?"
    if apart > 1e-4:
        return f"the ranks return different losses (by up to {apart:.3f}): each has seen its own share only"
    history, references = found[0]
    if not _alike(history, references[True, False]):
        epoch = next(
            i for i, (a, b) in enumerate(zip(history, references[True, False], strict=True)) if abs(a - b) > 1e-4
        )
        return f"epoch {epoch}: the mean loss over all samples of all ranks is {references[True, False][epoch]:.4f}, not {history[epoch]:.4f}"
    return None


def _alike(one: list[float], other: list[float]) -> bool:
    return all(abs(a - b) < 1e-4 for a, b in zip(one, other, strict=True))


def _histories(train: Callable, seed: int) -> tuple[list[float] | None, dict[tuple[bool, bool], list[float]]]:
    """The reader's, and those of a training as it should be and with one fault or two: (with set_epoch, with means of means)."""
    on_own_gpu()
    numbers = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(SAMPLES, 8, generator=numbers), torch.randint(4, (SAMPLES,), generator=numbers))
    references = {case: _trained(small_model(seed), data, *case) for case in itertools.product((False, True), repeat=2)}
    history = train(small_model(seed), data, EPOCHS)
    return None if history is None else [float(loss) for loss in history], references


def _trained(model: nn.Module, data: TensorDataset, shuffled: bool, means: bool) -> list[float]:
    ddp, sampler, history = DistributedDataParallel(model), DistributedSampler(data), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch if shuffled else 0)
        losses = []
        for x, y in DataLoader(data, BATCH, sampler=sampler):
            loss = nn.functional.cross_entropy(ddp(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach() * (1 if means else len(y)))
        total = torch.stack(losses).sum() / (len(losses) if means else len(sampler))
        dist.all_reduce(total)
        history.append(total.item() / dist.get_world_size())
    return history


@grader
def stays_together(train: Callable[[nn.Module, list], None]) -> str | None:
    """train(model, batches) in three processes leaves the same weights on all, and those of DDP."""
    found = launched_on_gpus(_weights_after, train, draw(), nprocs=RANKS)
    if isinstance(found, str):
        return found
    (first, right), *others = found
    apart = max(float((a - b).abs().max()) for other, _ in others for a, b in zip(first, other, strict=True))
    if apart > 1e-6:
        far = "more than 0.01" if apart > 0.01 else f"{apart:.0e}"  # the batches are drawn anew each time
        return f"after 20 steps the weights of the ranks differ by {far}: who averages the gradients?"
    if not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(first, right, strict=True)):
        return (
            "the ranks agree with each other, but not with DDP on the same batches: "
            "are gradients averaged in each step, and all batches used, once each?"
        )
    return None


def _weights_after(train: Callable, seed: int) -> tuple[list, list]:
    on_own_gpu()
    model, wrapped = small_model(seed), DistributedDataParallel(small_model(seed))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for x, y in own_batches(20, seed):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    train(model, own_batches(20, seed))
    return [[p.detach().cpu() for p in network.parameters()] for network in (model, wrapped)]
