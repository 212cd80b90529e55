"""One line of the table: a figure that others measured and published, and the one that is simulated here."""

import math
from dataclasses import dataclass


@dataclass
class Row:
    """published and simulated: in `unit`. tolerance: percent for memory, points (hundredths) for a ratio; None: shown, not judged.

    kind: "memory", "ratio" of two rows of one table, "count", "time" (of a step), "kernels" (their time in a step), "speed" (work per second), "fits" (1 or 0), or
    "cost": measured here, and to stay below `published`, the target. note: what else a reader needs; such rows are in no statistic.
    group: of the table by source; `source`, the program, unless given. gpus: those that worked together. missed: the reason, shown where
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
        if self.kind == "cost":
            return self.simulated <= self.published
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
        if self.kind == "cost":
            return "within" if self.met else "above"
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
