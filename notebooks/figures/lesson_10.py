"""Matrices drawn to scale, with what lies where: which piece of a weight a rank has."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch, Rectangle

from helpers.plots import figures
from helpers.plots.figures import COLORS

Pieces = Sequence[Sequence[int | None]]  # rows of pieces: the rank that each is on; None: on none that is shown


def matrices(rows: Mapping[str, Mapping[str, tuple[int, int, Pieces]]], title: str, rank: str = "rank") -> None:
    """{row: {name: (inputs, outputs, pieces)}}: a matrix has its inputs downwards and its outputs to the right.

    rank: what a number in `pieces` stands for; "" for no legend."""
    sizes = [matrix[:2] for row in rows.values() for matrix in row.values()]
    gap, label_size = max(outputs for _, outputs in sizes) * 0.2, max(max(size) for size in sizes) * 0.6
    right, top, ranks = 0.0, 0.0, set()
    with figures.drawn(title, "data", 0.7 + 1.7 * len(rows)) as axes:
        for row_name, row in rows.items():
            x, row_height = 0.0, max(inputs for inputs, *_ in row.values())
            axes.text(-gap, top + row_height / 2, row_name, ha="right", va="center")
            for name, (inputs, outputs, pieces) in row.items():
                for i, line in enumerate(pieces):
                    for j, owner in enumerate(line):
                        height, width = inputs / len(pieces), outputs / len(line)
                        style = {"facecolor": "#eeeeee" if owner is None else COLORS[owner], "edgecolor": "white"}
                        axes.add_patch(Rectangle((x + j * width, top + i * height), width, height, **style))
                        ranks |= {owner} - {None}
                words = f"{name}\n{inputs:,} x {outputs:,}"
                axes.text(x + outputs / 2, top - 0.1 * label_size, words, ha="center", va="bottom", fontsize=8)
                x += max(outputs, label_size) + gap
            right, top = max(right, x), top + row_height + label_size
        if rank:
            handles = [Patch(color=COLORS[number], label=f"{rank} {number}") for number in sorted(ranks)]
            axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axes.set(xlim=(-gap, right), ylim=(top - 0.9 * label_size, -0.8 * label_size), aspect="equal")
        axes.axis("off")
