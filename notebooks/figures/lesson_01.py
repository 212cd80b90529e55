"""What lesson 01 shows of its images."""

from collections.abc import Sequence

import torch

from helpers.plots import figures
from helpers.plots.figures import WIDTH


def images(batch: torch.Tensor, labels: Sequence, title: str, rows: int = 1) -> None:
    """Pictures [n, 1 or 3, height, width] from 0 to 1, each under its label; gray ones dark on light."""
    columns = -(-len(batch) // rows)
    figure, grid = figures.new(rows * WIDTH / columns * 1.25 + 0.5, nrows=rows, ncols=columns, squeeze=False)
    for axes, picture, label in zip(grid.flat, batch, labels, strict=False):
        axes.imshow(picture.cpu().permute(1, 2, 0).squeeze(2).numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(str(label), fontsize=9)
        axes.axis("off")
    figures.show(figure, title, "data")
