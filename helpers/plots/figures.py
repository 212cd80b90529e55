"""What all figures share: the style, the lines of a table of readings, and how one comes into the cell."""

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Literal

import matplotlib
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from helpers.monitor import Monitor

Origin = Literal["measured", "simulated", "data"]

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
FRAMES: ContextVar[list[tuple[str, str]] | None] = ContextVar(
    "frames", default=None
)  # (words, PNG in base64) for a slider
WIDTH, DPI = 8.0, 150  # inches; shown at 100 pixels an inch, so that it stays sharp on a fine screen


def new(height: float = 3.0) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots()


def readings(axes: Axes, monitor: Monitor, table: Mapping[str, Sequence[float]]) -> None:
    """Join the iterations in which a reading was due; one that failed (NaN) breaks the line."""
    due = sorted({iteration for iteration, _ in monitor.samples if iteration < len(monitor.step_times)})
    for device, values in table.items():
        line(axes, due, [values[iteration] for iteration in due], device)
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend(axes, table)


def line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str) -> None:
    axes.plot(x, y, marker="o", markersize=3.5, linewidth=1.5, label=name)


def legend(axes: Axes, series: Mapping) -> None:
    if 1 < len(series) <= len(COLORS):
        axes.legend(loc="best")


def show(figure: Figure, title: str, origin: Origin) -> None:
    """Draw into the cell (or for a slider), with the title as alternative text. No pyplot: nothing stays open or is shown twice."""
    figure.suptitle(textwrap.fill(title, 95), x=0.01, ha="left", weight="bold", fontsize=11)
    if origin != "data":
        figure.supxlabel(origin, x=0.99, ha="right", style="italic", color="#666666", fontsize=9)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(picture, format="png", dpi=DPI)
    said, encoded = f"Figure ({origin}): {title}", base64.b64encode(picture.getvalue()).decode()
    if (frames := FRAMES.get()) is not None:
        frames.append((said, encoded))
        return
    bundle = {"image/png": encoded, "text/plain": said}
    display(bundle, raw=True, metadata={"image/png": {"alt": said, "width": int(WIDTH * 100)}})
