"""What kernels reach of a card's data sheet, as others measured it: `data/achieved.csv`, a row each with its source.

A share is that of large kernels; how it falls for small ones is the business of `simulation.kernels`. No row comes from a whole
program: programs are what the clock is judged by (tests/accuracy).
"""

import csv
import functools
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from virtualgpu.hardware.cards import SPECS
from virtualgpu.hardware.datasheet import TF32, Spec

TABLE = Path(__file__).parent / "data" / "achieved.csv"
KEYS = {
    "float32": torch.float32,
    "tf32": TF32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
}
# The card whose table stands in for that of another one: the same chip, or the next one of its generation
NEAREST = {
    "P100-SXM2": "P100",
    "V100-32GB": "V100",
    "A100-PCIE-40GB": "A100",
    "A100-PCIE-80GB": "A100-80GB",
    "A10G": "RTX 3090",
    "H100-96GB": "H100",
}
OF_GENERATION = {6: "P100", 7: "V100", 8: "A100", 9: "H100", 10: "B200", 12: "RTX 5090"}  # for a card of one's own
LIKE = {TF32: torch.float16, torch.bfloat16: torch.float16, torch.float8_e5m2: torch.float8_e4m3fn}


@dataclass(frozen=True)
class Achieved:
    """Shares of a data sheet, 0 to 1 (a card that holds a higher clock than its sheet says may pass 1).

    products: of the FLOP/s, by the key into Spec.rates. attention: "forward" and "backward", of the FLOP/s. memory, softmax, layer_norm: of the bandwidth. basis: the card that was measured.
    """

    products: dict
    attention: dict
    memory: float
    softmax: float
    layer_norm: float
    basis: str

    def product(self, key) -> float:
        """The share of products of that type, or of the type next to it."""
        while key not in self.products and key in LIKE:
            key = LIKE[key]
        if key not in self.products:
            key = torch.float16 if key is torch.float8_e4m3fn else torch.float32
        return self.products.get(key) or max(self.products.values())


def of(spec: Spec) -> Achieved:
    """What is known of that card, or of the one nearest to it."""
    return _of(basis(spec))


def basis(spec: Spec) -> str:
    """The key of the card whose table is used for this one."""
    key = next((key for key, known in SPECS.items() if known.name == spec.name), None)
    key = NEAREST.get(key, key)
    return key if key in _rows() else OF_GENERATION[max(g for g in OF_GENERATION if g <= max(6, spec.capability[0]))]


@functools.cache
def _rows() -> dict[str, dict[tuple[str, str], float]]:
    rows: dict[str, dict[tuple[str, str], float]] = {}
    with open(TABLE, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["card"], {})[row["kind"], row["dtype"]] = float(row["share"])
    return rows


@functools.cache
def _of(card: str) -> Achieved:
    shares = _rows()[card]

    def usual(kind: str, dtype: str) -> float:
        """Where nobody measured this card: the median of those that were."""
        return median(rows[kind, dtype] for rows in _rows().values() if (kind, dtype) in rows)

    def bandwidth(kind: str) -> float:
        return shares.get((kind, "float32")) or usual(kind, "float32")

    products = {KEYS[dtype]: share for (kind, dtype), share in shares.items() if kind == "product"}
    attention = {
        way: shares.get((f"attention_{way}", "float16")) or usual(f"attention_{way}", "float16")
        for way in ("forward", "backward")
    }
    return Achieved(products, attention, bandwidth("memory"), bandwidth("softmax"), bandwidth("layer_norm"), card)
