"""Figures that others measured and published, in one file (`published.csv`): a row is the settings of a program, and what it took.

program: what runs it (sources.toml). kind: "time" of a step (or of the steps that settings say), "speed" (work per second),
"kernels" (how long the GPU's kernels ran in a step, added up: what no slow host changes),
"memory" reserved unless settings say otherwise, "ratio" and "count" where only such were published, or "fits" (1: the batch was trained; 0:
out of memory). precision: "float32" as PyTorch's defaults have it, "tf32" (products of matrices as well), "half" (the model made float16),
"bfloat16" (likewise), "ieee" (no TF32 at all), "AMP" (autocast to float16) or "AMP bfloat16". layout: channels "first" or "last". size: of a picture, or tokens.
host: what the clock takes for the processor, by the date; empty: the default. settings: what else the program needs, "key=value;
key=value". what: who published it (TITLES). licence: of the source's figures or code. missed: why the simulated figure is more than
30 % off, "supposed:" where it is not known.

How rows were chosen, never by what the clock says of them: all that a source has and the program can run, or as sources.toml
says; batch 1 and every third batch after it where a source has many (milabench, NVIDIA); of a table measured again and again the last.
"""

import csv
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent / "published.csv"
SOURCES = tomllib.loads((Path(__file__).parent / "sources.toml").read_text("utf-8"))
PROGRAMS, TITLES = SOURCES["programs"], SOURCES["titles"]


@dataclass
class Row:
    """published and simulated: in `unit`. tolerance: percent for memory, points (hundredths) for a ratio; None: shown, not judged.

    kind: "memory", "ratio" of two rows of one table, "count", "time" (of a step), "kernels" (their time in a step), "speed" (work per second), or "fits" (1 or
    0). note: what else a reader needs; such rows are in no statistic.
    source: the program. group: of the table by source. gpus: those that worked together. missed: the reason, shown where
    the two are far apart.
    """

    what: str
    kind: str
    unit: str
    published: float
    simulated: float
    tolerance: float | None = None
    note: str = ""
    source: str = ""
    url: str = ""
    group: str = ""
    gpus: int = 1
    missed: str = ""

    @property
    def factor(self) -> float:
        """Measured over simulated; for a speed the same of its time, so that above 1 the real program took longer."""
        return self.simulated / self.published if self.kind == "speed" else self.published / self.simulated

    @property
    def difference(self) -> float:
        """Percent for memory; points for a ratio; the factor for time and speed."""
        if self.kind == "memory":
            return 100 * (self.simulated / self.published - 1)
        if self.kind == "ratio":
            return 100 * (self.simulated - self.published)
        return self.factor if self.kind in ("time", "speed", "kernels") else self.simulated - self.published

    @property
    def met(self) -> bool | None:
        if self.kind == "fits":
            return self.simulated == self.published
        return None if self.tolerance is None else abs(self.difference) <= self.tolerance

    def within(self, percent: float) -> bool:
        """Whether the two are within so many percent, whichever is larger."""
        return abs(math.log(self.factor)) <= math.log(1 + percent / 100)

    def told(self) -> str:
        """The difference as the table prints it."""
        if self.kind == "memory":
            return f"{self.difference:+.1f} %"
        if self.kind == "count":
            return f"{self.difference:+.0f}"
        if self.kind == "fits":
            return "alike" if self.met else "otherwise"
        return f"{self.difference:+.1f} points" if self.kind == "ratio" else f"time x {self.difference:.2f}"


def ratio(what: str, one: Row, other: Row, tolerance: float | None = None) -> Row:
    """A row of what two rows of one table say together: one over the other."""
    published, simulated = one.published / other.published, one.simulated / other.simulated
    row = Row(what, "ratio", "", published, simulated, tolerance, url=one.url, group=one.group)
    row.gpus, row.missed = max(one.gpus, other.gpus), one.missed or other.missed
    return row


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
