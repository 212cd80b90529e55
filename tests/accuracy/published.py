"""Figures that others measured and published, in one file (`published.csv`): a row is the settings of a program, and what it took.

program: the module beside this one that runs it. kind: "time" of a step (or of the steps that settings say), "speed" (work per second),
"kernels" (how long the GPU's kernels ran in a step, added up: what no slow host changes),
"memory" reserved unless settings say otherwise, "ratio" and "count" where only such were published, or "fits" (1: the batch was trained; 0:
out of memory). precision: "float32" as PyTorch's defaults have it, "tf32" (products of matrices as well), "half" (the model made float16),
"bfloat16" (likewise), "ieee" (no TF32 at all), "AMP" (autocast to float16) or "AMP bfloat16". layout: channels "first" or "last". size: of a picture, or tokens.
host: what the clock takes for the processor, by the date; empty: the default. settings: what else the program needs, "key=value;
key=value". what: who published it (table.TITLES). licence: of the source's figures or code. missed: why the simulated figure is more than
30 % off, "supposed:" where it is not known.

How rows were chosen, never by what the clock says of them: all that a source has and the program can run, or as the program's docstring
says; batch 1 and every third batch after it where a source has many (milabench, NVIDIA); of a table measured again and again the last.
"""

import csv
from pathlib import Path
from typing import NamedTuple

from tests.accuracy.row import Row

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
    settings: str
    figure: float
    unit: str
    source: str
    date: str
    licence: str
    missed: str

    @property
    def run(self) -> tuple:
        """What a program needs to know: rows that differ in what was measured, or in their source alone, are run once."""
        settings = tuple(part for part in self.options.items() if part[0] != "figure")
        return *self[self._fields.index("card") : self._fields.index("settings")], settings

    @property
    def options(self) -> dict[str, str]:
        """The settings, by key."""
        return dict(part.split("=") for part in self.settings.split("; ") if part)

    def beside(self, what: str, simulated: float, tolerance: float | None = None) -> Row:
        """The published figure beside the simulated one."""
        row = Row(what, self.kind, self.unit, self.figure, simulated, tolerance, url=self.source, group=self.what)
        row.gpus, row.missed = self.gpus, self.missed
        return row


NUMBERS = {"gpus": int, "batch": int, "size": int, "figure": float}


def published(program: str | None = None) -> list[Published]:
    """The rows of this program, or all."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        rows = [
            Published(**{name: NUMBERS.get(name, str)(value) for name, value in row.items()})
            for row in csv.DictReader(file)
        ]
    return [row for row in rows if program in (None, row.program)]
