"""What kernels of a kind took on a card: the tables of `data/`, which `python -m tests.gpu.tables` writes from files of measured kernels."""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

from virtualgpu.hardware.datasheet import Spec

DATA = Path(__file__).parent / "data"
Row = Mapping[str, str]


def rows(table: str, spec: Spec, *columns: str) -> Mapping[tuple[str, ...], Row]:
    """data/TABLE.csv by what stands in these columns: the rows of that card, or else of one of its generation (the first number of the
    compute capability); none where neither was measured."""
    by_card, generation = _cards(table, columns), str(spec.capability[0])
    like = [found for (_, number), found in by_card.items() if number == generation]
    return by_card.get((spec.name, generation)) or (like[0] if like else {})


@functools.cache
def _cards(table: str, columns: tuple[str, ...]) -> dict[tuple[str, str], dict[tuple[str, ...], Row]]:
    """By card and generation, in the order of the file."""
    cards: dict[tuple[str, str], dict[tuple[str, ...], Row]] = {}
    with open(DATA / f"{table}.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cards.setdefault((row["card"], row["generation"]), {})[tuple(row[name] for name in columns)] = row
    return cards
