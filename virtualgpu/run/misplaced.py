"""Options of the runner that stand behind the program, which gets them: named where the program cannot have meant them.

A program may have an option of the same name (--gpus is Lightning's as well). So a word is held to be ours where the program ends as
one that does not know its arguments, and its own file does not have the word; or where that file cannot look at its arguments at all.
"""

import ast
import os
import sys
from collections.abc import Collection
from pathlib import Path

# From the standard library, or installed, and known to read no arguments
HARMLESS = {"torch", "torchvision", "numpy", "virtualgpu", "matplotlib", "tqdm"}
READERS = {"argparse", "optparse", "getopt", "runpy", "importlib", "subprocess"}
LAUNCHERS = "torchrun accelerate torch.distributed.run torch.distributed.launch accelerate.commands.launch".split()  # noqa: SIM905
USAGE_ERROR = 2  # what argparse and click end with


def at_start(program: tuple[str, ...], options: Collection[str]) -> str | None:
    """A sentence, where the program is a script that reads no arguments; also behind torchrun and its kind."""
    program = _script(program)
    words, text = _words(program, options), _source(program)
    return _sentence(words[0], program, "reads no arguments") if words and text and _reads_nothing(text) else None


def at_end(program: tuple[str, ...], status: int, options: Collection[str]) -> str | None:
    """A sentence, where the program ended because of its arguments, perhaps of this one."""
    if status != USAGE_ERROR:
        return None
    text = _source(program) or ""
    word = next((word for word in _words(program, options) if word not in text), None)
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


def _words(program: tuple[str, ...], options: Collection[str]) -> list[str]:
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
