"""Matrices drawn to scale, with what lies where: which piece of a weight a rank has."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch, Rectangle

from helpers.plots import figures
from helpers.plots.figures import COLORS

Pieces = Sequence[Sequence[int | None]]  # rows of pieces: the rank that each is on; None: on none that is shown


def matrices(rows: Mapping[str, Mapping[str, tuple[int, int, Pieces]]], title: str, rank: str = "rank") -> None:
    """{row: {name: (inputs, outputs, pieces)}}: a matrix has its inputs downwards and its outputs to the right."""
    sizes = [matrix[:2] for row in rows.values() for matrix in row.values()]
    gap, word = max(across for _, across in sizes) * 0.2, max(max(size) for size in sizes) * 0.6
    heights = [max(down for down, *_ in row.values()) for row in rows.values()]
    figure, axes = figures.new(height=0.7 + 1.7 * len(rows))
    right, top, ranks = 0.0, 0.0, set()
    for (name, row), height in zip(rows.items(), heights, strict=True):
        x = 0.0
        axes.text(-gap, top + height / 2, name, ha="right", va="center")
        for label, (down, across, pieces) in row.items():
            for i, line in enumerate(pieces):
                for j, owner in enumerate(line):
                    h, w = down / len(pieces), across / len(line)
                    color = "#eeeeee" if owner is None else COLORS[owner]
                    axes.add_patch(Rectangle((x + j * w, top + i * h), w, h, facecolor=color, edgecolor="white"))
                    ranks |= {owner} - {None}
            words = f"{label}\n{down:,} x {across:,}"
            axes.text(x + across / 2, top - 0.1 * word, words, ha="center", va="bottom", fontsize=8)
            x += max(across, word) + gap
        right, top = max(right, x), top + height + word
    if rank:
        handles = [Patch(color=COLORS[number], label=f"{rank} {number}") for number in sorted(ranks)]
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.set(xlim=(-gap, right), ylim=(top - 0.9 * word, -0.8 * word), aspect="equal")
    axes.axis("off")
    figures.show(figure, title, "data")
