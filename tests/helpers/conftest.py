"""What the tests of figures share: what was drawn, and its words."""

import pytest

from helpers.plots import figures as drawing


@pytest.fixture
def shown(monkeypatch):
    """What plots hands to the cell: a list of (bundle, metadata)."""
    found = []
    monkeypatch.setattr(drawing, "display", lambda bundle, raw, metadata: found.append((bundle, metadata)))
    return found


@pytest.fixture
def figures(monkeypatch, shown):
    """The figures that were drawn."""
    found, canvas = [], drawing.FigureCanvasAgg
    monkeypatch.setattr(drawing, "FigureCanvasAgg", lambda figure: found.append(figure) or canvas(figure))
    return found
