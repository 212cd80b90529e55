"""Which GPUs there are: the table, data/cards.toml (the one place to add a card), and what kernels reach of them; looked up by the names that
people write, with NVLink bridges; and cards of one's own from a file, TOML or JSON, with the table's keys: `like="mycard.toml"`.

    name = "NVIDIA GeForce RTX 4080"     # as torch.cuda.get_device_name is to print it
    memory = "15.6 GB"                   # what the driver leaves; a size, or bytes
    capability = "8.9"
    processors = 76                      # streaming multiprocessors
    bandwidth = "717 GB/s"               # of its memory; text with a unit, or bytes/s
    host = "PCIe 4.0"                    # or "PCIe 4.0 x8", "25 GB/s", {bandwidth = "25 GB/s", latency = "10 us"}
    rates = {float32 = "48.7 TFLOPS", tf32 = "48.7 TFLOPS", float16 = "97.5 TFLOPS", bfloat16 = "97.5 TFLOPS"}   # dense

These must be there, of the rates float32; or `base = "A100"` (a name in the table), and then only what is different.
What may be there: peer (a link like host, or "staged" for what was measured through the host's memory; without it copies
between GPUs pass through the host), peer_access (true or false), kernel (time that any kernel takes, "2 us"), clock,
memory_clock ("2505 MHz"), bus (bits), l2 ("64 MB"), power ("320 W"), nvlink ({links = 12, bandwidth = "25 GB/s", switch =
true}, of one link one way; bridge = true where they join two cards alone), bridge ({links = 4, bandwidth = "14 GB/s"}, the
one that is sold apart). Rates may also name float64, float8 (both kinds), float8_e4m3fn, float8_e5m2.
"""

import difflib
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from virtualgpu.hardware import datasheet, units
from virtualgpu.hardware.datasheet import (
    BFLOAT16,
    DTYPES,
    FLOAT8,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    NVLINK_LATENCY,
    PCIE3,
    TF32,
    Link,
    NVLink,
    Spec,
)
from virtualgpu.hardware.units import GIB, parse_size, quantity, text_table

# -- A card in the form of the table.

NEEDED = ("name", "memory", "capability", "processors", "bandwidth", "host", "rates")
RATES = {"float8": ("float8_e4m3fn", "float8_e5m2"), **{dtype: (dtype,) for dtype in DTYPES}}
STAGED = "staged"
MOST = 100_000  # multiprocessors, bits of a bus, links
UNITS = {"bandwidth": "B/s", "kernel": "s", "clock": "Hz", "memory_clock": "Hz", "power": "W"}


def spec_of(values: dict[str, Any], base: Spec | None = None) -> Spec:
    """The card that these keys say. base: what it is apart from them. Raises ValueError, naming the key."""
    units.check_keys(values, ["base", *(field.name for field in fields(Spec))])
    missing = [key for key in NEEDED if key not in values]
    if base is None and missing:
        raise ValueError(
            f'{", ".join(missing)} must be there too, or base = "A100" (say) for what it has in common with that'
        )
    changes = {key: _value(key, value, base) for key, value in values.items()}
    if base is None and FLOAT32 not in changes["rates"]:
        raise ValueError("rates must say float32")
    if base is None and "peer" not in changes:
        changes = {"peer": changes["host"], "peer_access": False, **changes}
    if changes.get("peer") == STAGED:
        known = {**(vars(base) if base else {}), **changes}
        changes = {"peer_access": False, **changes, "peer": datasheet.copies(known["capability"], known["host"])}
    if base is None:
        return Spec(**changes)
    # figures that follow from changed ones are no longer the base's
    if "bandwidth" in changes:
        changes = {"memory_clock": None, "bus": None, **changes}
    if "processors" in changes or FLOAT32 in changes.get("rates", ()):
        changes = {"clock": None, **changes}
    return replace(base, **{**changes, "rates": {**base.rates, **changes.get("rates", {})}})


def _value(key: str, value: Any, base: Spec | None) -> Any:
    if key == "rates":
        if not isinstance(value, dict):
            raise ValueError('rates = {float32 = "48.7 TFLOPS", ...} says the rate of each dtype')
        units.check_keys(value, RATES, "dtype of rates")
        return {dtype: quantity(rate, "FLOP/s", name) for name, rate in value.items() for dtype in RATES[name]}
    if key == "peer" and value == STAGED:
        return STAGED
    if key in ("peer", "host"):
        return _link(key, value, getattr(base, key, PCIE3).latency)
    if key in UNITS:
        return quantity(value, UNITS[key], key)
    if key == "memory":
        return parse_size(value)
    if key == "l2":
        return parse_size(value, key, least=1)
    if key in ("processors", "bus"):
        return _count(key, value)
    if key == "capability":
        return _capability(value)
    if key == "bridge" and isinstance(value, dict):
        value = {"switch": False, "bridge": True, **value}
    if key in ("nvlink", "bridge"):
        return _nvlink(key, value)
    kind = bool if key == "peer_access" else str
    if not isinstance(value, kind) or not str(value).strip():
        raise ValueError(f"{key} = {value!r} must be {'true or false' if kind is bool else 'text'}")
    return value


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ValueError(f"{key} = {value!r} must be a whole number above 0, and at most {MOST:,}")
    return value


