"""Published against simulated, drawn: how far memory and ratios are off, and which share of the simulated speed was measured."""

from pathlib import Path

from tests.accuracy.row import Row

MET, MISSED, SHOWN = "#1a7f5a", "#c0392b", "#4c72b0"


def draw(rows: list[Row], path: Path) -> None:
    """A PNG: differences in memory (percent), in ratios (points), and the factor of each speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("Memory: simulated against published, %", [row for row in rows if row.kind == "memory"]),
        ("Ratios of two rows of one table: points", [row for row in rows if row.kind == "ratio"]),
        ("Speed: published / simulated", [row for row in rows if row.kind in ("speed", "time")]),
    )
    panels = [(title, chosen) for title, chosen in panels if chosen]
    if not panels:
        return
    counts = [len(chosen) + 2 for _, chosen in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(10, 0.24 * sum(counts) + 1), height_ratios=counts, squeeze=False, layout="constrained"
    )
    for axis, (title, chosen) in zip(axes[:, 0], panels, strict=True):
        values = [row.difference for row in chosen]
        colours = [SHOWN if row.met is None else MET if row.met else MISSED for row in chosen]
        axis.barh(range(len(chosen)), values, color=colours, height=0.6)
        axis.set_yticks(range(len(chosen)), [row.what for row in chosen], fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10, loc="left")
        for index, row in enumerate(chosen):
            axis.annotate(
                row.told(),
                (max(row.difference, 0), index),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        low, high = min(0, *values), max(0, *values)
        axis.set_xlim(low - 0.03 * (high - low), high + 0.15 * (high - low))
        axis.axvline(0, color="black", linewidth=0.8)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "Published figures (measured by others) and simulated ones. Green: within the target; red: missed; blue: shown",
        fontsize=10,
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
