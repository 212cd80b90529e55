"""The table of cards, data/cards.toml: the one place to add a card. Its keys are those of a card of one's own (`files`)."""

import functools
from dataclasses import dataclass
from statistics import median

from virtualgpu.hardware import files, units
from virtualgpu.hardware.datasheet import BFLOAT16, FLOAT8, FLOAT8_E5M2, FLOAT16, FLOAT32, TF32, Spec

MEASURED_AS = "measured_as"  # of the table alone: the key of the card whose measured shares stand in for this one's (data/achieved.toml)


def _card(key: str, values: dict) -> Spec:
    return files.card({name: value for name, value in values.items() if name != MEASURED_AS})


SPECS = units.read("cards", _card)


def measured_as(spec: Spec) -> str | None:
    """The key under which that card's shares are looked up; None for a card that is not in the table."""
    key = next((key for key, known in SPECS.items() if known.name == spec.name), None)
    return key and units.rows("cards")[key].get(MEASURED_AS, key)


# -- What kernels reach of a card's data sheet, as others measured it: `data/achieved.toml`, each figure with its source.
#
# A share is that of large kernels; how it falls for small ones is the business of `timing.kernels`.


LIKE = {TF32: FLOAT16, BFLOAT16: FLOAT16, FLOAT8_E5M2: FLOAT8}  # the type whose share stands in


@dataclass(frozen=True)
class Achieved:
    """Shares of a data sheet, 0 to 1 (a card that holds a higher clock than its sheet says may pass 1).

    products: of the FLOP/s, by the key into Spec.rates. attention: "forward" and "backward" by FlashAttention 2's kernels and
    "cudnn_forward" and "cudnn_backward" by cuDNN's for Hopper, of the FLOP/s. memory, softmax,
    layer_norm: of the bandwidth. basis: the card that was measured.
    """

    products: dict[str, float]
    attention: dict[str, float]
    memory: float
    softmax: float
    layer_norm: float
    basis: str

    def product(self, key: str) -> float:
        """The share of products of that type, or of the type next to it."""
        while key not in self.products and key in LIKE:
            key = LIKE[key]
        if key not in self.products:
            key = FLOAT16 if key == FLOAT8 else FLOAT32
        return self.products.get(key) or max(self.products.values())


def of(spec: Spec) -> Achieved:
    """What is known of that card, or of the one nearest to it."""
    return _of(basis(spec))


def basis(spec: Spec) -> str:
    """The key of the card whose figures are used for this one: its own, the one it names, or that of its generation."""
    key = measured_as(spec)
    measured = units.rows("achieved")
    if key is not None and key in measured:
        return key
    generations = {row["generation"]: card for card, row in measured.items() if "generation" in row}
    return generations[max(number for number in generations if number <= max(6, spec.capability[0]))]


@functools.cache
def _of(card: str) -> Achieved:
    measured = units.rows("achieved")

    def share(kind: str) -> float:
        """Where nobody measured this card: the median of those that were."""
        rows = [measured[card]] if kind in measured[card] else [row for row in measured.values() if kind in row]
        return median(row[kind]["share"] for row in rows)

    products = {key: figure["share"] for key, figure in measured[card]["product"].items()}
    attention = {way: share(f"attention_{way}") for way in ("forward", "backward", "cudnn_forward", "cudnn_backward")}
    return Achieved(products, attention, share("memory"), share("softmax"), share("layer_norm"), card)
