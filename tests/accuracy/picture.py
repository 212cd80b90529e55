"""Published against simulated, drawn: a point for each row, measured over simulated, by kind, with bands of 15 and 30 %."""

import itertools
from pathlib import Path
from statistics import median

from tests.accuracy.published import TITLES, Row
from tests.accuracy.table import KINDS, by, kind

BANDS = {30: "#e8eef5", 15: "#c5d5e8"}
MARKERS = "o^s"  # of more sources than there are colours
TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5)


def of_source(row: Row) -> str:
    return row.group


def draw(rows: list[Row], path: Path) -> None:
    """A PNG; a row's source has a place of its own across, so that what it has in common is seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = by(rows, kind, KINDS)
    if not groups:
        return
    judged = [row for group in groups.values() for row in group]
    looks = itertools.product(MARKERS, pyplot.get_cmap("tab20").colors)
    looks = {
        source: {"marker": marker, "color": colour}
        for source, (marker, colour) in zip(by(judged, of_source, TITLES), looks, strict=False)
    }
    medians = [median(row.factor for row in group) for group in groups.values()]
    figure, axis = pyplot.subplots(figsize=(11, 6.5), layout="constrained")
    for percent, colour in BANDS.items():
        axis.axhspan(1 / (1 + percent / 100), 1 + percent / 100, color=colour, zorder=0)
    axis.axhline(1, color="black", linewidth=0.8)
    for at, group in enumerate(groups.values()):
        here = by(group, of_source, TITLES)
        for place, (source, chosen) in enumerate(here.items()):
            factors = sorted(row.factor for row in chosen)
            across, width = at + 0.8 * (place + 0.5) / len(here) - 0.4, 0.5 / len(here)
            places = [across + width * (index / max(len(factors) - 1, 1) - 0.5) for index in range(len(factors))]
            axis.plot(places, factors, linestyle="", markersize=4.5, alpha=0.85, **looks[source])
        middle = medians[at]
        axis.plot([at - 0.42, at + 0.42], [middle, middle], color="black", linewidth=1.2, linestyle="--")
    for source in looks:
        axis.plot([], [], linestyle="", markersize=5, label=TITLES[source], **looks[source])
    axis.set_yscale("log")
    axis.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axis.minorticks_off()
    names = [
        f"{name}\n{len(group)} rows, median {middle:.2f}"
        for (name, group), middle in zip(groups.items(), medians, strict=True)
    ]
    axis.set_xticks(range(len(groups)), names)
    axis.set_ylabel("measured / simulated")
    title = "Measured figures (published, and 78 programs of ours on an H100 or H200) over simulated ones; bands: 15 and 30 %"
    axis.set_title(title, fontsize=11, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    legend = {"loc": "outside lower center", "ncols": 2, "fontsize": 6.8, "columnspacing": 1, "frameon": False}
    figure.legend(*axis.get_legend_handles_labels(), **legend)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
