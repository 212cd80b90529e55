"""Layouts of a training run: seconds of a step against GiB, and which of them nothing beats in both."""

from collections.abc import Iterable, Sequence

from helpers.plots import figures
from helpers.plots.figures import COLORS
from notebooks.scripts import plan_llama

MARKERS = ("o", "s", "^")


def cover() -> None:
    """All layouts that are tabulated for the lesson's run."""
    name = "8B on 32 H100, Ethernet 100"
    found, run = plan_llama.table(name), plan_llama.RUNS[name]
    fits = [seconds for _, seconds, gib in found if gib <= plan_llama.room(run)]
    title = f"{name}: {len(found)} ways to divide the work, from {min(fits):.0f} to {max(fits):.0f} seconds a step"
    frontier(found, plan_llama.room(run), title)


def best(found: Iterable[tuple[dict, float, float]], room: float) -> list[tuple[dict, float, float]]:
    """Those of (layout, seconds, GiB) that fit and than which no other is both faster and smaller, the fastest first."""
    kept: list[tuple[dict, float, float]] = []
    for row in sorted(found, key=lambda row: row[1:]):
        if row[2] <= room and (not kept or row[2] < kept[-1][2]):
            kept.append(row)
    return kept


def of_power(styles: Sequence[str], number: int) -> str:
    """The same style for 1, for 2, for 4 and so on in every figure."""
    return styles[(number.bit_length() - 1) % len(styles)]


def frontier(found: list[tuple[dict, float, float]], room: float, title: str) -> None:
    """found: (layout, seconds, GiB) each. Colors are tensor parallel's degrees, shapes the replicas; the line joins what nothing beats."""
    degrees = sorted({layout["tp"] for layout, *_ in found})
    numbers = sorted({layout["replicas"] for layout, *_ in found})
    with figures.drawn(title, "simulated", 3.4, xlabel="seconds a step", ylabel="GiB on each GPU") as axes:
        for layout, seconds, gib in found:
            color, marker = of_power(COLORS, layout["tp"]), of_power(MARKERS, layout["replicas"])
            axes.plot(seconds, gib, marker, color=color, markersize=5.5, alpha=0.8 if gib <= room else 0.25)
        line = best(found, room)
        axes.plot([row[1] for row in line], [row[2] for row in line], color="#555555", linewidth=1, zorder=0)
        axes.axhline(room, color="#888888", linestyle="--", linewidth=1)
        axes.text(
            0.995,
            room,
            "a fifth of the card stays free",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=8,
        )
        for degree in degrees:
            axes.plot([], [], "o", color=of_power(COLORS, degree), label=f"tp {degree}")
        for number in numbers:
            axes.plot([], [], of_power(MARKERS, number), color="#777777", label=f"{number} replica{'s' * (number > 1)}")
        axes.set_xscale("log")
        low, high = min(row[1] for row in found), max(row[1] for row in found)
        figures.ticks(axes, [x for x in (0.5, 1, 2, 3, 5, 10, 20, 30, 60) if 0.9 * low <= x <= 1.1 * high])
        axes.set(ylim=(0, None))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
