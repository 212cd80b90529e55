"""What lesson 06 shows of the allocator: its blocks, side by side."""

from collections.abc import Mapping, Sequence

from helpers.plots import figures
from helpers.plots.figures import COLORS, Origin

STATES = ("in use", COLORS[5]), ("free", "#cfe6f5")


def blocks(rows: Mapping[str, Sequence[Mapping]], title: str, origin: Origin) -> None:
    """Segments of a GPU's memory, as torch.cuda.memory_snapshot() tells them, those of {name: segments} in one row: blocks
    in use are dark, free ones pale, each with its MiB where there is room for it."""
    whole = max(sum(segment["total_size"] for segment in segments) for segments in rows.values()) / 2**20
    settings = {"xlabel": "place in the reserved memory (MiB)", "xlim": (0, whole)}
    with figures.drawn(title, origin, 1.2 + 0.6 * len(rows), **settings) as axes:
        for row, segments in enumerate(rows.values()):
            start = 0.0
            for block in (block for segment in segments for block in segment["blocks"]):
                size, (kind, color) = block["size"] / 2**20, STATES[block["state"] == "inactive"]
                style = {"facecolor": color, "edgecolor": "white", "linewidth": 0.8}
                axes.broken_barh([(start, size)], (row - 0.32, 0.64), label=kind, **style)
                if size > whole / 30:
                    axes.text(start + size / 2, row, f"{size:.0f}", ha="center", va="center", fontsize=9)
                start += size
        figures.rows(axes, rows)
        axes.grid(visible=False)
        figures.legend_above(axes, 2)
