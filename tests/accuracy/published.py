"""Figures that others measured and published, in one file (`published.csv`): a row is the settings of a program, and what it took.

program: the module beside this one that runs it. kind: "time" of a step, "speed" (work per second), "memory" reserved, or "fits" (1: the
batch was trained; 0: out of memory). precision: "float32" as PyTorch's defaults have it, "tf32" (products of matrices as well), "half"
(the model made float16), "bfloat16" (likewise), or "AMP" (autocast to float16). layout: channels "first" or "last". size: of a picture, or
tokens. host: what the clock takes for the processor, by the date. what: who published it (table.TITLES).
"""

import csv
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent / "published.csv"


class Published(NamedTuple):
    """One row of the table, as the file has its columns."""

    program: str
    what: str
    kind: str
    card: str
    gpus: int
    model: str
    mode: str
    batch: int
    precision: str
    layout: str
    size: int
    host: str
    figure: float
    unit: str
    source: str
    date: str

    @property
    def settings(self) -> tuple:
        """What a program needs to know: rows that differ in their source alone are run once."""
        return (
            self.card,
            self.gpus,
            self.model,
            self.mode,
            self.batch,
            self.precision,
            self.layout,
            self.size,
            self.host,
        )


NUMBERS = {"gpus": int, "batch": int, "size": int, "figure": float}


def published(program: str | None = None) -> list[Published]:
    """The rows of this program, or all."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        rows = [
            Published(**{name: NUMBERS.get(name, str)(value) for name, value in row.items()})
            for row in csv.DictReader(file)
        ]
    return [row for row in rows if program in (None, row.program)]
