"""The command line of `python -m virtualgpu fit`."""

import re
import sys

from virtualgpu.run import options, shortage
from virtualgpu.run.fit import prices, progress, search, table
from virtualgpu.run.trials.programs import ended_by_sigterm

USAGE = """\
usage: python -m virtualgpu fit [options] SCRIPT [arguments]        (or -m MODULE, or a COMMAND such as torchrun)

Will it fit, before I rent? The unchanged program, dry, over cards, numbers of GPUs and values of its own options.

  --like CARDS      names with commas: T4,L4,A100 (T4)
  --gpus NUMBERS    how many, with commas: 1,2,4 (1). {gpus} in the program's arguments stands for the number:
                    fit --gpus 1,2,4 torchrun --standalone --nproc-per-node={gpus} train.py
  --world-size N    one rank of so many plays alone (FSDP2 and the like, on more GPUs than processes would have room)
  --vary NAME=V,V   values of the program's option --NAME; several times for several options. NAME=8..512 searches
                    for the largest that fits: 8, 16, 32, ..., then between
  --memory SIZE     of each GPU, such as 16GB; the card's own unless given
  --steps N         optimizer steps after which the program is ended (4); 0: it runs to its end
  --samples PRODUCT samples of all ranks in an optimizer's step, where "samples/s" should not go by the rows that go into
                    the model: '{batch-size}*{gpus}*4'
  --prices FILE     a table with the columns card and usd_per_hour (virtualgpu/hardware/data/prices.csv)
  --jobs N          programs at a time (one a core, as far as memory goes; one, where ranks may meet at a fixed port: on
                    several GPUs or by a launcher, unless torchrun is --standalone)
  --limit SECONDS   after which a program is ended, and has failed (one that makes no optimizer step may run on and on)
  --json            the trials as JSON

Options of fit stand before the program. A program that decides by a value of the GPU gets nan in a dry run, and is told so.

Exit status: 0 where something fits, 1 where nothing does, 2 where the program failed or the command line is wrong.
"""
OPTIONS = options.listed(USAGE)


def main(arguments: list[str]) -> int:
    """The exit status, as USAGE says it."""
    with ended_by_sigterm():
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    done: list[search.Trial] = []  # for an interrupt
    try:
        values, command = options.split(arguments, OPTIONS, "fit --help")
        if "--help" in values:
            print(USAGE, end="")
            return 0
        if not command:
            raise ValueError("name a program to try: a script, a command, or -m and a module (fit --help says more)")
        known = prices.load(*values.get("--prices", [])[-1:])
        varied = dict(varied_by(text) for text in values.get("--vary", []))
        chosen = {
            "like": _list(values, "--like", "T4"),
            "gpus": [int(number) for number in _list(values, "--gpus", "1", r"[1-9]\d*")],
            "vary": varied,
        }
        world_size = _number("--world-size", values)
        with progress.of(**chosen) as note:
            trials = search.run(
                command,
                **chosen,
                world_size=world_size,
                memory=values.get("--memory", [None])[-1],
                step=_number("--steps", values, 4),
                jobs=_number("--jobs", values),
                samples=values.get("--samples", [None])[-1],
                limit=_number("--limit", values),
                on_trial=lambda trial: (done.append(trial), note(trial)),
            )
    except (ValueError, OSError) as error:
        print(f"python -m virtualgpu fit: {error}{shortage.cure(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if done and "--json" not in values:
            print(*table.lines(done, known, world_size), sep="\n", flush=True)
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    if "--json" in values:
        print(table.as_json(trials, known, world_size))
    else:
        print(*table.lines(trials, known, world_size, search.searched(varied)), sep="\n")
    return 0 if any(trial.fits for trial in trials) else 2 if any(trial.status == "failed" for trial in trials) else 1


def varied_by(text: str) -> tuple[str, list[str] | search.Range]:
    """An option of the program and its values, of "batch-size=8,16" or "batch-size=8..512". Raises ValueError for another form."""
    name, equals, texts = text.lstrip("-").partition("=")
    if not equals or not name or not texts:
        raise ValueError(
            f"--vary {text!r}: give an option of the program and its values, such as batch-size=8,16,32 or batch-size=8..512"
        )
    if between := re.fullmatch(r"(\d+)\.\.(\d+)", texts):
        return name, search.Range(int(between[1]), int(between[2]))
    return name, texts.split(",")


def _list(values: dict[str, list[str]], name: str, default: str, form: str = r".+") -> list[str]:
    words = [word.strip() for word in values.get(name, [default])[-1].split(",")]
    if wrong := [word for word in words if not re.fullmatch(form, word)]:
        raise ValueError(f"{name} {wrong[0]!r}: give {'names' if form == '.+' else 'whole numbers'} with commas")
    return words


def _number(name: str, values: dict[str, list[str]], default: int | None = None) -> int | None:
    return options.whole_number(name, values[name][-1]) if name in values else default
