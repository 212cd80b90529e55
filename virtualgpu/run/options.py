"""Options, as a usage text lists them, before a program: what the command lines of `python -m virtualgpu` and its `fit` share. And those that
stand behind the program, which gets them.

Not argparse: it would take `-m`, `-c` and what stands behind them for options of its own.
"""

import ast
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

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


# -- Options of the runner that stand behind a script which reads no arguments: named before it starts. (A program that reads some says itself
# what it does not know.)

# From the standard library, or installed, and known to read no arguments
HARMLESS = {"torch", "torchvision", "numpy", "virtualgpu", "matplotlib", "tqdm"}
READERS = {"argparse", "optparse", "getopt", "runpy", "importlib", "subprocess"}
LAUNCHERS = "torchrun accelerate torch.distributed.run torch.distributed.launch accelerate.commands.launch".split()  # noqa: SIM905


def misplaced(program: Sequence[str], options: Collection[str]) -> str | None:
    """A sentence on the first of them; also where a launcher starts the script."""
    if os.path.basename(program[1] if program[0] == "-m" else program[0]) in LAUNCHERS:
        script = (at for at, word in enumerate(program) if word.endswith(".py") and os.path.isfile(word))
        program = program[next(script, 0) :]
    name, *words = program
    words = words[: words.index("--")] if "--" in words else words
    behind = [option for word in words if (option := word.partition("=")[0]) in options]
    if not behind or not name.endswith(".py") or not _reads_nothing(name):
        return None
    return f"{behind[0]} stands behind {name}, which reads no arguments: options of `python -m virtualgpu` come before the program"


def _reads_nothing(script: str) -> bool:
    """Does it import only what reads no arguments, and never speak of argv?"""
    try:
        text = Path(script).read_text("utf-8")
        nodes = list(ast.walk(ast.parse(text)))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += ["" if node.level else str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    known = {name.partition(".")[0] for name in imported} <= (HARMLESS | sys.stdlib_module_names) - READERS
    return known and "argv" not in text and "__import__" not in text
