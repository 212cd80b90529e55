"""What lesson 01 shows: its images, and which parts of a reused network a training step changes."""

from collections.abc import Sequence

import torch
from matplotlib.patches import Patch

from helpers.plots import figures
from helpers.plots.figures import COLORS, WIDTH, Origin

PARTS = ["backbone: weights", "backbone: running averages", "head"]
KINDS = {
    "pretrained, stays": "#dddddd",
    "pretrained, moved by its gradient": COLORS[4],
    "moved by every batch in train(), without a gradient": COLORS[1],
    "new, moved by its gradient": COLORS[2],
}
STAYS, TUNED, AVERAGED, NEW = KINDS
WAYS = {
    "requires_grad = False": [STAYS, AVERAGED, NEW],
    "and eval()": [STAYS, STAYS, NEW],
    "fine-tuned": [TUNED, AVERAGED, NEW],
    "from scratch": [NEW, AVERAGED, NEW],
}


def images(batch: torch.Tensor, labels: Sequence, title: str, rows: int = 1, origin: Origin = "data") -> None:
    """Pictures [n, 1 or 3, height, width] from 0 to 1, each under its label; gray ones dark on light."""
    columns = -(-len(batch) // rows)
    figure, grid = figures.new(rows * WIDTH / columns * 1.25 + 0.5, nrows=rows, ncols=columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, picture, label in zip(grid.flat, batch, labels, strict=False):
        axes.imshow(picture.cpu().permute(1, 2, 0).squeeze(2).numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(str(label), fontsize=9)
    figures.show(figure, title, origin)


def freezing(title: str) -> None:
    """The parts of a reused network, a row a way to train it, in the color of what a step does to them."""
    with figures.drawn(title, "data", 3.0, xlim=(0, 10)) as axes:
        figures.rows(axes, WAYS, grid=False)
        for row, kinds in enumerate(WAYS.values()):
            for part, kind, left, width in zip(PARTS, kinds, (0, 4, 8), (3.9, 3.9, 2), strict=True):
                axes.barh(row, width, 0.66, left, color=KINDS[kind])
                axes.text(left + width / 2, row, part, ha="center", va="center", fontsize=9)
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        handles = [Patch(color=color, label=kind) for kind, color in KINDS.items()]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.45, 0), ncols=2, frameon=False, fontsize=9)
