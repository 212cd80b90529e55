"""What lesson 07 draws of its cures, and of what `virtualgpu.fit` tried."""

from collections.abc import Mapping, Sequence

from helpers.plots import figures
from helpers.plots.figures import COLORS, Origin
from virtualgpu.run.fit import picture
from virtualgpu.run.fit.search import Trial


def left(rows: Mapping[str, Sequence[float]], names: Sequence[str], title: str, xlabel: str, origin: Origin) -> None:
    """Under each other, a group of thin bars a name of `rows`, in their order; `names` are what the bars of a group are."""
    thick = 0.8 / len(names)
    with figures.drawn(title, origin, 1.0 + 0.34 * len(rows), xlabel=xlabel) as axes:
        for i, name in enumerate(names):
            places = [row + (i - (len(names) - 1) / 2) * thick for row in range(len(rows))]
            drawn = axes.barh(places, [values[i] for values in rows.values()], thick, color=COLORS[i], label=name)
            axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=8)
        figures.rows(axes, rows, grid=False)
        figures.legend_above(axes, len(names))


def fits(trials: Sequence[Trial], title: str) -> None:
    """What `virtualgpu.fit` tried: each trial's memory beside the card's, and how fast it was."""
    figure, (memory, speed) = figures.new(1.1 + 0.34 * len(trials), ncols=2, sharey=True)
    picture.draw(memory, speed, trials, COLORS)
    figures.show(figure, title, "simulated")
