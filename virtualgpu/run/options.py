"""Options, as a usage text lists them, before a program: what the command lines of `python -m virtualgpu` and its `fit` share. And options of
the runner that stand behind the program, which gets them: named where the program cannot have meant them.

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


# -- Options of the runner that stand behind the program, which gets them: named where the program cannot have meant them.
#
# A program may have an option of the same name (--gpus is Lightning's as well). So a word is held to be ours where the program ends as
# one that does not know its arguments, and its own file does not have the word; or where that file cannot look at its arguments at all.

# From the standard library, or installed, and known to read no arguments
HARMLESS = {"torch", "torchvision", "numpy", "virtualgpu", "matplotlib", "tqdm"}
READERS = {"argparse", "optparse", "getopt", "runpy", "importlib", "subprocess"}
LAUNCHERS = "torchrun accelerate torch.distributed.run torch.distributed.launch accelerate.commands.launch".split()  # noqa: SIM905
USAGE_ERROR = 2  # what argparse and click end with


def at_start(program: tuple[str, ...], options: Collection[str]) -> str | None:
    """A sentence, where the program is a script that reads no arguments; also behind torchrun and its kind."""
    program = _script(program)
    behind, text = _options_behind(program, options), _source(program)
    return _sentence(behind[0], program, "reads no arguments") if behind and text and _reads_nothing(text) else None


def at_end(program: tuple[str, ...], status: int, options: Collection[str]) -> str | None:
    """A sentence, where the program ended because of its arguments, perhaps of this one."""
    if status != USAGE_ERROR:
        return None
    text = _source(program) or ""
    word = next((word for word in _options_behind(program, options) if word not in text), None)
    return None if word is None else _sentence(word, program, "got it")


def _sentence(word: str, program: tuple[str, ...], what: str) -> str:
    name = program[1] if program[0] == "-m" else program[0]
    return f"{word} stands behind {name}, which {what}: options of `python -m virtualgpu` come before the program"


def _script(program: tuple[str, ...]) -> tuple[str, ...]:
    """The script and what is behind it, where a launcher starts it."""
    name, behind = (program[1], program[2:]) if program[0] == "-m" else (program[0], program[1:])
    if os.path.basename(name) not in LAUNCHERS:
        return program
    start = next((index for index, word in enumerate(behind) if word.endswith(".py") and os.path.isfile(word)), None)
    return program if start is None else behind[start:]


def _options_behind(program: tuple[str, ...], options: Collection[str]) -> list[str]:
    """Those behind the program that are called as our options."""
    words = program[2:] if program[0] in ("-m", "-c") else program[1:]
    words = words[: words.index("--")] if "--" in words else words
    return [name for word in words if (name := word.partition("=")[0]) in options]


def _source(program: tuple[str, ...]) -> str | None:
    """A script's text; None for anything else, and for what cannot be read."""
    try:
        return Path(program[0]).read_text("utf-8") if program[0].endswith(".py") else None
    except (OSError, ValueError):
        return None


def _reads_nothing(text: str) -> bool:
    """Does it import only what reads no arguments, and never speak of argv?"""
    if "argv" in text or "__import__" in text:
        return False
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += ["" if node.level else str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in imported} <= (HARMLESS | sys.stdlib_module_names) - READERS