def _capability(value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)", str(value))
    numbers = match.groups() if match else value
    try:
        major, minor = numbers if isinstance(numbers, (list, tuple)) else ()
        return int(major), int(minor)
    except (TypeError, ValueError):
        raise ValueError(f'capability = {value!r} must be two numbers, as in "8.9"') from None


def _link(key: str, value: Any, latency: float) -> Link:
    if isinstance(value, dict):
        units.check_keys(value, ["bandwidth", "latency"], f"key of {key}")
        if "latency" in value:
            latency = quantity(value["latency"], "s", f"{key}.latency")
        if "bandwidth" not in value:
            raise ValueError(f"{key} must say its bandwidth")
        value = value["bandwidth"]
    match = re.fullmatch(r"\s*pci-?e\s*([3-5])(?:\.0)?(?:\s*x\s*(\d+))?\s*", str(value), re.IGNORECASE)
    if match:
        generation, lanes = int(match[1]), int(match[2] or 16)
        return Link(PCIE3.bandwidth * 2 ** (generation - 3) * lanes / 16, PCIE3.latency)
    try:
        return Link(quantity(value, "B/s", key), latency)
    except ValueError as error:
        raise ValueError(f'{error}, or "PCIe 3.0" to "PCIe 5.0"') from None


def _nvlink(key: str, value: Any) -> NVLink:
    names = [field.name for field in fields(NVLink)]
    if not isinstance(value, dict) or set(names) - {"bridge"} - set(value):
        raise ValueError(f'{key} = {{links = 12, bandwidth = "25 GB/s", switch = true}} says all three')
    units.check_keys(value, names, f"key of {key}")
    for name in ("switch", "bridge"):
        if not isinstance(value.get(name, False), bool):
            raise ValueError(f"{key}.{name} = {value[name]!r} must be true or false")
    bandwidth = quantity(value["bandwidth"], "B/s", f"{key}.bandwidth")
    return NVLink(_count(f"{key}.links", value["links"]), bandwidth, value["switch"], value.get("bridge", False))


# -- The table.

MEASURED_AS = "measured_as"  # of the table alone: the key of the card whose measured shares stand in for this one's (data/achieved.toml)


def _card(key: str, values: dict) -> Spec:
    return spec_of({name: value for name, value in values.items() if name != MEASURED_AS})


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


# -- Looked up by the names that people write, from a file of one's own, or several for one machine.


def find_spec(like: str | os.PathLike | Spec, memory: int | str | None = None) -> Spec:
    """The card of that name, with another memory size where one is given (bytes, or "16 GB").

    like: a name in the table, as `torch.cuda.get_device_name` prints it or as people write it ("A100", "a100-80gb",
    "A100 PCIe", "RTX4090", "4090"), with NVLink behind it for a card with its bridge ("TITAN RTX NVLink"); the path of
    a .toml or .json file (see above); or a Spec, which is kept.

    Raises ValueError, naming what there is, for an unknown name, a file that does not say a card, or a size that cannot
    be read.
    """
    if isinstance(like, Spec):
        spec = like
    elif isinstance(like, os.PathLike) or (isinstance(like, str) and _is_path(like)):
        spec = _load(Path(like))
    else:
        spec = _named(like)
    return spec if memory is None else replace(spec, memory=parse_size(memory))


def _is_path(name: str) -> bool:
    """Whether there is such a file is not asked."""
    return name.lower().endswith((".toml", ".json"))


def _load(path: Path) -> Spec:
    """The card that the file says. Raises ValueError, in a sentence that begins with the path."""
    try:
        values = units.parse(path)
        if "base" not in values:
            return spec_of(values)
        name = values.pop("base")
        if not isinstance(name, str) or _is_path(name):
            raise ValueError(f"base = {name!r} must be the name of a card in the table")
        return spec_of(values, find_spec(name))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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
        "A card of your own: a .toml file (virtualgpu.hardware.specs says its keys)."
    )
    return "\n".join([*lines, "", foot])
