"""Iteration by iteration: how busy each device was; and what each did when."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from helpers.plots import figures
from helpers.plots.figures import COLORS
from virtualgpu.monitor import Monitor
from virtualgpu.timeline import Timeline, computing, drawn_as, passes

KINDS = {"forward": COLORS[0], "backward": COLORS[1], "weight gradient": COLORS[5], "optimizer": COLORS[2]}
KINDS |= {"kernel": COLORS[0], "copy": "#444444"}
BELOW = {"waiting": "#AAAAAA", "communication": COLORS[3]}  # a narrow bar below the kernels
BELOW |= {"all-gather": "#882255", "reduce-scatter": COLORS[4]}
KINDS |= BELOW
NAMES = (
    "forward, backward, weight gradient, optimizer, kernel, copy, waiting, communication, all-gather, reduce-scatter"
)
LEGEND = dict(zip(KINDS, NAMES.split(", "), strict=True))  # the engine's word: what the reader sees


def utilization(monitor: Monitor, title: str) -> None:
    """Percent in use, one line a device, iteration by iteration, over those in which a reading was due; one that failed is a gap."""
    due = sorted({iteration for iteration, _ in monitor.samples if iteration < len(monitor.step_times)})
    axis = {"xlabel": "iteration", "ylabel": "utilization (%)", "ylim": (-3, 108)}
    with figures.drawn(title, monitor.source.origin, 3.0, **axis) as axes:
        rows = monitor.utilization()
        figures.lines(axes, due, {device: [rows[device][iteration] for iteration in due] for device in rows})
        axes.xaxis.get_major_locator().set_params(integer=True)


def timeline(
    timeline: Timeline,
    title: str,
    until: float | None = None,
    xlabel: str = "time (ms)",
    phases: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """What each device did when, one row a device: bars by kind of work, and the share of the time it was computing. In a
    pipeline each bar has its micro-batch's number; it is pale for the second of a device's stages. Numbered collectives have theirs.

    until: seconds at which the axis ends, so that two pictures compare. phases: names written on the picture, from when to when."""
    end = (until or timeline.seconds) * 1e3
    with figures.drawn(title, timeline.origin, 1.2 + 0.55 * len(timeline.rows), xlabel=xlabel, xlim=(0, end)) as axes:
        _draw(axes, timeline)
        for number, (name, (start, finish)) in enumerate((phases or {}).items()):
            axes.axvspan(start * 1e3, finish * 1e3, color="#000000", alpha=0.05 * (number % 2), linewidth=0)
            axes.text((start + finish) * 500, -0.45, name, fontsize=8, ha="center", va="bottom")
        figures.legend_above(axes, 4)


def timelines(several: Mapping[str, Timeline], title: str, xlabel: str = "time (ms)") -> None:
    """As `timeline`, several below each other on one axis, so that they compare; each beside its name."""
    rows = [len(timeline.rows) for timeline in several.values()]
    figure, all_axes = figures.new(1.3 + 0.5 * sum(rows), nrows=len(rows), sharex=True, height_ratios=rows)
    for axes, (name, timeline) in zip(all_axes, several.items(), strict=True):
        _draw(axes, timeline)
        axes.set_ylabel(name)
    names: dict = {}
    for axes in all_axes:
        names |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    all_axes[0].legend(names.values(), names, **place, ncols=len(names), frameon=False)
    axes.set(xlabel=xlabel, xlim=(0, 1e3 * max(timeline.seconds for timeline in several.values())))
    figures.show(figure, title, timeline.origin)


def _draw(axes: Axes, timeline: Timeline) -> None:
    """A row a device, in milliseconds."""
    for row, spans in enumerate(timeline.rows.values()):
        for kind, color in KINDS.items():
            bars = [(span.start * 1e3, (span.end - span.start) * 1e3) for span in spans if drawn_as(span) == kind]
            place = (row + 0.38, 0.1) if kind in BELOW else (row - 0.36, 0.72)
            axes.broken_barh(bars, place, color=color, label=LEGEND[kind] if bars else None)
        for start, end, stage, number, way in passes(spans):
            style = {"facecolor": (1, 1, 1, 0.4 * min(stage, 1)), "edgecolor": "white", "linewidth": 0.5}
            axes.broken_barh([(start * 1e3, (end - start) * 1e3)], (row - 0.36, 0.72), **style)
            if end - start > timeline.seconds / (50 if len(str(number)) > 1 else 80):  # as wide as the digits
                ink = "white" if way == "F" and not stage else "black"  # on dark blue
                axes.text((start + end) * 500, row, number, fontsize=7, ha="center", va="center", color=ink)
        for span in spans:
            if span.kind == "communication" and span.annotation.isdecimal():
                middle = (span.start + span.end) * 500
                axes.text(middle, row + 0.24, span.annotation, fontsize=8, ha="center", va="center")
                axes.vlines(span.start * 1e3, row + 0.38, row + 0.48, color="white", linewidth=1.5)
        share = f"{100 * computing(spans) / timeline.seconds:.0f} % computing"  # a GPU that copies is busy, too
        axes.annotate(share, (1.01, row), xycoords=("axes fraction", "data"), va="center")
    figures.rows(axes, timeline.rows, grid=False)
    axes.xaxis.get_major_locator().set_params(integer=timeline.origin == "data")  # slots are counted
