"""Lines, layers, dots and bars."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from helpers.plots import figures
from helpers.plots.figures import COLORS, Origin


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
    with figures.drawn(title, origin, xlabel=xlabel, ylabel=ylabel, ylim=ylim) as axes:
        figures.lines(axes, range(1, 1 + max(map(len, series.values()))), series)
        if mark is not None:
            axes.axvline(mark, color="#888888", linestyle="--", linewidth=1)
            axes.annotate(marked, (mark, 0.02), (4, 2), xycoords=("data", "axes fraction"), textcoords="offset points")
        axes.xaxis.get_major_locator().set_params(integer=True)


def sweep(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
    ylabel: str,
    origin: Origin,
    points: Mapping[str, Mapping[float, float]] | None = None,
    ylim: tuple[float, float | None] | None = None,
    xscale: str = "log",
) -> None:
    """One line a series over x, on a logarithmic axis or a linear one; `points` are somebody else's figures, {"who": {x: y}}, in a
    line's color where "who" ends with its name."""
    points = points or {}
    with figures.drawn(title, origin, ylabel=ylabel, ylim=ylim) as axes:
        figures.lines(axes, x, series)
        for (name, values), spare in zip(points.items(), COLORS[len(series) :], strict=False):
            color = next((color for line, color in zip(series, COLORS, strict=False) if name.endswith(line)), spare)
            axes.plot(list(values), list(values.values()), "*", markersize=12, color=color, label=name)
        crowded = len(series) + len(points) > 4  # a legend of many names would hide what it names
        where = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if crowded else {"loc": "best"}
        axes.legend(**where, frameon=False)
        axes.set(xlabel=xlabel, xscale=xscale)
        figures.ticks(axes, x)


def stacked(
    layers: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
    ylabel: str,
    origin: Origin,
    phases: Sequence[tuple[int, str]] = (),
    top: float | None = None,
) -> None:
    """Layers on top of each other, each a value at 0, 1, 2, ...; of thousands, each column of pixels shows those of the highest sum, for a
    short peak would be too thin to see. `phases` are (where it begins, its name), `top` the axis's end."""
    sums = [sum(values) for values in zip(*layers.values(), strict=True)]
    count, top = len(sums), top or 1.12 * max(sums)
    starts = [*range(0, count, -(-count // 600)), count - 1]  # a figure has about 600 columns
    shown = [max(range(a, max(b, a + 1)), key=sums.__getitem__) for a, b in itertools.pairwise([*starts, count])]
    with figures.drawn(title, origin, 4.0, xlabel=xlabel, ylabel=ylabel, xlim=(0, count - 1), ylim=(0, top)) as axes:
        values = [[layer[at] for at in shown] for layer in layers.values()]
        axes.stackplot(starts, *values, labels=list(layers), colors=COLORS, step="post", linewidth=0)
        for (start, name), (end, _) in itertools.pairwise([*phases, (count, "")]):
            axes.axvline(start, color="#666666", linestyle=":", linewidth=1)
            if end - start > count / 15:  # or its name would run into the next one
                axes.annotate(name, (start, top), (3, -2), textcoords="offset points", va="top", size=7, color="#444")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)  # as they lie


def dots(groups: Mapping[str, Sequence[float]], title: str, xlabel: str, origin: Origin = "measured") -> None:
    """One row a group: a dot per run, a bar at the median, and the median's figure."""
    with figures.drawn(title, origin, 0.9 + 0.55 * len(groups), xlabel=xlabel, ylim=(len(groups) - 0.4, -0.9)) as axes:
        figures.rows(axes, groups)
        for row, (values, color) in enumerate(zip(groups.values(), COLORS, strict=False)):
            axes.plot(values, [row] * len(values), "o", color=color, alpha=0.6)
            middle = statistics.median(values)
            axes.plot([middle, middle], [row - 0.24, row + 0.24], color=color, linewidth=3)
            axes.annotate(f"{middle:.0f}", (middle, row - 0.28), color=color, ha="center", va="bottom", weight="bold")


def bars(values: Mapping[str, float], title: str, xlabel: str, origin: Origin, kept: bool = False) -> None:
    """One horizontal bar a name, the largest on top, with its figure. kept: in the order given, the first on top, with a color
    for what stands before a name's comma."""
    ordered = dict([*values.items()][::-1] if kept else sorted(values.items(), key=lambda item: item[1]))
    kinds = [*dict.fromkeys(name.split(",")[0] for name in values)] if kept else []
    colors = [COLORS[kinds.index(name.split(",")[0]) if kept else 0] for name in ordered]
    with figures.drawn(title, origin, 0.8 + 0.3 * len(ordered), xlabel=xlabel) as axes:
        axes.bar_label(axes.barh(list(ordered), list(ordered.values()), color=colors), fmt="%.0f", padding=3)
        axes.grid(axis="y", visible=False)
