"""Data parallel, a ring, and DDP's buckets as pictures; and what a few steps show of time and memory."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.patches import FancyArrowPatch, Rectangle

import virtualgpu
from checks.notebook_04 import hidden
from helpers import plots
from helpers.plots import figures
from helpers.plots.figures import COLORS
from virtualgpu import Monitor, Timeline

BOX = {"boxstyle": "round,pad=0.35", "edgecolor": "none"}


class Step(NamedTuple):
    """Of a training step: milliseconds; of each GPU its peak (MiB) and the percent of the time in which it is busy and computing; and of
    the first GPU the utilization, step by step."""

    ms: float
    MiB: list[float]
    busy: list[float]
    computing: list[float]
    utilization: list[float]


def observe(step: Callable[[], None], steps: int = 3) -> Step:
    """Runs `step` so often. Its figures are of the last one: the first makes the optimizer's state, too."""
    gpus = range(torch.cuda.device_count())
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    with Monitor() as monitor:
        for _ in range(steps):
            step()
            monitor.step()
    peaks = [torch.cuda.max_memory_allocated(gpu) / 2**20 for gpu in gpus]
    busy, computing = monitor.utilization(), monitor.computing()
    own = [f"cuda:{gpu}" for gpu in gpus]
    ms = 1e3 * (monitor.step_times[-1] - monitor.step_times[-2])
    return Step(ms, peaks, [busy[gpu][-1] for gpu in own], [computing[gpu][-1] for gpu in own], busy[own[0]])


def one_rank(function: Callable, world_size: int, like: str = "T4", **machine):
    """What `function` returns on rank 0 of so many GPUs, in a dry run. No process is started: the other ranks are taken to do the same.
    machine: `gpus_per_node` and `network`, as in `virtualgpu.dry_run`."""
    with virtualgpu.dry_run(like=like, world_size=world_size, **machine):
        dist.init_process_group("nccl")
        try:
            return function()
        finally:
            dist.destroy_process_group()


def origin() -> str:
    """Whose the clock is: "simulated" on virtual GPUs, else "measured"."""
    return "simulated" if virtualgpu.machine() else "measured"


def data_parallel(gpus: int = 4, batch: int = 128) -> None:
    """Each GPU's share of the batch, its copy of the model, its gradients, and their average."""
    share = batch // gpus
    with figures.drawn(
        f"Data parallel: every GPU has the whole model and a part of the batch of {batch}", "data", 2.9
    ) as axes:
        for gpu in range(gpus):
            samples = f"samples {share * gpu} to {share * (gpu + 1) - 1}"
            column = (samples, "#cfe6f5"), ("the whole model", "#56B4E9"), (f"gradients of share {gpu}", "#f7d9a8")
            for y, (text, color) in zip((3, 2, 1), column, strict=True):
                axes.text(gpu, y, text, ha="center", va="center", fontsize=9, bbox=BOX | {"facecolor": color})
                axes.annotate("", (gpu, y - 0.68), (gpu, y - 0.28), arrowprops={"arrowstyle": "->", "color": "#666666"})
            axes.text(gpu, 3.7, f"GPU {gpu}", ha="center", weight="bold")
        average = "average over all GPUs: the same gradients, and so the same step, everywhere".center(96)
        axes.text((gpus - 1) / 2, 0, average, ha="center", va="center", fontsize=9, bbox=BOX | {"facecolor": "#E69F00"})
        axes.set(xlim=(-0.6, gpus - 0.4), ylim=(-0.5, 4.1))
        axes.axis("off")


