"""Boxes and arrows: what words alone would take a page to say."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import FancyBboxPatch

from helpers.plots import figures
from helpers.plots.figures import COLORS

Box = tuple[str, float, float, float, float, int]


def drawing(boxes: Mapping[str, Box], arrows: Sequence[tuple[str, str, str]], title: str, height: float = 2.8) -> None:
    """boxes: {name: (text, x, y, width, height, number of its colour)}; one that others lie in has its text above them.
    arrows: (from, to, text), names of boxes; both ways where `to` begins with "<"."""
    figure, axes = figures.new(height)
    for at, (text, x, y, wide, tall, color) in enumerate(boxes.values()):
        style = {"boxstyle": "round,pad=0,rounding_size=0.12", "edgecolor": COLORS[color], "linewidth": 1.4}
        axes.add_patch(FancyBboxPatch((x, y), wide, tall, facecolor=COLORS[color] + "26", zorder=1 + at / 100, **style))
        holds = any(x < a < x + wide and y < b < y + tall for _, a, b, *_ in boxes.values())
        place = (x + wide / 2, y + tall - 0.08) if holds else (x + wide / 2, y + tall / 2)
        axes.text(*place, text, ha="center", va="top" if holds else "center", fontsize=9, zorder=3)
    for start, end, text in arrows:
        style = "<->" if end.startswith("<") else "->"
        one, other = _edges(boxes[start], boxes[end.lstrip("<")])
        axes.annotate("", other, one, zorder=2, arrowprops={"arrowstyle": style, "linewidth": 1.4, "color": "#444444"})
        middle = ((one[0] + other[0]) / 2, (one[1] + other[1]) / 2)
        axes.annotate(text, middle, (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=8, zorder=3)
    axes.autoscale_view()
    axes.axis("off")
    figures.show(figure, title, "data")


def _edges(start: Box, end: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """The points of both boxes that face each other: beside each other, else one above the other."""
    (_, x, y, wide, tall, _), (_, a, b, broad, high, _) = start, end
    if x + wide <= a or a + broad <= x:
        right = x + wide <= a
        return (x + wide if right else x, y + tall / 2), (a if right else a + broad, b + high / 2)
    over, middle = y >= b + high, (max(x, a) + min(x + wide, a + broad)) / 2
    return (middle, y if over else y + tall), (middle, b + high if over else b)
