"""Figures: drawn from data with gaps, labelled, and described in words."""

import base64
import io
import math

import numpy as np
import pytest
from PIL import Image

from helpers import data, plots
from helpers.monitor import Monitor, Reading


@pytest.fixture
def shown(monkeypatch):
    """What plots hands to the cell: a list of (bundle, metadata)."""
    found = []
    monkeypatch.setattr(plots, "display", lambda bundle, raw, metadata: found.append((bundle, metadata)))
    return found


class Two:
    devices, interval, origin = ["cuda:0", "cuda:1"], 1.0, "measured"


def watched():
    monitor = Monitor(Two())
    readings = [(90.0, 40.0), (math.nan, 50.0), (80.0, 45.0)]
    monitor.samples = [(3 * i, float(i), [Reading(v, v * 2**20) for v in pair]) for i, pair in enumerate(readings)]
    monitor.step_times = [0.1 * i for i in range(9)]
    return monitor


def test_every_figure_says_where_its_numbers_come_from(shown):
    images, labels = data.digits()
    plots.utilization(watched(), "Both are busy")
    plots.memory(watched(), "Both are full")
    plots.curves({"a": [1, 2], "b": [2, 1]}, "They cross", "epoch", "loss", "simulated", mark=2)
    plots.dots({"a": [1.0, 2.0, 4.0], "b": [3.0]}, "b is more", "accuracy (%)")
    plots.images(images[:5], labels[:5].tolist(), "Digits", rows=2)
    said = [bundle["text/plain"] for bundle, _ in shown]
    assert said == ["Figure (measured): Both are busy", "Figure (measured): Both are full", "Figure (simulated): They cross",
                    "Figure (measured): b is more", "Figure (data): Digits"]  # fmt: skip
    for bundle, metadata in shown:
        assert metadata["image/png"]["alt"] == bundle["text/plain"]
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).convert("L"))
        assert picture.shape[1] == plots.WIDTH * plots.DPI and (picture < 128).any(), "something is drawn"


def test_a_failed_reading_breaks_the_line_and_a_skipped_iteration_does_not(monkeypatch, shown):
    lines = []
    draw = plots._line
    monkeypatch.setattr(
        plots, "_line", lambda axes, x, y, name: (lines.append((name, list(x), list(y))), draw(axes, x, y, name))
    )
    plots.utilization(watched(), "t")
    (first, x, y), (_, _, second) = lines
    assert first == "cuda:0" and x == [0, 3, 6], "only the iterations in which a reading was due"
    assert y[0] == 90 and math.isnan(y[1]) and y[2] == 80
    assert second == [40, 50, 45]
