"""Which GPUs there are: the table, data/cards.toml (the one place to add a card; its keys are those of `files`), and what kernels reach of them;
looked up by the names that people write, from a file of one's own, or several; with NVLink bridges."""

import difflib
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from virtualgpu.hardware import files, units
from virtualgpu.hardware.datasheet import (
    BFLOAT16,
    FLOAT8,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    NVLINK_LATENCY,
    PCIE3,
    PCIE4,
    PCIE5,
    TF32,
    Link,
    NVLink,
    Spec,
)
from virtualgpu.hardware.units import GIB, MIB, parse_size, text_table

MEASURED_AS = "measured_as"  # of the table alone: the key of the card whose measured shares stand in for this one's (data/achieved.toml)


def _card(key: str, values: dict) -> Spec:
    return files.card({name: value for name, value in values.items() if name != MEASURED_AS})


SPECS = units.read("cards", _card)


def measured_as(spec: Spec) -> str | None:
    """The key under which that card's shares are looked up; None for a card that is not in the table."""
    key = next((key for key, known in SPECS.items() if known.name == spec.name), None)
    return key and units.rows("cards")[key].get(MEASURED_AS, key)


# -- NVLink bridges, which are sold apart: they join two equal cards on PCI Express. `like="TITAN RTX NVLink"` asks for cards with theirs.
#
# A bridged pair reaches each other's memory, also where the card alone does not. NCCL counts less of a link than its data sheet does
# (timing/nccl.py).

BRIDGES = [key for key, spec in SPECS.items() if spec.bridge is not None]


def bridged(spec: Spec) -> Spec:
    """That card with its bridge; a card that has NVLink anyway as it is. Raises ValueError for one that takes none."""
    if spec.nvlink is not None:
        return spec
    bridge = spec.bridge
    if bridge is None:
        raise ValueError(f"{spec.name} takes no NVLink bridge; there are bridges for {', '.join(BRIDGES)}")
    return replace(spec, nvlink=bridge, peer=Link(bridge.links * bridge.bandwidth, NVLINK_LATENCY), peer_access=True)


def check(cards: Sequence[Spec]) -> None:
    """Raises ValueError for a machine that no bridge can join: NVLink on two cards, and on no third."""
    joined = any(card.nvlink is not None and card.nvlink.bridge for card in cards)
    if joined and (len(cards) > 2 or cards[0] != cards[-1]):
        raise ValueError("an NVLink bridge joins two equal cards: ask for 2 GPUs, or leave NVLink out of their name")


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


def achieved(spec: Spec) -> Achieved:
    """What is known of that card, or of the one nearest to it."""
    return _achieved(basis(spec))


def basis(spec: Spec) -> str:
    """The key of the card whose figures are used for this one: its own, the one it names, or that of its generation."""
    key = measured_as(spec)
    measured = units.rows("achieved")
    if key is not None and key in measured:
        return key
    generations = {row["generation"]: card for card, row in measured.items() if "generation" in row}
    return generations[max(number for number in generations if number <= max(6, spec.capability[0]))]


@functools.cache
def _achieved(card: str) -> Achieved:
    measured = units.rows("achieved")

    def fraction(kind: str) -> float:
        """Where nobody measured this card: the median of those that were."""
        rows = [measured[card]] if kind in measured[card] else [row for row in measured.values() if kind in row]
        return median(row[kind]["share"] for row in rows)

    products = {key: figure["share"] for key, figure in measured[card]["product"].items()}
    attention = {
        way: fraction(f"attention_{way}") for way in ("forward", "backward", "cudnn_forward", "cudnn_backward")
    }
    return Achieved(products, attention, fraction("memory"), fraction("softmax"), fraction("layer_norm"), card)


# -- Which GPUs there are: looked up by the names that people write, from a file of one's own, or several for one machine.
#
# What stands in the table is in `datasheet`, files in `files`.


__all__ = [
    "FLOAT32",
    "MIB",
    "PCIE3",
    "PCIE4",
    "PCIE5",
    "SPECS",
    "TF32",
    "Link",
    "NVLink",
    "Spec",
    "find_spec",
    "find_specs",
    "parse_size",
    "table",
]


def find_spec(like: str | os.PathLike | Spec, memory: int | str | None = None) -> Spec:
    """The card of that name, with another memory size where one is given (bytes, or "16 GB").

    like: a name in the table, as `torch.cuda.get_device_name` prints it or as people write it ("A100", "a100-80gb",
    "A100 PCIe", "RTX4090", "4090"), with NVLink behind it for a card with its bridge ("TITAN RTX NVLink"); the path of
    a .toml or .json file (see `files`); or a Spec, which is kept.

    Raises ValueError, naming what there is, for an unknown name, a file that does not say a card, or a size that cannot
    be read.
    """
    if isinstance(like, Spec):
        spec = like
    elif isinstance(like, os.PathLike) or (isinstance(like, str) and files.is_path(like)):
        spec = files.load(os.fspath(like), find_spec)
    else:
        spec = _named(like)
    return spec if memory is None else replace(spec, memory=parse_size(memory))


