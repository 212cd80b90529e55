"""What kernels of a kind took on a card: the tables of `data/`, which `python -m tests.gpu.tables` writes from files of measured kernels."""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

from virtualgpu.hardware.datasheet import Spec

DATA = Path(__file__).parent / "data"
Row = Mapping[str, str]
# Data-center Blackwell, until one is measured: with an H100's medians KernelBench's convolutions on a B200 take 1.4 times what is simulated, without 2.5
LIKE = {"10.0": "9.0"}


def rows(table: str, spec: Spec, *columns: str) -> Mapping[tuple[str, ...], Row]:
    """data/TABLE.csv by what stands in these columns: the rows of that card, or else of the first of its compute capability; none where neither
    was measured."""
    capability = ".".join(map(str, spec.capability))
    for wanted in (capability, LIKE.get(capability)):
        like = {name: found for (name, number), found in _cards(table, columns).items() if number == wanted}
        if like:
            return like.get(spec.name) or next(iter(like.values()))
    return {}


@functools.cache
def _cards(table: str, columns: tuple[str, ...]) -> dict[tuple[str, str], dict[tuple[str, ...], Row]]:
    """By card and capability, in the order of the file."""
    cards: dict[tuple[str, str], dict[tuple[str, ...], Row]] = {}
    for row in read(table):
        cards.setdefault((row["card"], row["capability"]), {})[tuple(row[name] for name in columns)] = row
    return cards


def read(table: str) -> list[dict[str, str]]:
    """data/TABLE.csv, row by row."""
    with open(DATA / f"{table}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
