"""What a GPU's memory holds: layers over a step, blocks side by side, and what `virtualgpu.fit` tried beside its end."""

import itertools
from collections.abc import Mapping, Sequence

from helpers.plots import figures
from helpers.plots.figures import COLORS, Origin
from virtualgpu.run.fit import picture
from virtualgpu.run.fit.search import Trial

STATES = ("in use", COLORS[5]), ("free", "#cfe6f5")


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


def fits(trials: Sequence[Trial], title: str) -> None:
    """What `virtualgpu.fit` tried: each trial's memory beside the card's, and how fast it was."""
    figure, (memory, speed) = figures.new(1.1 + 0.34 * len(trials), ncols=2, sharey=True)
    picture.draw(memory, speed, trials, COLORS)
    figures.show(figure, title, "simulated")
