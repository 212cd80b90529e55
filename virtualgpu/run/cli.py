"""The command line of `python -m virtualgpu`."""

import os
import sys
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.run import cards

USAGE = """\
usage: python -m virtualgpu [options] SCRIPT [arguments]
       python -m virtualgpu [options] -m MODULE [arguments]
       python -m virtualgpu [options] -c CODE [arguments]

Run a program as if this machine had GPUs. They are there before its first line, also in the processes that it starts.

  --gpus N       how many (2, or as many as --like names)
  --like CARD    a card's name (T4), or the path of a card's file; several with commas (T4,H100) for one of each
  --memory SIZE  memory of each, such as 16GB; the card's own unless given
  --dry          shapes alone: places, memory and time without the numbers
  --world-size N one rank of so many plays alone, with --dry: what no laptop could hold
  --rank R       which of them (0)
  --gpus-per-node G  how many GPUs a node has (8)
  --trace FILE   write what each GPU did, on the simulated clock, as a Chrome trace (ui.perfetto.dev opens it)
  --report       also tell what lay on each GPU at its peak
  --quiet        no table at the end
  --cards        list the cards there are, and end
"""
MOST = 64  # GPUs
WITH_VALUE = ("--gpus", "--like", "--memory", "--trace", "--world-size", "--rank", "--gpus-per-node")
WITHOUT = ("--dry", "--report", "--quiet", "--cards", "--help")


class Options(NamedTuple):
    """A command line, read. `program`: what Python gets."""

    gpus: int | None = None
    like: str = "T4"
    memory: str | None = None
    trace: str | None = None
    dry: bool = False
    report: bool = False
    quiet: bool = False
    cards: bool = False
    help: bool = False
    program: tuple[str, ...] = ()
    world_size: int | None = None
    rank: int | None = None
    gpus_per_node: int | None = None


def main(arguments: list[str]) -> int:
    """Run what the command line says. The status is the program's; 2, after one sentence, where it says nothing useful."""
    try:
        options = parse(arguments)
        if options.help:
            print(USAGE, end="")
            return 0
        if options.cards:
            print(cards.table())
            return 0
        if not options.program:
            raise ValueError("name a program to run: a script, or -m and a module (--help says more)")
        settings = environment.Settings(
            cards.find(1 if options.world_size and not options.gpus else options.gpus, options.like, options.memory),
            options.dry,
            None,
            bool(options.trace),
            options.report,
            _alone(options),
        )
        from virtualgpu.run import program

        status = program.run(settings, list(options.program), options.trace, options.quiet)
    except ValueError as error:
        print(f"python -m virtualgpu: {error}", file=sys.stderr)
        return 2
    if status < 0:
        from virtualgpu.run import warden

        return warden.end_as(status)
    return status


def parse(arguments: list[str]) -> Options:
    """Options up to the program; everything after it is the program's. Raises ValueError."""
    found, rest = {}, list(arguments)
    while rest:
        word = rest[0]
        if word in ("-m", "-c"):
            if len(rest) < 2:
                raise ValueError(f"{word} needs {'a module' if word == '-m' else 'code'} after it")
            break
        if word == "-" or not word.startswith("-"):
            break
        del rest[0]
        name, given, value = word.partition("=")
        name = "--help" if name == "-h" else name
        if name in WITHOUT and not given:
            found[name[2:]] = True
        elif name in WITH_VALUE:
            if not given and not rest:
                raise ValueError(f"{name} needs a value after it")
            found[name[2:].replace("-", "_")] = value if given else rest.pop(0)
        else:
            raise ValueError(f"there is no option {word!r} (--help lists them; options of the program come after it)")
    if "gpus" in found:
        found["gpus"] = number(found["gpus"])
    for name in ("world_size", "rank", "gpus_per_node"):
        if name in found:
            found[name] = _whole(name, found[name])
    if found.get("trace") is not None:
        found["trace"] = _writable(found["trace"])
    if found.get("quiet") and found.get("report"):
        raise ValueError("--quiet and --report contradict each other: choose one")
    return Options(**found, program=tuple(rest))


def _alone(options: Options) -> tuple[int, int, int] | None:
    """world_size, rank and gpus_per_node, where one process plays one rank of many. Raises ValueError."""
    if options.world_size is None:
        if options.rank is not None or options.gpus_per_node is not None:
            raise ValueError("--rank and --gpus-per-node are of one rank of many: say of how many, --world-size N")
        return None
    if not options.dry:
        raise ValueError(
            "--world-size plays one rank of many, on shapes alone: add --dry (or start all ranks, by torchrun)"
        )
    rank, per_node = options.rank or 0, 8 if options.gpus_per_node is None else options.gpus_per_node
    if options.world_size < 1 or per_node < 1 or rank >= options.world_size:
        raise ValueError(
            f"--world-size {options.world_size} --rank {rank} --gpus-per-node {per_node}: ranks count from 0, and there is 1 at least"
        )
    return options.world_size, rank, per_node


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"--{name.replace('_', '-')} {text!r}: give a whole number")
    return int(text)


def number(text: str) -> int:
    """How many GPUs. Raises ValueError."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST:
        raise ValueError(f"{text!r} GPUs: ask for 1 to {MOST}")
    return int(text)


def _writable(path: str) -> str:
    whole = os.path.abspath(path)  # the program may change the folder
    folder = os.path.dirname(whole)
    if not path or os.path.isdir(whole) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"--trace {path!r}: name a file in a folder that is there and can be written to")
    return whole
