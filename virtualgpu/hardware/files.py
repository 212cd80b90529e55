"""A card of one's own from a file, TOML or JSON: `like="mycard.toml"`. The table of cards (data/cards.toml) has the same keys.

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

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from virtualgpu.hardware import datasheet, units
from virtualgpu.hardware.datasheet import DTYPES, FLOAT32, PCIE3, Link, NVLink, Spec
from virtualgpu.hardware.units import parse_size, quantity

NEEDED = ("name", "memory", "capability", "processors", "bandwidth", "host", "rates")
RATES = {"float8": ("float8_e4m3fn", "float8_e5m2"), **{dtype: (dtype,) for dtype in DTYPES}}
STAGED = "staged"
MOST = 100_000  # multiprocessors, bits of a bus, links
UNITS = {"bandwidth": "B/s", "kernel": "s", "clock": "Hz", "memory_clock": "Hz", "power": "W"}


def is_path(name: str) -> bool:
    """Does it end in .toml or .json? Whether there is such a file is not asked."""
    return name.lower().endswith((".toml", ".json"))


def load(path: str | Path, find: Callable[[str], Spec]) -> Spec:
    """The card that the file says. `find` looks up its `base`. Raises ValueError, in a sentence that begins with the path."""
    path = Path(path)
    try:
        values = units.parse(path)
        if "base" not in values:
            return card(values)
        name = values.pop("base")
        if not isinstance(name, str) or is_path(name):
            raise ValueError(f"base = {name!r} must be the name of a card in the table")
        return card(values, find(name))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def card(values: dict[str, Any], base: Spec | None = None) -> Spec:
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