def ring(steps: Sequence[tuple[list[list[int]], set[tuple[int, int]]]]) -> None:
    """After each step of a ring among four: how many GPUs' values are in each chunk, and which (GPU, chunk) have just arrived."""
    shades = {1: "#e8f3fa", 2: "#b5dbf1", 3: "#56B4E9", 4: "#0072B2"}
    title = "A ring all-reduce: in each of six steps, every GPU sends a quarter to the next one"
    with figures.drawn(title, "data", 3.1) as axes:
        for at, (held, arrived) in enumerate([([[1] * 4 for _ in range(4)], set()), *steps]):
            left = 5.4 * at
            for gpu, chunk in ((gpu, chunk) for gpu in range(4) for chunk in range(4)):
                count, new = held[gpu][chunk], (gpu, chunk) in arrived
                frame = {"edgecolor": "#D55E00", "linewidth": 2, "zorder": 2} if new else {"edgecolor": "none"}
                axes.add_patch(Rectangle((left + chunk, -gpu), 0.94, 0.8, facecolor=shades[count], **frame))
                ink = "white" if count == 4 else "black"
                axes.text(left + chunk + 0.47, 0.4 - gpu, count, ha="center", va="center", fontsize=9, color=ink)
            axes.text(left + 2, 1.15, f"step {at}" if at else "start", ha="center", fontsize=9)
        for gpu in range(4):
            axes.text(-0.6, 0.4 - gpu, f"GPU {gpu}", ha="right", va="center", fontsize=9)
        halves = (
            (5.4, 20.2, "add: a chunk travels round and grows"),
            (21.6, 36.4, "keep: the sums travel round once more"),
        )
        for left, right, text in halves:
            axes.plot([left, right], [1.95, 1.95], color="#666666", linewidth=1)
            axes.text((left + right) / 2, 2.1, text, ha="center", va="bottom", fontsize=9)
        arrow = {"arrowstyle": "->", "mutation_scale": 9, "color": "#666666"}
        for gpu in range(3):
            axes.add_patch(FancyArrowPatch((37.0, 0.4 - gpu), (37.0, -0.6 - gpu), shrinkA=3, shrinkB=3, **arrow))
        axes.add_patch(FancyArrowPatch((37.3, -2.6), (37.3, 0.4), connectionstyle="arc3,rad=0.5", **arrow))
        axes.set(xlim=(-3.2, 40.5), ylim=(-3.3, 2.9))
        axes.axis("off")


def phases(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """When each part of a DataParallel step begins and ends, in seconds: told from what the other GPUs do."""
    others = [span for gpu, spans in timeline.rows.items() if gpu != "cuda:0" for span in spans]
    optimizer = min(span.start for span in timeline.rows["cuda:0"] if span.kind == "optimizer")
    edges = [0.0]
    for kind in ("forward", "backward"):
        own = [span for span in others if span.kind == kind]
        edges += [min(span.start for span in own), max(span.end for span in own)]
    edges += [optimizer, timeline.seconds]
    names = "replicate", "forward", "gather, loss, send back", "backward", "reduce", "optimizer"
    return dict(zip(names, itertools.pairwise(edges), strict=True))


def buckets(runs: Mapping[str, list], start: int) -> None:
    """A slider over sizes of DDP's buckets: {size: what recording() noted of one rank}."""
    timelines = {name: Timeline.of_ranks([spans]) for name, spans in runs.items()}
    longest = max(timeline.seconds for timeline in timelines.values())

    def draw(size: str) -> None:
        spans = runs[size]
        talking, beside, messages = hidden([span for span in spans if span.name.startswith("all_reduce")], spans)
        number = "all_reduce" if messages < 10 else ""  # 35 numbers find no room
        timeline = Timeline.of_ranks([runs[size]], "simulated", number)
        said = "1 message" if messages == 1 else f"{messages} messages"
        title = (
            f"Buckets of {size}: {said}, {100 * beside / talking:.0f} % hidden; {1e3 * timeline.seconds:.0f} ms in all"
        )
        plots.timeline(timeline, title, until=longest)

    plots.slider(draw, list(runs), "size of a bucket", start=start)


def band(batches: Sequence[int], alone: Sequence[Step], ddp: Sequence[Step], factor: float) -> tuple[int, int]:
    """Speed of DDP against one GPU over the batch, with a band for communication that takes `factor` times as long, or a part of it.
    The batches from which on DDP is faster at the band's two edges."""
    open_ms = [step.ms * (1 - step.computing[0] / 100) for step in ddp]  # not hidden

    def speeds(times: float) -> list[float]:
        return [one.ms / (step.ms + (times - 1) * lost) for one, step, lost in zip(alone, ddp, open_ms, strict=True)]

    slow, middle, fast = speeds(factor), speeds(1), speeds(1 / factor)
    first = [next(batch for batch, speed in zip(batches, line, strict=True) if speed > 1) for line in (fast, slow)]
    title = f"Word model: DDP pays from somewhere between {first[0]:,} and {first[1]:,} words a step"
    with figures.drawn(title, "simulated", xlabel="words per step", ylabel="times as fast as one GPU") as axes:
        axes.fill_between(
            batches, slow, fast, color=COLORS[0], alpha=0.2, label=f"communication x 1/{factor:g} to x {factor:g}"
        )
        figures.lines(axes, batches, {"DDP on four": middle, "one GPU": [1.0] * len(batches)})
        axes.set(xscale="log", ylim=(0, None))
        figures.ticks(axes, batches)
        axes.legend(frameon=False)
    return first[0], first[1]
