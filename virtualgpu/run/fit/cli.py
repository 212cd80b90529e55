"""The command line of `python -m virtualgpu fit`."""

import re
import sys

from virtualgpu.run import options, shortage
from virtualgpu.run.fit import call
from virtualgpu.run.fit.prices import load
from virtualgpu.run.fit.search import Trial
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
    done: list[Trial] = []  # for an interrupt
    try:
        given, command = options.split(arguments, OPTIONS, "fit --help")
        last = {name[2:]: values[-1] for name, values in given.items()}
        if "help" in last:
            print(USAGE, end="")
            return 0
        if not command:
            raise ValueError("name a program to try: a script, a command, or -m and a module (fit --help says more)")
        numbers = {
            name: options.whole_number(f"--{name}", last[name])
            for name in ("world-size", "steps", "jobs", "limit")
            if name in last
        }
        world_size, prices = numbers.get("world-size"), last.get("prices")
        trials = call.tried(
            command,
            _list(last, "like", "T4"),
            [int(number) for number in _list(last, "gpus", "1", r"[1-9]\d*")],
            dict(call.varied_by(text) for text in given.get("--vary", [])),
            world_size,
            prices,
            done.append,
            memory=last.get("memory"),
            samples=last.get("samples"),
            step=numbers.get("steps", 4),
            jobs=numbers.get("jobs"),
            limit=numbers.get("limit"),
        )
    except (ValueError, OSError) as error:
        print(f"python -m virtualgpu fit: {error}{shortage.cure(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if done and "json" not in last:
            print(call.Trials(done, load(prices), world_size, ""), flush=True)
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    print(trials.as_json() if "json" in last else trials)
    return 0 if any(trial.fits for trial in trials) else 2 if any(trial.status == "failed" for trial in trials) else 1


def _list(values: dict[str, str], name: str, default: str, form: str = r".+") -> list[str]:
    words = [word.strip() for word in values.get(name, default).split(",")]
    if wrong := [word for word in words if not re.fullmatch(form, word)]:
        raise ValueError(f"--{name} {wrong[0]!r}: give {'names' if form == '.+' else 'whole numbers'} with commas")
    return words
