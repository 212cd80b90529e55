"""Every figure's style in one place. Each states its finding in the title, its units on the axes, and whether its
numbers were *measured* or *simulated*. The same words become the picture's alternative text."""

import base64
import io
import itertools
import math
import os
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import matplotlib
import torch
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from helpers.monitor import Monitor
from helpers.timeline import Timeline
from virtualgpu.simulation.timeline import passes

Origin = Literal["measured", "simulated", "data"]

# Okabe and Ito's palette: told apart by colour-blind readers too
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]
STYLE = {
    "axes.prop_cycle": matplotlib.cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "figure.facecolor": "white",  # also in a dark theme, where black text would vanish on nothing
}
KINDS = {"forward": COLORS[0], "backward": COLORS[1], "weight gradient": COLORS[5], "optimizer": COLORS[2]}
KINDS |= {"kernel": COLORS[0], "trial": COLORS[2], "cut": COLORS[1], "copy": COLORS[3]}
KINDS |= {"communication": COLORS[3]}  # a narrow bar below the kernels
WIDTH, DPI = 8.0, 150  # inches; shown at 100 pixels an inch, so that it stays sharp on a fine screen


def utilization(monitor: Monitor, title: str) -> None:
    """Percent in use, one line a device, iteration by iteration; a gap where nothing was read."""
    figure, axes = _figure()
    _readings(axes, monitor, monitor.utilization())
    axes.set(xlabel="iteration", ylabel="utilization (%)", ylim=(-3, 108))
    _show(figure, title, monitor.source.origin)


