"""One line of the bench table."""

from dataclasses import dataclass


@dataclass
class Row:
    what: str
    figure: float
    unit: str
    target: str
    met: bool
