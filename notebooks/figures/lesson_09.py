"""A run that is killed and resumed, two nodes, and how often to save, as pictures."""

import copy
import random

import torch
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import nn
from torch.nn import functional as F

from helpers import data
from helpers.plots import figures
from helpers.plots.figures import COLORS

EVERY, KILLED, STEPS, RESTART = 6, 16, 24, 2  # steps; a restart takes as long as so many


def killed_run() -> None:
    """Trains a small network with dropout twice, once without a break and once killed and resumed, and draws when each did which step."""
    whole, killed = _trained(None), _trained(KILLED)
    differ = sum(int((a != b).sum()) for a, b in zip(whole.parameters(), killed.parameters(), strict=True))
    numbers = sum(p.numel() for p in whole.parameters())
    resumed = KILLED // EVERY * EVERY
    title = f"Killed in step {KILLED}, resumed from step {resumed}: {KILLED - resumed} steps are lost, {differ} of {numbers:,} weights differ"
    with figures.drawn(title, "data", 2.3) as axes:
        _steps(axes, 0, 0, range(STEPS), set())
        _steps(axes, 1, 0, range(KILLED), {*range(resumed, KILLED)})
        _steps(axes, 1, KILLED + RESTART, range(resumed, STEPS), set())
        axes.plot(KILLED + 0.12, 1, "X", color=COLORS[5], markersize=13, zorder=3)
        axes.text(KILLED + RESTART / 2 + 0.2, 1.46, "restart", ha="center", va="top", fontsize=8.5)
        axes.text((resumed + KILLED) / 2, 1.46, "lost work", ha="center", va="top", fontsize=8.5)
        axes.plot([], [], "v", color=COLORS[2], label="checkpoint")
        figures.legend_above(axes, 1)
        figures.rows(axes, ["undisturbed", "killed"], grid=False)
        axes.set(xlabel="time, in steps", xlim=(0, STEPS + RESTART + KILLED - resumed + 0.5), ylim=(1.85, -0.7))
        axes.grid(visible=False, axis="x")


def _steps(axes, row: int, start: int, steps: range, lost: set[int]) -> None:
    for at, step in enumerate(steps, start):
        gone = step in lost
        look = {"facecolor": "#f3d5bf", "hatch": "////", "edgecolor": COLORS[5]} if gone else {"facecolor": "#b5dbf1"}
        axes.add_patch(Rectangle((at + 0.04, row - 0.3), 0.92, 0.6, linewidth=0, **look))
        axes.text(at + 0.5, row, step, ha="center", va="center", fontsize=7.5)
        if (step + 1) % EVERY == 0:
            axes.plot(at + 1, row - 0.4, "v", color=COLORS[2], markersize=7)


def _trained(killed: int | None) -> nn.Module:
    """The network after all steps. killed: in this step, and resumed from a copy of all that the last checkpoint has."""
    images, labels = data.digits()

    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    state = torch.get_rng_state()
    (model, optimizer), step, saved = fresh(), 0, None
    while step < STEPS:
        if step == killed:
            (model, optimizer), killed = fresh(), None
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(saved[2])
            step = saved[3]
        part = slice(64 * step, 64 * step + 64)
        optimizer.zero_grad()
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), step))
    torch.set_rng_state(state)
    return model


def two_nodes() -> None:
    """Two nodes of two GPUs: an agent on each, the ranks that it starts, and where they meet."""
    title = "Two nodes of two GPUs: RANK counts over all of them, LOCAL_RANK within a node"
    with figures.drawn(title, "data", 3.1) as axes:
        for node in range(2):
            left = 4.6 * node
            axes.add_patch(Rectangle((left, 0), 4.2, 2.3, facecolor="#f4f4f4", edgecolor="#999999"))
            axes.text(left + 0.12, -0.1, f"node {node}: GROUP_RANK {node}", va="top", weight="bold", fontsize=9)
            _box(axes, left + 2.1, 1.85, 2.3, "agent (torchrun)", "#f7d9a8")
            for local in range(2):
                x, rank = left + 1.1 + 2.0 * local, 2 * node + local
                _box(axes, x, 0.98, 1.8, f"RANK {rank}\nLOCAL_RANK {local}", "#b5dbf1", 0.56)
                _box(axes, x, 0.28, 1.8, f"cuda:{local}", "#cdebd9")
                _arrow(axes, (left + 2.1, 1.66), (x, 1.28))
                _arrow(axes, (x, 0.69), (x, 0.46))
            _arrow(axes, (left + 2.1, 2.05), (4.4 + (node - 0.5), 2.78), "<->")
        _box(axes, 4.4, 2.96, 3.6, "rendezvous: first-node:29500", "#f2c6dd")
        axes.set(xlim=(-0.1, 8.9), ylim=(-0.4, 3.2))
        axes.axis("off")


def _box(axes, x: float, y: float, width: float, text: str, color: str, height: float = 0.36) -> None:
    axes.add_patch(Rectangle((x - width / 2, y - height / 2), width, height, facecolor=color, edgecolor="none"))
    axes.text(x, y, text, ha="center", va="center", fontsize=9)


def _arrow(axes, start: tuple[float, float], end: tuple[float, float], style: str = "->") -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=9, color="#666666"))


def lost_share(cost: float, between: float, best: float) -> None:
    """The share of the time that is lost with saves of `cost` seconds and a failure every `between` seconds on average, over the interval:
    by the formula, and in runs whose failures are drawn. best: the interval to mark, in seconds."""
    intervals = [best * 2 ** (k / 2) for k in range(-6, 7)]
    formula = [100 * (cost / interval + interval / (2 * between)) for interval in intervals]
    drawn = [100 * _lost(cost, between, interval) for interval in intervals]
    minutes = [interval / 60 for interval in intervals]
    low = 100 * (cost / best + best / (2 * between))
    title = f"Every {best / 60:.0f} minutes is best: {low:.1f} % lost. Half as often, or twice, costs little more"
    with figures.drawn(title, "simulated", 2.8, xlabel="minutes between saves", ylabel="% of the time lost") as axes:
        axes.plot(minutes, formula, color=COLORS[0], label="cost / interval + interval / (2 x time between failures)")
        axes.plot(minutes, drawn, "o", color=COLORS[1], markersize=4, label="2,000 failures at random moments")
        axes.axvline(best / 60, color=COLORS[2], linestyle="--", linewidth=1)
        axes.set(xscale="log", ylim=(0, None))
        figures.ticks(axes, [round(value, 1 if value < 10 else 0) for value in minutes[::2]])
        axes.legend(frameon=False)


def _lost(cost: float, between: float, interval: float, failures: int = 2000) -> float:
    """A run that saves after each `interval` of work, until it has failed so often: the share of its time that brought nothing."""
    draw, kept, spent = random.Random(0), 0.0, 0.0
    for _ in range(failures):
        lived = draw.expovariate(1 / between)
        spent += lived
        kept += lived // (interval + cost) * interval
    return 1 - kept / spent
