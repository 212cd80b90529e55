"""Every figure's style in one place. Each states its finding in the title, its units on the axes, and whether its
numbers were *measured* or *simulated*. The same words become the picture's alternative text.

    plots.utilization(monitor, "GPU 0 waits for GPU 1")
"""

from helpers.plots.allocation import blocks, fits, stacked
from helpers.plots.devices import timeline, utilization
from helpers.plots.drawings import drawing
from helpers.plots.frames import slider
from helpers.plots.searches import rungs, search, workers
from helpers.plots.series import bars, curves, dots, images, left, sweep
from helpers.plots.weights import matrices

__all__ = [
    "bars", "blocks", "curves", "dots", "drawing", "fits", "images", "left", "matrices", "rungs", "search", "slider", "stacked",
    "sweep", "timeline", "utilization", "workers",
]  # fmt: skip
