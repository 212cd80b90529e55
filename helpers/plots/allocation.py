"""What a GPU's memory holds: layers over a step, and blocks side by side."""

import itertools
from collections.abc import Mapping, Sequence

from helpers.plots import figures
from helpers.plots.figures import COLORS, Origin


def stacked(
    layers: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
    ylabel: str,
    origin: Origin,
    phases: Sequence[tuple[int, str]] = (),
) -> None:
    """Layers on top of each other, each a value at 0, 1, 2, ...; `phases` are (where it begins, its name)."""
    figure, axes = figures.new(height=4.0)
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
    figures.show(figure, title, origin)


def blocks(rows: Mapping[str, Sequence[Mapping]], title: str, origin: Origin) -> None:
    """Segments of a GPU's memory, as torch.cuda.memory_snapshot() tells them, those of {name: segments} in one row: blocks
    in use are dark, free ones pale, each with its MiB where there is room for it."""
    figure, axes = figures.new(height=1.2 + 0.6 * len(rows))
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
    figures.show(figure, title, origin)
