"""A card of one's own from a file, TOML or JSON: `like="mycard.toml"`.

    name = "NVIDIA GeForce RTX 4080"     # as torch.cuda.get_device_name is to print it
    memory = "15.6 GB"                   # what the driver leaves; a size, or bytes
    capability = "8.9"
    processors = 76                      # streaming multiprocessors
    bandwidth = "717 GB/s"               # of its memory; text with a unit, or bytes/s
    host = "PCIe 4.0"                    # or "PCIe 4.0 x8", "25 GB/s", {bandwidth = "25 GB/s", latency = "10 us"}
    rates = {float32 = "48.7 TFLOPS", tf32 = "48.7 TFLOPS", float16 = "97.5 TFLOPS", bfloat16 = "97.5 TFLOPS"}   # dense

These must be there, of the rates float32; or `base = "A100"` (a name in the table), and then only what is different.
What may be there: peer (a link like host; without it copies between GPUs pass through the host), peer_access (true or
false), kernel (time that any kernel takes, "2 us"), clock, memory_clock ("2505 MHz"), bus (bits), l2 ("64 MB"), power
("320 W"), nvlink ({links = 12, bandwidth = "25 GB/s", switch = true}, of one link one way; bridge = true where they
join two cards alone). Rates may also name float64, float8 (both kinds), float8_e4m3fn, float8_e5m2.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from virtualgpu.hardware.datasheet import PCIE3, TF32, Link, NVLink, Spec
from virtualgpu.hardware.units import parse_size, quantity

NEEDED = ("name", "memory", "capability", "processors", "bandwidth", "host", "rates")
RATES = {
    "tf32": (TF32,),
    "float8": (torch.float8_e4m3fn, torch.float8_e5m2),
    **{
        name: (getattr(torch, name),)
        for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    },
}
UNITS = {"bandwidth": "B/s", "kernel": "s", "clock": "Hz", "memory_clock": "Hz", "power": "W"}


def load(path: str | Path, find: Callable[[str], Spec]) -> Spec:
    """The card that the file says. `find` looks up its `base`. Raises ValueError, in a sentence that begins with the path."""
    path = Path(path)
    try:
        return _read(path, find)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(path: Path, find: Callable[[str], Spec]) -> Spec:
    found = _parsed(path)
    allowed = ["base", *(field.name for field in fields(Spec))]
    _only(found, allowed, "key")
    base = None
    if "base" in found:
        name = found.pop("base")
        if not isinstance(name, str) or is_path(name):
            raise ValueError(f"base = {name!r} must be the name of a card in the table")
        base = find(name)
    missing = [key for key in NEEDED if key not in found]
    if base is None and missing:
        raise ValueError(
            f'{", ".join(missing)} must be there too, or base = "A100" (say) for what it has in common with that'
        )
    given = {key: _value(key, value, base) for key, value in found.items()}
    if base is None:
        if torch.float32 not in given["rates"]:
            raise ValueError("rates must say float32")
        if "peer" not in given:
            given = {"peer": given["host"], "peer_access": False, **given}
        return Spec(**given)
    # figures that follow from changed ones are no longer the base's
    if "bandwidth" in given:
        given = {"memory_clock": None, "bus": None, **given}
    if "processors" in given or torch.float32 in given.get("rates", ()):
        given = {"clock": None, **given}
    return replace(base, **{**given, "rates": {**base.rates, **given.get("rates", {})}})


def _parsed(path: Path) -> dict:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError("there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read ({error})") from None
    try:
        found = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("it must hold keys with values")
    return found


def is_path(name: str) -> bool:
    """Does it end in .toml or .json? Whether there is such a file is not asked."""
    return name.lower().endswith((".toml", ".json"))


def _only(found: dict, allowed: list[str], what: str) -> None:
    for key in found:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1, 0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"{key!r} is no {what} here; {meant}There are {', '.join(allowed)}")


def _value(key: str, value, base: Spec | None):
    if key == "rates":
        if not isinstance(value, dict):
            raise ValueError('rates = {float32 = "48.7 TFLOPS", ...} says the rate of each dtype')
        _only(value, list(RATES), "dtype of rates")
        return {dtype: quantity(rate, "FLOP/s", name) for name, rate in value.items() for dtype in RATES[name]}
    if key in ("peer", "host"):
        return _link(key, value, base and getattr(base, key))
    if key in UNITS:
        return quantity(value, UNITS[key], key)
    if key == "memory":
        return parse_size(value)
    if key == "l2":
        return parse_size(value, "l2", least=1)
    if key in ("processors", "bus"):
        return _count(key, value)
    if key == "capability":
        return _capability(value)
    if key == "nvlink":
        return _nvlink(value)
    kind = bool if key == "peer_access" else str
    if not isinstance(value, kind):
        raise ValueError(f"{key} = {value!r} must be {'true or false' if kind is bool else 'text'}")
    return value


def _count(key: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} = {value!r} must be a whole number above 0")
    return value


def _capability(value) -> tuple[int, int]:
    numbers = value if isinstance(value, list) else re.fullmatch(r"(\d+)\.(\d)", str(value))
    try:
        major, minor = numbers if isinstance(numbers, list) else numbers.groups()
        return int(major), int(minor)
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f'capability = {value!r} must be two numbers, as in "8.9"') from None


def _link(key: str, value, before: Link | None) -> Link:
    latency = (before or PCIE3).latency
    if isinstance(value, dict):
        _only(value, ["bandwidth", "latency"], f"key of {key}")
        if "latency" in value:
            latency = quantity(value["latency"], "s", f"{key}.latency")
        if "bandwidth" not in value:
            raise ValueError(f"{key} must say its bandwidth")
        value = value["bandwidth"]
    if isinstance(value, str):
        found = re.fullmatch(r"\s*pci-?e\s*([3-5])(?:\.0)?(?:\s*x\s*(\d+))?\s*", value, re.IGNORECASE)
        if found:
            generation, lanes = int(found[1]), int(found[2] or 16)
            return Link(PCIE3.bandwidth * 2 ** (generation - 3) * lanes / 16, PCIE3.latency)
    try:
        return Link(quantity(value, "B/s", key), latency)
    except ValueError as error:
        raise ValueError(f'{error}, or "PCIe 3.0" to "PCIe 5.0"') from None


def _nvlink(value) -> NVLink:
    names = [field.name for field in fields(NVLink)]
    if not isinstance(value, dict) or set(names) - {"bridge"} - set(value):
        raise ValueError('nvlink = {links = 12, bandwidth = "25 GB/s", switch = true} says all three')
    _only(value, names, "key of nvlink")
    for key in ("switch", "bridge"):
        if not isinstance(value.get(key, False), bool):
            raise ValueError(f"nvlink.{key} = {value[key]!r} must be true or false")
    bandwidth = quantity(value["bandwidth"], "B/s", "nvlink.bandwidth")
    return NVLink(_count("nvlink.links", value["links"]), bandwidth, value["switch"], value.get("bridge", False))