def find_specs(n: int | None, like: str | os.PathLike | Spec | Sequence, memory: int | str | None = None) -> list[Spec]:
    """The cards of a machine with `n` GPUs: `like` one for all, or one for each ("T4,V100", or a list of names and Specs).

    n: None for as many as `like` names. memory: the size of each. Raises ValueError, as `find`, and where the numbers differ.
    """
    if isinstance(like, str) and not os.path.exists(like):
        like = [name.strip() for name in like.split(",")]
        if "" in like and len(like) > 1:
            raise ValueError(f"like={','.join(like)!r} has a comma too many, or a name is missing")
    elif not isinstance(like, Sequence) or isinstance(like, str):
        like = [like]
    if not like:
        raise ValueError("like=[] names no card")
    if n is None:
        n = len(like)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"{n!r} GPUs: ask for a whole number of them, 1 at least")
    if len(like) not in (1, n):
        names = ", ".join(card.name if isinstance(card, Spec) else str(card) for card in like)
        raise ValueError(
            f"like names {len(like)} cards ({names}) for {n} GPU{'s' * (n > 1)}: name one for all, or one for each"
        )
    specs = [find_spec(card, memory) for card in like]
    specs = specs * n if len(specs) == 1 else specs
    check(specs)
    return specs


def _named(like) -> Spec:
    spec = SPECS.get(like) if isinstance(like, str) else None
    if spec is not None:
        return spec
    if isinstance(like, str) and re.search(r"nv-?link\s*$", like, re.IGNORECASE):
        return bridged(_named(re.sub(r"\W*nv-?link\s*$", "", like, flags=re.IGNORECASE)))
    names = [*SPECS, *(spec.name for spec in SPECS.values())]
    model, form, gigabytes = _parts(str(like))
    for key, spec in SPECS.items():
        if (
            model == _parts(key)[0]
            and form in (None, "sxm" if spec.nvlink else "pcie")
            and (gigabytes is None or _is_sold_as(spec, gigabytes))
        ):
            return spec
    near = difflib.get_close_matches(_plain(str(like)), [_plain(name) for name in names], 1, 0.5)
    nearest = next((key for key in SPECS for name in (key, SPECS[key].name) if near == [_plain(name)]), None)
    meant = f" (did you mean {nearest}?)" if nearest else ""
    raise ValueError(
        f"there is no GPU called {like!r} here{meant}; choose one of {', '.join(SPECS)}; or describe one in a .toml file"
    )


def _plain(name: str) -> str:
    """Without case, separators, and what says the maker or the series: "NVIDIA GeForce RTX 4090" and "4090" are one."""
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", name.lower())


def _parts(name: str) -> tuple[str, str | None, int | None]:
    """Model, "sxm" or "pcie" or None, and gigabytes or None: "NVIDIA A100-SXM4-80GB" is ("a100", "sxm", 80)."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower())
    text = re.sub(r"\bhbm\d\w*", " ", text)
    form = re.search(r"sxm\d?(?!\d)|pci ?e(xpress)?", text)
    text = text.replace(form[0], " ") if form else text
    size = re.search(r"\b(\d+) ?gi?b?\b", text)
    text = text.replace(size[0], " ") if size else text
    return _plain(text), form and ("sxm" if form[0].startswith("sxm") else "pcie"), size and int(size[1])


def _is_sold_as(spec: Spec, gigabytes: int) -> bool:
    """The driver leaves 92 to 100 % of the size on the box."""
    return spec.memory <= gigabytes * GIB <= 1.1 * spec.memory


def table() -> str:
    """The cards and their figures in columns of text: what `like` may be, and what follows from it."""

    def tera(rate: float | None) -> str:
        return f"{rate / 1e12:.4g}" if rate else "-"

    figures = ("GiB", "capability", "SMs", "float32", "TF32", "float16", "float8", "GB/s", "peer", "host")
    rows = [["like", *figures, "measured as", "name"]]
    for key, spec in SPECS.items():
        rates = [tera(spec.rates.get(dtype)) for dtype in (FLOAT32, TF32, FLOAT16, FLOAT8)]
        sizes = [f"{size / 1e9:.0f}" for size in (spec.bandwidth, spec.peer.bandwidth, spec.host.bandwidth)]
        card = [key, f"{spec.memory / GIB:.1f}", "{}.{}".format(*spec.capability), str(spec.processors)]
        rows.append([*card, *rates, *sizes, basis(spec), spec.name])
    lines = text_table(rows, left=(0, len(rows[0]) - 1))  # words to the left, figures to the right
    foot = (
        "Rates in TFLOPS, as the maker prints them: dense, accumulated in float32. What kernels reach of them is that of the card in the\n"
        'column "measured as" (virtualgpu/hardware/data/achieved.toml has each figure and its source). GB/s of its memory, to another GPU (one way) and to the host.\n'
        f"Without bridges; with NVLink behind the name two cards have theirs ({', '.join(BRIDGES)}).\n"
        "A card of your own: a .toml file (virtualgpu.hardware.files says its keys)."
    )
    return "\n".join([*lines, "", foot])
