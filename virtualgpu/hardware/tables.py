"""Tables of figures in TOML: those of `data/`, and files of one's own. An error says the file, the key and what may be there."""

import difflib
import functools
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

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
