"""Lines, bars, dots and pictures."""

import statistics
from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure

from helpers.plots import figures
from helpers.plots.figures import COLORS, WIDTH, Origin


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
    figure, axes = figures.new()
    for name, values in series.items():
        figures.line(axes, range(1, len(values) + 1), values, name)
    figures.legend(axes, series)
    if mark is not None:
        axes.axvline(mark, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(marked, (mark, 0.02), (4, 2), xycoords=("data", "axes fraction"), textcoords="offset points")
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=ylim)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figures.show(figure, title, origin)


def sweep(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
    ylabel: str,
    origin: Origin,
    points: Mapping[str, Mapping[float, float]] | None = None,
    ylim: tuple[float, float | None] | None = None,
) -> None:
    """One line a series over x, on a logarithmic axis; `points` are somebody else's figures: {"who": {x: y}}."""
    figure, axes = figures.new()
    for name, values in series.items():
        figures.line(axes, x, values, name)
    for (name, found), color in zip((points or {}).items(), COLORS[len(series) :], strict=False):
        axes.plot(list(found), list(found.values()), "*", markersize=12, color=color, label=name)
    # a legend of many names would hide what it names
    crowded = len(series) + len(points or {}) > 4
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if crowded else {"loc": "best"}
    axes.legend(**beside, frameon=False)
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", ylim=ylim)
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.minorticks_off()
    figures.show(figure, title, origin)


def dots(groups: Mapping[str, Sequence[float]], title: str, xlabel: str, origin: Origin = "measured") -> None:
    """One row a group: a dot per run, a bar at the median, and the median's figure."""
    figure, axes = figures.new(height=0.9 + 0.55 * len(groups))
    for row, (values, color) in enumerate(zip(groups.values(), COLORS, strict=False)):
        axes.plot(values, [row] * len(values), "o", color=color, alpha=0.6)
        middle = statistics.median(values)
        axes.plot([middle, middle], [row - 0.24, row + 0.24], color=color, linewidth=3)
        axes.annotate(f"{middle:.0f}", (middle, row - 0.28), color=color, ha="center", va="bottom", weight="bold")
    axes.set(xlabel=xlabel, ylim=(len(groups) - 0.4, -0.9))
    axes.set_yticks(range(len(groups)), list(groups))
    figures.show(figure, title, origin)


def bars(values: Mapping[str, float], title: str, xlabel: str, origin: Origin, kept: bool = False) -> None:
    """One horizontal bar a name, the largest on top, with its figure. kept: in the order given, the first on top, with a color
    for what stands before a name's comma."""
    ordered = dict(reversed(values.items()) if kept else sorted(values.items(), key=lambda item: item[1]))
    kinds = [*dict.fromkeys(name.split(",")[0] for name in values)] if kept else []
    figure, axes = figures.new(height=0.8 + 0.3 * len(ordered))
    colors = [COLORS[kinds.index(name.split(",")[0]) if kept else 0] for name in ordered]
    drawn = axes.barh(list(ordered), list(ordered.values()), color=colors)
    axes.bar_label(drawn, fmt="%.0f", padding=3)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=xlabel)
    figures.show(figure, title, origin)


def scatter(points: Mapping[str, tuple[float, float]], title: str, xlabel: str, ylabel: str, origin: Origin) -> None:
    """A numbered dot a name at (x, y), the highest first; the names stand beside."""
    figure, axes = figures.new(height=4.0)
    for number, (name, (x, y)) in enumerate(sorted(points.items(), key=lambda item: -item[1][1]), 1):
        color = COLORS[(number - 1) % len(COLORS)]
        axes.plot(x, y, "o", color=color, markersize=13, label=f"{number}  {name}")
        axes.annotate(str(number), (x, y), ha="center", va="center", fontsize=8, weight="bold", color="white")
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None), ylim=(0, None))
    axes.margins(0.08)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9, markerscale=0.6)
    figures.show(figure, title, origin)


def images(batch: torch.Tensor, labels: Sequence, title: str, rows: int = 1) -> None:
    """Pictures [n, 1 or 3, height, width] from 0 to 1, each under its label; gray ones dark on light."""
    columns = -(-len(batch) // rows)
    figure = Figure(figsize=(WIDTH, rows * WIDTH / columns * 1.25 + 0.5), layout="constrained")
    for axes, picture, label in zip(figure.subplots(rows, columns, squeeze=False).flat, batch, labels, strict=False):
        axes.imshow(picture.cpu().permute(1, 2, 0).squeeze(2).numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(str(label), fontsize=9)
        axes.axis("off")
    figures.show(figure, title, "data")
