"""Products of matrices that others timed, one by one, beside what the clock says of them: `kernels.csv`, a sample of each source's.

    python -m tests.accuracy.kernels     by source and by card; then each source's cards from the other sources alone

A card's share of its data sheet (virtualgpu/hardware/data/achieved.toml) comes from these sources; the tiles and what they reach are one for all
cards. The last table takes a card's share from the other sources, as the median of measured over simulated, and shows what is left.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing import kernels as timing
from virtualgpu.timing.kernels import Kernels, vector_width

TABLE = Path(__file__).parent / "kernels.csv"
BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
COLUMN_MAJOR = "baidu-research/DeepBench"


class Product(NamedTuple):
    """One measured product, and its simulated time, both in microseconds."""

    card: str
    dtype: str
    source: str
    measured: float
    simulated: float

    @property
    def log(self) -> float:
        """Of measured over simulated."""
        return math.log(self.measured / self.simulated)


def multiplied(kernels, count, rows, columns, length, key, size, loaded=0) -> float:
    """Seconds of `count` products of [rows, length] and [length, columns], of `size` bytes a number. loaded: what `vector_width` says."""
    moved = count * size * (rows * length + length * columns + rows * columns)
    return kernels.spec.kernel + kernels.busy(timing.Product(count, rows, columns, length, key, moved, loaded))


def products() -> list[Product]:
    """All of the table."""
    cards = {}
    found = []
    with open(TABLE, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            kernels = cards.setdefault(row["card"], Kernels(SPECS[row["card"]]))
            count, rows, columns, length = (int(row[name]) for name in ("count", "rows", "columns", "length"))
            size = BYTES[row["dtype"]]
            # numbers of a row of the result: cuBLAS and DeepBench have columns one after the other, PyTorch has rows
            wide = rows if row["source"] == COLUMN_MAJOR else columns
            loaded = vector_width(size, wide, length)
            seconds = multiplied(kernels, count, rows, columns, length, row["dtype"], size, loaded)
            found.append(Product(row["card"], row["dtype"], row["source"], float(row["us"]), 1e6 * seconds))
    return found


def within(logs: Iterable[float], percent: float) -> float:
    """The share of them within so many percent, either way."""
    logs = list(logs)
    return sum(abs(log) <= math.log(1 + percent / 100) for log in logs) / len(logs)


def left_out(found: list[Product]) -> dict[str, list[float]]:
    """By source: what is left of its products when each card's share comes from the other sources alone."""
    rest = defaultdict(list)
    for source in {product.source for product in found}:
        for key in {(product.card, product.dtype) for product in found if product.source == source}:
            logs = {True: [], False: []}
            for product in found:
                if (product.card, product.dtype) == key:
                    logs[product.source == source].append(product.log)
            if logs[False]:
                rest[source] += [log - median(logs[False]) for log in logs[True]]
    return rest


def summary(title: str, groups: dict[str, list[float]]) -> str:
    """A line for each group of logs of measured over simulated."""
    width = max(map(len, groups)) + 2
    lines = [f"{title:<{width}}{'number':>7}{'measured / simulated':>22}{'within 15 %':>13}{'30 %':>7}"]
    for name, logs in groups.items():
        shares = f"{within(logs, 15):>10.0%}{within(logs, 30):>10.0%}"
        lines.append(f"{name:<{width}}{len(logs):>7}{math.exp(median(logs)):>22.2f}{shares}")
    return "\n".join(lines)


def table() -> str:
    """As text."""
    found, groups = products(), defaultdict(list)
    for product in found:
        for name in ("all", product.source, f"{product.card}, {product.dtype}"):
            groups[name].append(product.log)
    return summary(
        "products", groups | {f"{source}, left out": logs for source, logs in sorted(left_out(found).items())}
    )


if __name__ == "__main__":
    print(table())
