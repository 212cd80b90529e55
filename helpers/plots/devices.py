"""Iteration by iteration: how busy each device was and what lay on it; and what each did when."""

import math

import matplotlib
from matplotlib.figure import Figure

from helpers.monitor import Monitor
from helpers.plots import figures
from helpers.plots.figures import COLORS, STYLE, WIDTH
from helpers.timeline import Timeline, computing
from virtualgpu.simulation.timeline import passes

KINDS = {"forward": COLORS[0], "backward": COLORS[1], "weight gradient": COLORS[5], "optimizer": COLORS[2]}
KINDS |= {"kernel": COLORS[0], "copy": "#444444"}
BELOW = {"waiting": "#AAAAAA", "communication": COLORS[3]}  # a narrow bar below the kernels
KINDS |= BELOW


def utilization(monitor: Monitor, title: str) -> None:
    """Percent in use, one line a device, iteration by iteration; a gap where nothing was read."""
    figure, axes = figures.new()
    figures.readings(axes, monitor, monitor.utilization())
    axes.set(xlabel="iteration", ylabel="utilization (%)", ylim=(-3, 108))
    figures.show(figure, title, monitor.source.origin)


def memory(monitor: Monitor, title: str, ceiling: float | None = None) -> None:
    """Memory (MiB), iteration by iteration, two lines a device: what its tensors hold at the end of an iteration, and
    what is in use as nvidia-smi tells (reserved for later tensors, too). A gap where nothing was read.

    ceiling: MiB that there are, as a dashed line."""
    figure, axes = figures.new()
    lines = {f"{device}, in use": values for device, values in monitor.memory().items()}
    held = {f"{device}, in tensors": values for device, values in monitor.allocated().items()}
    lines |= {name: values for name, values in held.items() if not all(map(math.isnan, values))}
    figures.readings(axes, monitor, {name: [value / 2**20 for value in values] for name, values in lines.items()})
    axes.set(xlabel="iteration", ylabel="memory (MiB)", ylim=(0, None if ceiling is None else 1.12 * ceiling))
    if ceiling is not None:
        axes.axhline(ceiling, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(
            f"the GPU's {ceiling:g} MiB", (1, ceiling), (-2, 2), ("axes fraction", "data"), "offset points", ha="right"
        )
        figures.legend(axes, lines)  # again: the best place is another one now
    figures.show(figure, title, monitor.source.origin)


def watched(monitor: Monitor, title: str) -> None:
    """Utilization (%) above memory in use (MiB), on one axis of iterations; one line a device."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
    figures.readings(above, monitor, monitor.utilization())
    figures.readings(below, monitor, {name: [v / 2**20 for v in values] for name, values in monitor.memory().items()})
    above.set(ylabel="utilization (%)", ylim=(-3, 108))
    below.set(xlabel="iteration", ylabel="memory in use (MiB)", ylim=(0, None))
    figures.show(figure, title, monitor.source.origin)


def timeline(timeline: Timeline, title: str, until: float | None = None, xlabel: str = "time (ms)") -> None:
    """What each device did when, one row a device: bars by kind of work, and the share of the time it was computing. In a
    pipeline each bar has its micro-batch's number; it is pale for the second of a device's stages. Numbered collectives have theirs.

    until: seconds at which the axis ends, so that two pictures compare."""
    figure, axes = figures.new(height=1.2 + 0.55 * len(timeline.rows))
    for at, spans in enumerate(timeline.rows.values()):
        for kind, color in KINDS.items():
            bars = [(span.start * 1e3, (span.end - span.start) * 1e3) for span in spans if span.kind == kind]
            place = (at + 0.38, 0.1) if kind in BELOW else (at - 0.36, 0.72)
            axes.broken_barh(bars, place, color=color, label=kind if bars else None)
        for start, end, stage, number in passes(spans):
            style = {"facecolor": (1, 1, 1, 0.4 * min(stage, 1)), "edgecolor": "white", "linewidth": 0.5}
            axes.broken_barh([(start * 1e3, (end - start) * 1e3)], (at - 0.36, 0.72), **style)
            if end - start > timeline.seconds / 80:  # two digits are as wide
                axes.text((start + end) * 500, at, number, fontsize=7, ha="center", va="center")
        for span in (span for span in spans if span.kind == "communication" and span.annotation.isdecimal()):
            axes.text((span.start + span.end) * 500, at + 0.24, span.annotation, fontsize=8, ha="center", va="center")
            axes.vlines(span.start * 1e3, at + 0.38, at + 0.48, color="white", linewidth=1.5)
        what = "computing" if any(s.kind in BELOW for s in spans) else "busy"  # NCCL's kernels keep a GPU busy, too
        busy = f"{100 * computing(spans) / timeline.seconds:.0f} % {what}"
        axes.annotate(busy, (1.01, at), xycoords=("axes fraction", "data"), va="center")
    axes.set(xlabel=xlabel, xlim=(0, (until or timeline.seconds) * 1e3), ylim=(len(timeline.rows) - 0.5, -0.5))
    axes.set_yticks(range(len(timeline.rows)), list(timeline.rows))
    axes.grid(axis="y", visible=False)
    axes.xaxis.get_major_locator().set_params(integer=timeline.origin == "data")  # slots are counted
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    figures.show(figure, title, timeline.origin)
