"""What the command lines of `python -m virtualgpu` and its `fit` share: options, as a usage text lists them, before a program.

Not argparse: it would take `-m`, `-c` and what stands behind them for options of its own.
"""

import re
from collections.abc import Mapping, Sequence

from virtualgpu import environment


def listed(usage: str) -> dict[str, bool]:
    """The options that the text has a line of, and whether a value (in capitals) follows each; and --help."""
    return {name: bool(value) for name, value in re.findall(r"^  (--[a-z-]+)(?: ([A-Z]))?", usage, re.M)} | {
        "--help": False
    }


def split(arguments: Sequence[str], options: Mapping[str, bool], usage: str) -> tuple[dict[str, list], list[str]]:
    """Each option that was given, with its values (True for one that takes none); and the program with its arguments.

    options: as `listed` gives them. usage: what lists them for people. Raises ValueError.
    """
    values: dict[str, list] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "-m", "-c"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = "--help" if name == "-h" else name
        if name not in options or (equals and not options[name]):
            raise ValueError(f"there is no option {word!r} ({usage} lists them; options of the program come after it)")
        if options[name] and not equals:
            if not rest:
                raise ValueError(f"{name} needs a value after it")
            value = rest.pop(0)
        values.setdefault(name, []).append(value if options[name] else True)
    if rest in (["-m"], ["-c"]):
        raise ValueError(f"{rest[0]} needs {'a module' if rest == ['-m'] else 'code'} after it")
    return values, rest


def whole_number(name: str, text: str) -> int:
    """The value of the option `name`. Raises ValueError."""
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} {text!r}: give a whole number")
    return int(text)


def number_of_gpus(text: str) -> int:
    """Raises ValueError."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number <= environment.MAX_GPUS:
        raise ValueError(f"{text!r} GPUs: ask for 1 to {environment.MAX_GPUS}")
    return number
