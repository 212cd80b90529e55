"""One line of the table: a figure that others measured and published, and the one that is simulated here."""

from dataclasses import dataclass


@dataclass
class Row:
    """published and simulated: in `unit`. tolerance: percent for memory, points (hundredths) for a ratio; None: shown, not judged.

    kind: "memory", "ratio" of two rows of one table, "count", "time" (seconds), "speed" (work per second), or "cost": measured
    here, and to stay below `published`, the target. note: what else a reader needs.
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
    gpus: int = 1

    @property
    def difference(self) -> float:
        """Percent for memory; points for a ratio; for time and speed the speed published over the speed simulated (1: data sheet)."""
        if self.kind == "memory":
            return 100 * (self.simulated / self.published - 1)
        if self.kind in ("ratio", "count"):
            return (100 if self.kind == "ratio" else 1) * (self.simulated - self.published)
        if self.kind == "cost":
            return self.simulated - self.published
        return self.published / self.simulated if self.kind == "speed" else self.simulated / self.published

    @property
    def met(self) -> bool | None:
        if self.kind == "cost":
            return self.simulated <= self.published
        return None if self.tolerance is None else abs(self.difference) <= self.tolerance

    def told(self) -> str:
        """The difference as the table prints it."""
        if self.kind == "memory":
            return f"{self.difference:+.1f} %"
        if self.kind == "cost":
            return "within" if self.met else "above"
        if self.kind == "count":
            return f"{self.difference:+.0f}"
        return f"{self.difference:+.1f} points" if self.kind == "ratio" else f"x {self.difference:.2f}"
