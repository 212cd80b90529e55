"""Searches for hyper-parameters: digits that a network misses, where trials were made, how far each was trained, and on which worker."""

from collections.abc import Mapping, Sequence

import matplotlib
from torch import Tensor

from helpers.plots import figures
from helpers.plots.figures import COLORS

STOPPED = COLORS[5]
SHARED = {"sharex": True, "sharey": True, "squeeze": False}  # axes of panels


def missed(images: Tensor, labels: Tensor, answers: Tensor, title: str, count: int = 12) -> None:
    """The first `count` images [n, 1, 8, 8] whose answers are not their labels [n], with both."""
    wrong = (answers != labels).nonzero().flatten()[:count].tolist()
    figure, panels = figures.new(1.5, ncols=count)
    for axes, number in zip(panels, wrong, strict=False):
        axes.imshow(images[number, 0].numpy(), cmap="Greys")
        axes.set_title(f"{labels[number]}, not {answers[number]}", fontsize=8)
    for axes in panels:
        axes.set_axis_off()
    figures.show(figure, title, "measured")


def trials(bars: Sequence, title: str) -> None:
    """A row per process, a bar per trial (process, trial, start, end, rounds, stopped) with its rounds; a red end: it was stopped."""
    processes = list(dict.fromkeys(bar.process for bar in bars))
    with figures.drawn(title, "measured", 0.6 + 0.5 * len(processes), xlabel="seconds") as axes:
        for bar in bars:
            row = processes.index(bar.process)
            axes.barh(row, bar.end - bar.start, left=bar.start, color=COLORS[0], edgecolor="white", height=0.8)
            if bar.stopped:
                axes.plot([bar.end] * 2, [row - 0.4, row + 0.4], color=STOPPED, linewidth=3)
            style = {"ha": "center", "va": "center", "fontsize": 8, "color": "white"}
            axes.text((bar.start + bar.end) / 2, row, bar.rounds, **style)
        figures.rows(axes, [f"GPU process {number}" for number in range(len(processes))], grid=False)


def search(
    tried: Mapping[str, Sequence[tuple[float, float, float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    value: str,
    xscale: str = "log",
) -> None:
    """One panel per way to search: a dot per trial at (x, y), y logarithmic, coloured by its third; a ring: the best."""
    figure, (panels,) = figures.new(3.2, ncols=len(tried), **SHARED)
    scores = [z for points in tried.values() for *_, z in points]
    for axes, (name, points) in zip(panels, tried.items(), strict=True):
        x, y, z = zip(*points, strict=True)
        drawn = axes.scatter(x, y, c=z, s=70, cmap="viridis", vmin=min(scores), vmax=max(scores))
        best = max(points, key=lambda point: point[2])
        axes.scatter(*best[:2], s=220, facecolors="none", edgecolors=COLORS[5], linewidths=2)
        axes.annotate(f"{best[2]:.0f}", best[:2], (12, 4), textcoords="offset points", color=COLORS[5], weight="bold")
        axes.set(xscale=xscale, yscale="log", xlabel=xlabel)
        axes.margins(0.1)
        axes.set_title(name, fontsize=10)
    panels[0].set_ylabel(ylabel)
    figure.colorbar(drawn, ax=panels, label=value)
    figures.show(figure, title, "measured")


def rungs(
    curves: Sequence[Sequence[float]],
    rounds: Sequence[int],
    at: Sequence[int],
    title: str,
    ylabel: str,
    named: Mapping[int, str],
    ylim: tuple[float, float],
) -> None:
    """One curve per trial, as far as its `rounds`, with a cross where it was stopped; dotted beyond for those that are `named`."""
    with figures.drawn(title, "measured", 3.6, xlabel="round", ylabel=ylabel, xlim=(0.9, None), ylim=ylim) as axes:
        for trial, (values, end) in enumerate(zip(curves, rounds, strict=True)):
            color = COLORS[5 * list(named).index(trial)] if trial in named else "#b0b0b0"
            style = {"color": color, "zorder": 3 if trial in named else 1, "linewidth": 1.8 if trial in named else 1}
            axes.plot(range(1, end + 1), values[:end], label=named.get(trial) if end == len(values) else None, **style)
            if end < len(values):
                axes.plot(end, values[end - 1], "x", markersize=6, color=color)
                if trial in named:
                    axes.plot(range(end, len(values) + 1), values[end - 1 :], ":", label=named[trial], **style)
        style = {"fontsize": 8, "color": "#666666", "backgroundcolor": (1, 1, 1, 0.8), "textcoords": "offset points"}
        for rung in at:
            axes.axvline(rung, color="#888888", linestyle="--", linewidth=1)
            go_on = f"{sum(end > rung for end in rounds)} go on"
            axes.annotate(go_on, (rung, 1), (3, -9), ("data", "axes fraction"), **style)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)
        axes.set(xscale="log")
        figures.ticks(axes, sorted({*at, max(map(len, curves))}))


def workers(
    schedules: Mapping[str, Sequence[tuple[int, int, float, float, int, bool]]], title: str, xlabel: str, end: float
) -> None:
    """One panel per schedule, one row per worker up to the time `end`; a bar per (worker, trial, start, end, rung that it reaches,
    whether it is stopped there), the later the darker; a red edge: stopped; white is waiting."""
    figure, panels = figures.new(1.6 * len(schedules) + 0.9, nrows=len(schedules), **SHARED)
    reached = sorted({bar[4] for bars in schedules.values() for bar in bars})
    for (axes,), (name, bars) in zip(panels, schedules.items(), strict=True):
        for worker, trial, start, stop, rung, stopped in bars:
            if start < end:
                color = matplotlib.colormaps["Blues"]((reached.index(rung) + 1.5) / (len(reached) + 1))
                axes.barh(worker, stop - start, left=start, color=color, edgecolor="white", height=0.8)
                if stopped and stop <= end:
                    axes.plot([stop] * 2, [worker - 0.4, worker + 0.4], color=STOPPED, linewidth=2.5)
                if stop - start > end / 60:
                    color = "white" if reached.index(rung) >= len(reached) / 2 else "black"
                    style = {"ha": "center", "va": "center", "fontsize": 7, "color": color, "clip_on": True}
                    axes.text(min(start + stop, start + end) / 2, worker, trial, **style)
        rows = len({bar[0] for bar in bars})
        busy = sum(max(0.0, min(stop, end) - start) for _, _, start, stop, *_ in bars) / (rows * end)
        axes.set_title(f"{name}: workers busy {100 * busy:.0f} % of the time", fontsize=10, loc="left")
        axes.set(xlim=(0, end))
        figures.rows(axes, [f"worker {row}" for row in range(rows)], grid=False)
    axes.set_xlabel(xlabel)
    figures.show(figure, title, "simulated")
