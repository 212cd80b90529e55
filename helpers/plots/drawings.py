"""Matrices drawn to scale, with what lies where: which piece of a weight a rank has."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch, Rectangle

from helpers.plots import figures
from helpers.plots.figures import COLORS

Pieces = Sequence[Sequence[int | None]]  # rows of pieces: the rank that each is on; None: on none that is shown


def matrices(rows: Mapping[str, Mapping[str, tuple[int, int, Pieces]]], title: str, rank: str = "rank") -> None:
    """{row: {name: (inputs, outputs, pieces)}}: a matrix has its inputs downwards and its outputs to the right."""
    sizes = [matrix[:2] for row in rows.values() for matrix in row.values()]
    height, gap = max(down for down, _ in sizes), max(across for _, across in sizes) * 0.25
    figure, axes = figures.new(height=0.7 + 1.7 * len(rows))
    right, ranks = 0.0, set()
    for at, (name, row) in enumerate(rows.items()):
        x, top = 0.0, at * 1.75 * height
        axes.text(-gap, top + height / 2, name, ha="right", va="center")
        for label, (down, across, pieces) in row.items():
            for i, line in enumerate(pieces):
                for j, owner in enumerate(line):
                    h, w = down / len(pieces), across / len(line)
                    color = "#eeeeee" if owner is None else COLORS[owner]
                    axes.add_patch(Rectangle((x + j * w, top + i * h), w, h, facecolor=color, edgecolor="white"))
                    ranks |= {owner} - {None}
            words = f"{label}\n{down:,} x {across:,}"
            axes.text(x + across / 2, top - 0.08 * height, words, ha="center", va="bottom", fontsize=8)
            x += max(across, 0.45 * height) + gap
        right = max(right, x)
    if rank:
        handles = [Patch(color=COLORS[number], label=f"{rank} {number}") for number in sorted(ranks)]
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    bottom = (len(rows) - 1) * 1.75 * height + 1.1 * height
    axes.set(xlim=(-gap, right), ylim=(bottom, -0.6 * height), aspect="equal")
    axes.axis("off")
    figures.show(figure, title, "data")
