"""What all figures share: the style, rows and legends, and how one comes into the cell."""

import base64
import contextlib
import io
import logging
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import matplotlib
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager, get_font
from PIL import Image  # matplotlib needs it, too

Origin = str  # "measured", "simulated" or "data"
ORIGINS = {"measured": "measured", "simulated": "simulated"}  # the engine's word: what the reader sees

BOLD = "bold"
# An edition in another language brings a font with its letters (tools/translate.py), which has no bold ones
for font in Path(__file__).parent.glob("*.ttf"):
    fontManager.addfont(font)
    matplotlib.rcParams["font.family"] = ["DejaVu Sans", get_font(font).family_name]
    logging.getLogger("matplotlib.font_manager").setLevel("ERROR")
    BOLD = "normal"

# Okabe and Ito's palette: told apart by colour-blind readers too
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]
STYLE = {
    "axes.prop_cycle": matplotlib.cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "figure.facecolor": "white",  # also in a dark theme, where black text would vanish on nothing
}
# (words, PNG in base64) for a slider, which shows them later
FRAMES: ContextVar[list[tuple[str, str]] | None] = ContextVar("frames", default=None)
WIDTH, DPI = 8.0, 150  # inches; shown at 100 pixels an inch, so that it stays sharp on a fine screen


def new(height: float = 3.0, **grid) -> tuple[Figure, Any]:
    """A figure as wide as a cell, `height` inches high, and its axes: one, or an array of them (nrows=, ncols=)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots(**grid)


@contextlib.contextmanager
def drawn(title: str, origin: Origin, height: float = 3.0, **settings) -> Iterator[Axes]:
    """Axes to draw on in this block, which are shown when it ends. settings: of the axes (xlabel=, ylim=, ...)."""
    figure, axes = new(height)
    yield axes
    axes.set(**settings)
    show(figure, title, origin)


def lines(axes: Axes, x: Sequence[float], series: Mapping[str, Sequence[float]]) -> None:
    """A line a series over x, as far as it goes; several are named where each has a color of its own."""
    for name, values in series.items():
        axes.plot(x[: len(values)], values, marker="o", markersize=3.5, linewidth=1.5, label=name)
    if 1 < len(series) <= len(COLORS):
        axes.legend(loc="best")


def rows(axes: Axes, names: Collection[str], grid: bool = True) -> None:
    """A row a name, the first on top. grid: with lines across them."""
    axes.set_yticks(range(len(names)), list(names))
    axes.set(ylim=(max(len(names), 1) - 0.5, -0.5))
    axes.grid(visible=grid, axis="y")


def ticks(axes: Axes, x: Sequence[float]) -> None:
    """There, and nowhere else: a logarithmic axis would have those of its own."""
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.minorticks_off()


def legend_above(axes: Axes, columns: int) -> None:
    """Each name once, in so many columns."""
    names = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(names.values(), names, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False)


def show(figure: Figure, title: str, origin: Origin) -> None:
    """Draw into the cell (or for a slider), with the title as alternative text. No pyplot: nothing stays open or is shown twice."""
    figure.suptitle(textwrap.fill(title, 86), x=0.01, ha="left", weight=BOLD, fontsize=11)
    origin = ORIGINS.get(origin, origin)
    if origin != "data":
        figure.supxlabel(origin, x=0.99, ha="right", style="italic", color="#666666", fontsize=9)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(picture, format="png", dpi=DPI)
    words, encoded = f"Figure ({origin}): {title}", base64.b64encode(few_colors(picture.getvalue())).decode()
    if (frames := FRAMES.get()) is None:
        put(words, encoded)
    else:
        frames.append((words, encoded))


def few_colors(png: bytes) -> bytes:
    """A picture in 64 colors, which looks the same: a third of the bytes, and a lesson holds a dozen."""
    Image.open(io.BytesIO(png)).convert("RGB").quantize(64).save(few := io.BytesIO(), "PNG", optimize=True)
    return few.getvalue()


def put(words: str, encoded: str, **more: str) -> None:
    """A picture in base64 into the cell. more: other forms of it, for those who can show them ({"text/html": ...})."""
    bundle = {**more, "image/png": encoded, "text/plain": words}
    display(bundle, raw=True, metadata={"image/png": {"alt": words, "width": int(WIDTH * 100)}})
