"""Boxes and arrows, which words alone would take a page to say; and all the cuts of a network beside each other."""

from collections import namedtuple
from collections.abc import Mapping, Sequence

from matplotlib.patches import FancyBboxPatch

from helpers.plots import figures
from helpers.plots.figures import COLORS

Box = namedtuple("Box", "text x y width height color")  # x, y: of its lower left corner; color: a place in COLORS


def drawing(
    boxes: Mapping[str, tuple], arrows: Sequence[tuple[str, str, str]], title: str, height: float = 2.8
) -> None:
    """boxes: {name: (text, x, y, width, height, color)}; one that others lie in has its text above them.
    arrows: (from, to, text), names of boxes; both ways where `to` begins with "<". height: of the figure, in inches."""
    boxes = {name: Box(*box) for name, box in boxes.items()}
    with figures.drawn(title, "data", height) as axes:
        for number, box in enumerate(boxes.values()):
            style = {"boxstyle": "round,pad=0,rounding_size=0.12", "edgecolor": COLORS[box.color], "linewidth": 1.4}
            style |= {"facecolor": COLORS[box.color] + "26", "zorder": 1 + number / 100}
            axes.add_patch(FancyBboxPatch(box[1:3], box.width, box.height, **style))
            holds = any(0 < b.x - box.x < box.width and 0 < b.y - box.y < box.height for b in boxes.values())
            x, y = box.x + box.width / 2, box.y + (box.height - 0.08 if holds else box.height / 2)
            axes.text(x, y, box.text, ha="center", va="top" if holds else "center", fontsize=9, zorder=3)
        for start, end, text in arrows:
            style = {"arrowstyle": "<->" if end.startswith("<") else "->", "linewidth": 1.4, "color": "#444444"}
            tail, head = _edges(boxes[start], boxes[end.lstrip("<")])
            axes.annotate("", head, tail, zorder=2, arrowprops=style)
            middle, style = ((tail[0] + head[0]) / 2, (tail[1] + head[1]) / 2), {"ha": "center", "va": "bottom"}
            axes.annotate(text, middle, (0, 3), textcoords="offset points", fontsize=8, zorder=3, **style)
        axes.autoscale_view()
        axes.axis("off")


def cuts(
    peaks: Mapping[int, Sequence[float]], times: Mapping[int, float], limit: float, named: Mapping[int, str], title: str
) -> None:
    """All cuts of a row of layers, by how many entries are on cuda:0: above what each GPU holds, below how long a step takes.

    peaks: {entries: MiB of each GPU}; times: {entries: ms}; limit: MiB, a line above; named: {entries: words}, with an arrow below."""
    figure, (memory, clock) = figures.new(5.0, nrows=2, sharex=True)
    for gpu in range(2):
        memory.plot(list(peaks), [peak[gpu] for peak in peaks.values()], "o-", markersize=3.5, label=f"cuda:{gpu}")
    memory.axhline(limit, color="#888888", linestyle="--", linewidth=1)
    memory.annotate(f"{limit / 1024:g} GiB", (1, limit), (0, -3), textcoords="offset points", va="top", fontsize=9)
    memory.set(ylabel="peak memory (MiB)", ylim=(0, None))
    memory.legend(loc="center right")
    clock.plot(list(times), list(times.values()), "o-", markersize=3.5, color=COLORS[2])
    low, high = min(times.values()), max(times.values())
    for number, (entries, words) in enumerate(named.items()):
        memory.axvline(entries, color="#cccccc", linewidth=1, zorder=0)
        place = entries + 1, (low - (high - low) / 4, high)[number % 2]  # below the line, above it, ...
        style = {"arrowstyle": "->", "color": "#444444"}
        clock.annotate(words, (entries, times[entries]), place, fontsize=9, va="center", arrowprops=style)
        clock.axvline(entries, color="#cccccc", linewidth=1, zorder=0)
    clock.set(xlabel="entries on cuda:0", ylabel="a step (ms)", ylim=(low - (high - low) / 2, high + (high - low) / 4))
    clock.set_xticks(list(times))
    figures.show(figure, title, "simulated")


def _edges(start: Box, end: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """The points of both boxes that face each other: beside each other, else one above the other."""
    if start.x + start.width <= end.x:
        return (start.x + start.width, start.y + start.height / 2), (end.x, end.y + end.height / 2)
    if end.x + end.width <= start.x:
        return _edges(end, start)[::-1]
    x = (max(start.x, end.x) + min(start.x + start.width, end.x + end.width)) / 2
    if start.y >= end.y + end.height:
        return (x, start.y), (x, end.y + end.height)
    return (x, start.y + start.height), (x, end.y)
