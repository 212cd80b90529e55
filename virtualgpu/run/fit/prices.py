"""What a GPU costs per hour: a dated table, which the reader may replace."""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

TABLE = str(Path(__file__).parents[2] / "hardware" / "data" / "prices.csv")


class Price(NamedTuple):
    """US dollars per hour and GPU; who asked that, and when, as far as the table says it."""

    usd_per_hour: float
    provider: str = ""
    as_of: str = ""


def load(path: str | None = None) -> dict[str, Price]:
    """Of each card, from the file, or from TABLE. Raises ValueError where it has no columns card and usd_per_hour, or for the first row
    that says no price above 0, names a card again, or has more fields than there are columns."""
    path = TABLE if path is None else path
    prices: dict[str, Price] = {}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # spreadsheets begin a file with a mark
            rows = csv.DictReader(file)
            if missing := {"card", "usd_per_hour"} - set(rows.fieldnames or ()):
                raise ValueError(f"there is no {' and no '.join(sorted(missing))}")
            for row in rows:
                if wrong := _wrong(row, prices):
                    raise ValueError(f"line {rows.line_num}: {wrong}")
                said_by = (row.get("provider") or "", row.get("as_of") or "")
                prices[row["card"].strip()] = Price(float(row["usd_per_hour"]), *said_by)
        if not prices:
            raise ValueError("there is no row below them")
    except (OSError, csv.Error, ValueError) as error:
        raise ValueError(f"{path}: a table of prices has the columns card and usd_per_hour ({error})") from None
    return prices


def _wrong(row: dict, prices: Mapping[str, Price]) -> str:
    """What is the matter with this row; empty where nothing is."""
    card, price = (row["card"] or "").strip(), row["usd_per_hour"]
    try:
        figure = float(price)
    except (TypeError, ValueError):
        figure = 0.0
    # "T4,0,35": the price is in two fields
    if None in row or (row.get("provider") or "").strip().isdigit():
        return f"{card} has a field too many: write a price's decimals behind a point, as in 0.35"
    if not card or not 0 < figure < math.inf:
        return f"{card or 'a card without a name'} at {price!r}: write a name, and dollars above 0, as in 0.35"
    return f"{card} has a price already: leave one row of each card" if price_of(card, prices) else ""


def price_of(card: str, prices: Mapping[str, Price]) -> Price | None:
    """That card's, whichever way its name is written: "A100", "a100". None where the table has none."""
    names = {name.casefold(): price for name, price in prices.items()}
    return names.get(card.strip().casefold())


def whose(cards: Iterable[str], prices: Mapping[str, Price]) -> str:
    """Whose prices they are, and of when."""
    words = []
    for card in dict.fromkeys(cards):
        price = price_of(card, prices)
        source = ", ".join(filter(None, price[1:])) if price else ""
        words.append(
            f"{card} {price.usd_per_hour:.2f}" + f" ({source})" * bool(source) if price else f"{card} no price"
        )
    return f"$ per GPU and hour: {'; '.join(words)}. --prices FILE takes yours."
