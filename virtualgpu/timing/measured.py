"""What kernels of a kind took on a card: the tables of `data/`, which `python -m tests.gpu.tables` writes from files of measured kernels."""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

from virtualgpu.hardware.datasheet import Spec

DATA = Path(__file__).parent / "data"
Row = Mapping[str, str]
# Data-center Blackwell, until one is measured: with an H100's medians KernelBench's convolutions on a B200 take 1.4 times what is simulated, without 2.5
LIKE = {10: 9}


def rows(table: str, spec: Spec, *columns: str) -> Mapping[tuple[str, ...], Row]:
    """data/TABLE.csv by what stands in these columns: the rows of that card, or else of one of its generation (the first number of the
    compute capability); none where neither was measured."""
    by_card, generation = _cards(table, columns), spec.capability[0]
    for wanted in (generation, LIKE.get(generation)):
        like = {name: found for (name, number), found in by_card.items() if number == str(wanted)}
        if like:
            return like.get(spec.name) or next(iter(like.values()))
    return {}


@functools.cache
def _cards(table: str, columns: tuple[str, ...]) -> dict[tuple[str, str], dict[tuple[str, ...], Row]]:
    """By card and generation, in the order of the file."""
    cards: dict[tuple[str, str], dict[tuple[str, ...], Row]] = {}
    with open(DATA / f"{table}.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cards.setdefault((row["card"], row["generation"]), {})[tuple(row[name] for name in columns)] = row
    return cards