def memory(monitor: Monitor, title: str, ceiling: float | None = None) -> None:
    """Memory (MiB), iteration by iteration, two lines a device: what its tensors hold at the end of an iteration, and
    what is in use as nvidia-smi tells (reserved for later tensors, too). A gap where nothing was read.

    ceiling: MiB that there are, as a dashed line."""
    figure, axes = _figure()
    lines = {f"{device}, in use": values for device, values in monitor.memory().items()}
    held = {f"{device}, in tensors": values for device, values in monitor.allocated().items()}
    lines |= {name: values for name, values in held.items() if not all(map(math.isnan, values))}
    _readings(axes, monitor, {name: [value / 2**20 for value in values] for name, values in lines.items()})
    axes.set(xlabel="iteration", ylabel="memory (MiB)", ylim=(0, None if ceiling is None else 1.12 * ceiling))
    if ceiling is not None:
        axes.axhline(ceiling, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(
            f"the GPU's {ceiling:g} MiB", (1, ceiling), (-2, 2), ("axes fraction", "data"), "offset points", ha="right"
        )
        _legend(axes, lines)  # again: the best place is another one now
    _show(figure, title, monitor.source.origin)


def timeline(timeline: Timeline, title: str) -> None:
    """What each device did when, one row a device: bars by kind of work, and the share of the time it was computing. In a
    pipeline each bar has its micro-batch's number; it is pale for the second of a device's stages."""
    figure, axes = _figure(height=1.2 + 0.55 * len(timeline.rows))
    for at, spans in enumerate(timeline.rows.values()):
        for kind, color in KINDS.items():
            bars = [(span.start * 1e3, (span.end - span.start) * 1e3) for span in spans if span.kind == kind]
            place = (at + 0.38, 0.1) if kind == "communication" else (at - 0.36, 0.72)
            axes.broken_barh(bars, place, color=color, label=kind if bars else None)
        for start, end, stage, number in passes(spans):
            style = {"facecolor": (1, 1, 1, 0.4 * min(stage, 1)), "edgecolor": "white", "linewidth": 0.5}
            axes.broken_barh([(start * 1e3, (end - start) * 1e3)], (at - 0.36, 0.72), **style)
            if end - start > timeline.seconds / 80:  # two digits are as wide
                axes.text((start + end) * 500, at, number, fontsize=7, ha="center", va="center")
        computing = sum(s.end - s.start for s in spans if s.kind not in ("copy", "communication"))
        busy = f"{100 * computing / timeline.seconds:.0f} % busy"
        axes.annotate(busy, (1.01, at), xycoords=("axes fraction", "data"), va="center")
    axes.set(xlabel="time (ms)", xlim=(0, timeline.seconds * 1e3), ylim=(len(timeline.rows) - 0.5, -0.5))
    axes.set_yticks(range(len(timeline.rows)), list(timeline.rows))
    axes.grid(axis="y", visible=False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    _show(figure, title, timeline.origin)


def curves(
    series: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
    ylabel: str,
    origin: Origin = "measured",
    mark: int | None = None,
    marked: str = "",
    ylim: tuple[float, float] | None = None,
) -> None:
    """One line a series against 1, 2, 3, ...; `mark` puts a vertical line at that x, which `marked` names."""
    figure, axes = _figure()
    for name, values in series.items():
        _line(axes, range(1, len(values) + 1), values, name)
    _legend(axes, series)
    if mark is not None:
        axes.axvline(mark, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(marked, (mark, 0.02), (4, 2), xycoords=("data", "axes fraction"), textcoords="offset points")
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=ylim)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _show(figure, title, origin)


def sweep(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
    ylabel: str,
    origin: Origin,
    points: Mapping[str, Mapping[float, float]] | None = None,
) -> None:
    """One line a series over x, on a logarithmic axis; `points` are somebody else's figures: {"who": {x: y}}."""
    figure, axes = _figure()
    for name, values in series.items():
        _line(axes, x, values, name)
    for (name, found), color in zip((points or {}).items(), COLORS[len(series) :], strict=False):
        axes.plot(list(found), list(found.values()), "*", markersize=12, color=color, label=name)
    axes.legend(loc="best", frameon=False)
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log")
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.minorticks_off()
    _show(figure, title, origin)


def search(
    found: Mapping[str, Sequence[tuple[float, float, float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    value: str,
    xscale: str = "log",
) -> None:
    """One panel a way to search: a dot a trial at (x, y), y logarithmic, coloured by its third; a ring: the best."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        panels = figure.subplots(1, len(found), sharex=True, sharey=True, squeeze=False)[0]
    low = min(z for points in found.values() for *_, z in points)
    high = max(z for points in found.values() for *_, z in points)
    for axes, (name, points) in zip(panels, found.items(), strict=True):
        x, y, z = zip(*points, strict=True)
        drawn = axes.scatter(x, y, c=z, s=70, cmap="viridis", vmin=low, vmax=high)
        best = max(points, key=lambda point: point[2])
        axes.scatter(*best[:2], s=220, facecolors="none", edgecolors=COLORS[5], linewidths=2)
        axes.annotate(f"{best[2]:.0f}", best[:2], (12, 4), textcoords="offset points", color=COLORS[5], weight="bold")
        axes.set(xscale=xscale, yscale="log", xlabel=xlabel)
        axes.margins(0.1)
        axes.set_title(name, fontsize=10)
    panels[0].set_ylabel(ylabel)
    figure.colorbar(drawn, ax=panels, label=value)
    _show(figure, title, "measured")


def rungs(
    curves: Sequence[Sequence[float]],
    given: Mapping[int, int],
    at: Sequence[int],
    title: str,
    xlabel: str,
    ylabel: str,
    named: Mapping[int, str],
    ylim: tuple[float, float] | None = None,
) -> None:
    """One curve a trial against 1, 2, 3, ... on a logarithmic axis: drawn as far as it was `given` rounds, dotted beyond where it is named, with a
    cross where it was stopped; a dashed line at each rung. `named`: {trial: what the legend calls it}."""
    figure, axes = _figure(height=3.6)
    colors = dict(zip(named, (COLORS[5], COLORS[0], COLORS[2]), strict=False))
    for trial, values in enumerate(curves):
        color, end = colors.get(trial, "#b0b0b0"), given[trial]
        style = {"color": color, "zorder": 3 if trial in named else 1}
        axes.plot(range(1, end + 1), values[:end], linewidth=1.8, label=named.get(trial), **style)
        if trial in named and end < len(values):
            axes.plot(range(end, len(values) + 1), values[end - 1 :], ":", linewidth=1.8, **style)
        if end < len(values):
            axes.plot(end, values[end - 1], "x", markersize=6, **style)
    for rung in at:
        left = sum(rounds > rung for rounds in given.values())
        axes.axvline(rung, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(f"{left} go on", (rung, 1), xycoords=("data", "axes fraction"), fontsize=8, xytext=(3, -9),
                      textcoords="offset points", color="#666666", backgroundcolor=(1, 1, 1, 0.8))  # fmt: skip
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", xlim=(0.9, None), ylim=ylim)
    ticks = sorted({*at, max(map(len, curves))})
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    _show(figure, title, "measured")


def dots(groups: Mapping[str, Sequence[float]], title: str, xlabel: str, origin: Origin = "measured") -> None:
    """One row a group: a dot per run, a bar at the median, and the median's figure."""
    figure, axes = _figure(height=0.9 + 0.55 * len(groups))
    for row, (values, color) in enumerate(zip(groups.values(), COLORS, strict=False)):
        axes.plot(values, [row] * len(values), "o", color=color, alpha=0.6)
        middle = statistics.median(values)
        axes.plot([middle, middle], [row - 0.24, row + 0.24], color=color, linewidth=3)
        axes.annotate(f"{middle:.0f}", (middle, row - 0.28), color=color, ha="center", va="bottom", weight="bold")
    axes.set(xlabel=xlabel, ylim=(len(groups) - 0.4, -0.9))
    axes.set_yticks(range(len(groups)), list(groups))
    _show(figure, title, origin)


def bars(values: Mapping[str, float], title: str, xlabel: str, origin: Origin) -> None:
    """One horizontal bar a name, the largest on top, with its figure."""
    ordered = dict(sorted(values.items(), key=lambda item: item[1]))
    figure, axes = _figure(height=0.8 + 0.3 * len(ordered))
    drawn = axes.barh(list(ordered), list(ordered.values()), color=COLORS[0])
    axes.bar_label(drawn, fmt="%.0f", padding=3)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=xlabel)
    _show(figure, title, origin)


def watched(monitor: Monitor, title: str) -> None:
    """Utilization (%) above memory in use (MiB), on one axis of iterations; one line a device."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
    _readings(above, monitor, monitor.utilization())
    _readings(below, monitor, {name: [v / 2**20 for v in values] for name, values in monitor.memory().items()})
    above.set(ylabel="utilization (%)", ylim=(-3, 108))
    below.set(xlabel="iteration", ylabel="memory in use (MiB)", ylim=(0, None))
    _show(figure, title, monitor.source.origin)


def stacked(
    layers: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
    ylabel: str,
    origin: Origin,
    phases: Sequence[tuple[int, str]] = (),
) -> None:
    """Layers on top of each other, each a value at 0, 1, 2, ...; `phases` are (where it begins, its name)."""
    figure, axes = _figure(height=4.0)
    count = len(next(iter(layers.values())))
    axes.stackplot(range(count), *layers.values(), labels=list(layers), colors=COLORS, step="post", linewidth=0)
    top = 1.12 * max(map(sum, zip(*layers.values(), strict=True)))
    for (start, name), (end, _) in itertools.pairwise([*phases, (count, "")]):
        axes.axvline(start, color="#666666", linestyle=":", linewidth=1)
        if end - start > count / 15:  # or its name would run into the next one
            axes.annotate(
                name, (start, top), (3, -2), textcoords="offset points", va="top", fontsize=8, color="#444444"
            )
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)  # as they lie
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, count - 1), ylim=(0, top))
    _show(figure, title, origin)


def blocks(rows: Mapping[str, Sequence[Mapping]], title: str, origin: Origin) -> None:
    """Segments of a GPU's memory, as torch.cuda.memory_snapshot() tells them, those of {name: segments} in one row: blocks
    in use are dark, free ones pale, each with its MiB where there is room for it."""
    figure, axes = _figure(height=1.2 + 0.6 * len(rows))
    whole = max(sum(segment["total_size"] for segment in segments) for segments in rows.values()) / 2**20
    for at, segments in enumerate(rows.values()):
        start = 0.0
        for block in (block for segment in segments for block in segment["blocks"]):
            size, used = block["size"] / 2**20, block["state"] != "inactive"
            style = {"facecolor": COLORS[5] if used else "#cfe6f5", "edgecolor": "white", "linewidth": 0.8}
            kind = "in use" if used else "free"
            axes.broken_barh([(start, size)], (at - 0.32, 0.64), label=kind, **style)
            if size > whole / 30:
                axes.text(start + size / 2, at, f"{size:.0f}", ha="center", va="center", fontsize=9)
            start += size
    axes.set(xlabel="place in the reserved memory (MiB)", ylim=(len(rows) - 0.5, -0.5), xlim=(0, whole))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.grid(visible=False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    _show(figure, title, origin)


def scatter(points: Mapping[str, tuple[float, float]], title: str, xlabel: str, ylabel: str, origin: Origin) -> None:
    """A numbered dot a name at (x, y), the highest first; the names stand beside."""
    figure, axes = _figure(height=4.0)
    for number, (name, (x, y)) in enumerate(sorted(points.items(), key=lambda item: -item[1][1]), 1):
        color = COLORS[(number - 1) % len(COLORS)]
        axes.plot(x, y, "o", color=color, markersize=13, label=f"{number}  {name}")
        axes.annotate(str(number), (x, y), ha="center", va="center", fontsize=8, weight="bold", color="white")
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None), ylim=(0, None))
    axes.margins(0.08)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9, markerscale=0.6)
    _show(figure, title, origin)


def images(batch: torch.Tensor, labels: Sequence, title: str, rows: int = 1) -> None:
    """Pictures [n, 1, height, width], dark on light, each under its label."""
    columns = -(-len(batch) // rows)
    figure = Figure(figsize=(WIDTH, rows * WIDTH / columns * 1.25 + 0.5), layout="constrained")
    for axes, picture, label in zip(figure.subplots(rows, columns, squeeze=False).flat, batch, labels, strict=False):
        axes.imshow(picture[0].cpu().numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(str(label), fontsize=9)
        axes.axis("off")
    _show(figure, title, "data")


def progress(iterable: Iterable, description: str) -> Iterable:
    """tqdm's bar; none where TQDM_DISABLE is set (its notebook bar does not ask), as when outputs are compared."""
    from tqdm.auto import tqdm

    return tqdm(iterable, desc=description, disable=bool(os.environ.get("TQDM_DISABLE")))


def _figure(height: float = 3.0) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots()


def _readings(axes: Axes, monitor: Monitor, table: Mapping[str, Sequence[float]]) -> None:
    """Join the iterations in which a reading was due; one that failed (NaN) breaks the line."""
    due = sorted({iteration for iteration, _, _ in monitor.samples if iteration < len(monitor.step_times)})
    for device, values in table.items():
        _line(axes, due, [values[iteration] for iteration in due], device)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes, table)


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str) -> None:
    axes.plot(x, y, marker="o", markersize=3.5, linewidth=1.5, label=name)


def _legend(axes: Axes, series: Mapping) -> None:
    if 1 < len(series) <= len(COLORS):
        axes.legend(loc="best")


def _show(figure: Figure, title: str, origin: Origin) -> None:
    """Draw into the cell, with the title as alternative text. No pyplot: nothing stays open, nothing is shown twice."""
    figure.suptitle(textwrap.fill(title, 95), x=0.01, ha="left", weight="bold", fontsize=11)
    if origin != "data":
        figure.supxlabel(origin, x=0.99, ha="right", style="italic", color="#666666", fontsize=9)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(picture, format="png", dpi=DPI)
    said = f"Figure ({origin}): {title}"
    bundle = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": said}
    display(bundle, raw=True, metadata={"image/png": {"alt": said, "width": int(WIDTH * 100)}})
