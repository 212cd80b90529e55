"""Every figure's style in one place. Each states its finding in the title, its units on the axes, and whether its
numbers were *measured* or *simulated*. The same words become the picture's alternative text. What one lesson alone draws lies beside it,
in notebooks/figures/.

    plots.utilization(monitor, "GPU 0 waits for GPU 1")
"""

from helpers.plots.devices import timeline, timelines, utilization
from helpers.plots.frames import slider
from helpers.plots.series import bars, curves, dots, stacked, sweep

__all__ = ["bars", "curves", "dots", "slider", "stacked", "sweep", "timeline", "timelines", "utilization"]
