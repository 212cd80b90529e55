"""A rank that waits for one that has left, as a picture of what both GPUs did."""

from collections.abc import Sequence

from helpers.plots import figures
from helpers.plots.devices import KINDS
from virtualgpu import Timeline
from virtualgpu.timeline import drawn_as


def left_alone(spans: Sequence[Sequence], title: str) -> None:
    """Of two ranks what each one's recording() held: the first has left its loop, the second waits for it. Simulated."""
    rows = Timeline.of_ranks(spans, origin="simulated").rows
    edge = 1.35e3 * max(span.end for own in rows.values() for span in own)
    settings = {"xlabel": "time (ms)", "xlim": (0, edge), "ylim": (1.6, -0.75)}
    with figures.drawn(title, "simulated", 2.5, **settings) as axes:
        for row, own in enumerate(rows.values()):
            for kind in ("forward", "backward", "communication"):
                bars = [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in own if drawn_as(span) == kind]
                place = (row + 0.38, 0.1) if kind == "communication" else (row - 0.36, 0.72)
                axes.broken_barh(bars, place, color=KINDS[kind], label=kind if bars else None)
        left, waits = (1e3 * max(span.end for span in own) for own in rows.values())
        words = {"va": "center", "ha": "center", "fontsize": 9}
        axes.text((left + edge) / 2, 0, "out of batches, out of the loop", style="italic", **words)
        hatched = {"facecolor": "#EEEEEE", "edgecolor": "#AAAAAA", "hatch": "///", "linewidth": 0}
        axes.broken_barh([(waits, edge - waits)], (0.64, 0.72), **hatched)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axes.text((waits + edge) / 2, 1, "waits for rank 0", bbox=box, **words)
        axes.set_yticks(range(2), list(rows))
        axes.grid(visible=False, axis="y")
        figures.legend_above(axes, 3)
