"""What a GPU's memory holds over a step."""

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
    top: float | None = None,
) -> None:
    """Layers on top of each other, each a value at 0, 1, 2, ...; of thousands, each column of pixels shows those of the highest sum, for a
    short peak would be too thin to see. `phases` are (where it begins, its name), `top` the axis's end."""
    sums = [sum(values) for values in zip(*layers.values(), strict=True)]
    count, top = len(sums), top or 1.12 * max(sums)
    starts = [*range(0, count, -(-count // 600)), count - 1]  # a figure has about 600 columns
    shown = [max(range(a, max(b, a + 1)), key=sums.__getitem__) for a, b in itertools.pairwise([*starts, count])]
    with figures.drawn(title, origin, 4.0, xlabel=xlabel, ylabel=ylabel, xlim=(0, count - 1), ylim=(0, top)) as axes:
        values = [[layer[at] for at in shown] for layer in layers.values()]
        axes.stackplot(starts, *values, labels=list(layers), colors=COLORS, step="post", linewidth=0)
        for (start, name), (end, _) in itertools.pairwise([*phases, (count, "")]):
            axes.axvline(start, color="#666666", linestyle=":", linewidth=1)
            if end - start > count / 15:  # or its name would run into the next one
                axes.annotate(name, (start, top), (3, -2), textcoords="offset points", va="top", size=7, color="#444")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)  # as they lie
