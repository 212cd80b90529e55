"""Sizes and figures as people write them, and the tables of figures in TOML and as text."""

import difflib
import functools
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

# -- Tables of figures in TOML: those of `data/`, and files of one's own. An error says the file, the key and what may be there.

DATA = Path(__file__).parent / "data"
T = TypeVar("T")


@functools.cache
def rows(name: str) -> dict[str, Any]:
    """What data/NAME.toml holds."""
    return parse(DATA / f"{name}.toml")


def read(name: str, reader: Callable[[str, dict[str, Any]], T]) -> dict[str, T]:
    """What `reader` makes of each table of data/NAME.toml and its key. Raises ValueError, naming file and key."""
    result = {}
    for key, row in rows(name).items():
        try:
            result[key] = reader(key, row)
        except ValueError as error:
            raise ValueError(f"{DATA / name}.toml: [{key}] {error}") from None
    return result


def parse(path: Path) -> dict[str, Any]:
    """The keys and values of a TOML or JSON file. Raises ValueError."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' editors begin a file with a mark
    except FileNotFoundError:
        raise ValueError("there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read ({error})") from None
    try:
        values = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("it must hold keys with values")
    return values


def check_keys(values: Mapping[str, Any], allowed: Iterable[str], what: str = "key") -> None:
    """Raises ValueError for a key that is not among those."""
    allowed = list(allowed)
    for key in values:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1, 0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"{key!r} is no {what} here; {meant}There are {', '.join(allowed)}")


# -- Sizes and figures as people write them: "16 GB", "1008 GB/s", "82.6 TFLOPS", "2520 MHz". Plain numbers are in base units.


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MIN_BYTES, MAX_BYTES = 2 * MIB, 1 << 50  # PyTorch's smallest segment is 2 MiB; no GPU has a PiB

_UNITS = {  # how each base unit may be spelled, after its prefix
    "B/s": r"b(?:ytes?)?/s(?:ec)?",
    "FLOP/s": r"flops?(?:/s)?",
    "Hz": r"hz",
    "W": r"w(?:atts?)?",
    "s": r"s(?:ec)?",
}
_EXAMPLES = {"B/s": "1008 GB/s", "FLOP/s": "82.6 TFLOPS", "Hz": "2520 MHz", "W": "450 W", "s": "2 us"}
PLAUSIBLE = {
    "B/s": (1e5, 1e15),
    "FLOP/s": (1e9, 1e18),
    "Hz": (1e6, 1e11),
    "W": (1.0, 1e5),
    "s": (1e-9, 1.0),
}  # of one card
_LARGE = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12, "p": 15}  # powers of ten
_SMALL = {"": 0, "m": -3, "u": -6, "µ": -6, "n": -9}  # of seconds alone: nobody writes of milliwatts here


def parse_size(size: int | float | str, what: str = "memory", least: int = MIN_BYTES) -> int:
    """Bytes from 256_000_000, "256 MB", "16 GB", "1.5 GiB". As for GPUs, a kB here is 1,024 bytes, and so on.

    Raises ValueError, in a sentence that begins with `what`, for what is no size, below `least` bytes or above 1 PiB.
    """
    cure = 'give bytes, or text like "256 MB" or "16 GB"'
    number: Any = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([\d_.]+)\s*([kmgtp]?)(?:i?b|bytes)?\s*", size, re.IGNORECASE)
        number = match and _float(match[1])
        if match and number is not None:
            number *= 1024 ** " kmgtp".index(match[2].lower() or " ")
    if not _is_number(number):
        raise ValueError(f"{what}={size!r} is not a size: {cure}")
    if number < least:
        why = (
            "a GPU needs at least 2 MiB (PyTorch's smallest segment)" if least == MIN_BYTES else f"{least} is the least"
        )
        raise ValueError(f"{what}={size!r} is {number:,.0f} bytes, and {why}: {cure}")
    if number > MAX_BYTES:
        raise ValueError(f"{what}={size!r} is more than any GPU has; at most 1 PiB (1,024 TB) goes: {cure}")
    return int(number)


def quantity(value: object, unit: str, what: str) -> float:
    """A figure in base units (B/s, FLOP/s, Hz, W or s) from a number, or from text with a decimal prefix.

    Raises ValueError, in a sentence that begins with `what`, for what is no figure above 0, or not PLAUSIBLE.
    """
    number: Any = value
    if isinstance(value, str):
        prefixes = _SMALL if unit == "s" else _LARGE
        pattern = rf"\s*([\d_.]+)(?:e([+-]?\d+))?\s*(?:({'|'.join(prefixes)}){_UNITS[unit]})?\s*"
        match = re.fullmatch(pattern, value, re.IGNORECASE)
        # the figure as it is written, rounded once: "8.1 TFLOPS" is 8.1e12, which 8.1 * 1e12 need not be
        number = match and _float(f"{match[1]}e{int(match[2] or 0) + prefixes[(match[3] or '').lower()]}")
    if not _is_number(number) or not 0 < number < math.inf:
        raise ValueError(
            f'{what} = {value!r} is no figure in {unit}: give a number above 0 in {unit}, or text like "{_EXAMPLES[unit]}"'
        )
    least, most = PLAUSIBLE[unit]
    if not least <= number <= most:
        raise ValueError(
            f'{what} = {value!r} is {number:g} {unit}, and {least:g} to {most:g} go here: is its unit there, as in "{_EXAMPLES[unit]}"?'
        )
    return float(number)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def text_table(lines: Sequence[Sequence[str]], left: Sequence[int] = (), gap: str = "  ") -> list[str]:
    """Cells in columns, a text for each line. left: columns whose cells begin at the left; others end at the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [
        [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return [gap.join(line).rstrip() for line in cells]
