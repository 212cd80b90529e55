"""Searches for hyper-parameters: where trials were made, and how far each was given."""

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure

from helpers.plots import figures
from helpers.plots.figures import COLORS, STYLE, WIDTH


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
    figures.show(figure, title, "measured")


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
    figure, axes = figures.new(height=3.6)
    colors = dict(zip(named, (COLORS[5], COLORS[0], COLORS[2]), strict=False))
    for trial, values in enumerate(curves):
        color, end = colors.get(trial, "#b0b0b0"), given[trial]
        style = {"color": color, "zorder": 3 if trial in named else 1}
        beyond = trial in named and end < len(values)
        axes.plot(range(1, end + 1), values[:end], linewidth=1.8, label=None if beyond else named.get(trial), **style)
        if beyond:
            axes.plot(range(end, len(values) + 1), values[end - 1 :], ":", linewidth=1.8, label=named[trial], **style)
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
    figures.show(figure, title, "measured")
