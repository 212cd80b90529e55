"""The table of cards, data/cards.toml: the one place to add a card. Its keys are those of a card of one's own (`files`)."""

from virtualgpu.hardware import files, tables
from virtualgpu.hardware.datasheet import Spec

MEASURED_AS = (
    "measured_as"  # of the table alone: the key of the card whose measured shares stand in for this one's (`achieved`)
)


def _card(key: str, values: dict) -> Spec:
    return files.card({name: value for name, value in values.items() if name != MEASURED_AS})


SPECS = tables.read("cards", _card)


def measured_as(spec: Spec) -> str | None:
    """The key under which that card's shares are looked up; None for a card that is not in the table."""
    key = next((key for key, known in SPECS.items() if known.name == spec.name), None)
    return key and tables.rows("cards")[key].get(MEASURED_AS, key)
