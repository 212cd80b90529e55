"""Every figure's style in one place. Each states its finding in the title, its units on the axes, and whether its
numbers were *measured* or *simulated*. The same words become the picture's alternative text."""

import base64
import io
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


def memory(monitor: Monitor, title: str) -> None:
    """Memory (MiB), iteration by iteration, two lines a device: what its tensors hold at the end of an iteration, and
    what is in use as nvidia-smi tells (reserved for later tensors, too). A gap where nothing was read."""
    figure, axes = _figure()
    lines = {f"{device}, in use": values for device, values in monitor.memory().items()}
    held = {f"{device}, in tensors": values for device, values in monitor.allocated().items()}
    lines |= {name: values for name, values in held.items() if not all(map(math.isnan, values))}
    _readings(axes, monitor, {name: [value / 2**20 for value in values] for name, values in lines.items()})
    axes.set(xlabel="iteration", ylabel="memory (MiB)", ylim=(0, None))
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
) -> None:
    """One line a series against 1, 2, 3, ...; `mark` puts a vertical line at that x."""
    figure, axes = _figure()
    for name, values in series.items():
        _line(axes, range(1, len(values) + 1), values, name)
    _legend(axes, series)
    if mark is not None:
        axes.axvline(mark, color="#888888", linestyle="--", linewidth=1)
    axes.set(xlabel=xlabel, ylabel=ylabel)
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
    found: Mapping[str, Sequence[tuple[float, float, float]]], title: str, xlabel: str, ylabel: str, value: str
) -> None:
    """One panel a way to search: a dot a trial at (x, y), both logarithmic, coloured by its third; a ring: the best."""
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
        axes.annotate(f"{best[2]:.0f}", best[:2], (12, -14), textcoords="offset points", color=COLORS[5], weight="bold")
        axes.set(xscale="log", xlabel=xlabel)
        axes.set_yscale("log", base=2)
        axes.margins(0.1)
        axes.set_title(name, fontsize=10)
    panels[0].set_ylabel(ylabel)
    panels[0].yaxis.set_major_formatter("{x:g}")
    figure.colorbar(drawn, ax=panels, label=value)
    _show(figure, title, "measured")


def dots(groups: Mapping[str, Sequence[float]], title: str, xlabel: str, origin: Origin = "measured") -> None:
    """One row a group: a dot per run, a bar at the median, and the median's figure."""
    figure, axes = _figure(height=0.9 + 0.55 * len(groups))
    for row, (values, color) in enumerate(zip(groups.values(), COLORS, strict=False)):
        axes.plot(values, [row] * len(values), "o", color=color, alpha=0.6)
        middle = statistics.median(values)
        axes.plot([middle, middle], [row - 0.3, row + 0.3], color=color, linewidth=3)
        axes.annotate(f"{middle:.0f}", (middle, row - 0.36), color=color, ha="center", va="bottom", weight="bold")
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
