"""What a GPU costs per hour: a dated table, which the reader may replace."""

import csv
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
    """Of each card, from the file, or from TABLE. Raises ValueError where it has no columns card and usd_per_hour."""
    path = TABLE if path is None else path
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return {
                row["card"]: Price(float(row["usd_per_hour"]), row.get("provider") or "", row.get("as_of") or "")
                for row in csv.DictReader(file)
            }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: a table of prices has the columns card and usd_per_hour ({error})") from None


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
