"""The command line of `python -m virtualgpu fit`."""

import re
import sys

from virtualgpu.run import cli, fit, fit_table

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
  --prices FILE     a table with the columns card and usd_per_hour (virtualgpu/hardware/data/prices.csv)
  --jobs N          programs at a time (one a core, as far as memory goes)
  --json            the trials as JSON

Exit status: 0 where something fits, 1 where nothing does, 2 where the program failed or the command line is wrong.
"""
WITH_VALUE = ("--like", "--gpus", "--world-size", "--vary", "--memory", "--steps", "--prices", "--jobs")


def main(arguments: list[str]) -> int:
    """The exit status, as USAGE says it."""
    try:
        options, command = parse(arguments)
        if "--help" in options:
            print(USAGE, end="")
            return 0
        if not command:
            raise ValueError("name a program to try: a script, a command, or -m and a module (fit --help says more)")
        per_hour = fit_table.prices(*options.get("--prices", []))
        bar = _Bar()
        world_size = _number("--world-size", options)
        trials = fit.run(
            command,
            like=_list(options, "--like", "T4"),
            gpus=[int(number) for number in _list(options, "--gpus", "1", r"[1-9]\d*")],
            vary=dict(_varied(text) for text in options.get("--vary", [])),
            world_size=world_size,
            memory=options.get("--memory", [None])[-1],
            step=_number("--steps", options, 4),
            jobs=_number("--jobs", options),
            told=bar.told,
        )
        bar.end()
    except (ValueError, OSError) as error:
        print(f"python -m virtualgpu fit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    told = (
        fit_table.as_json(trials, per_hour, world_size)
        if "--json" in options
        else "\n".join(fit_table.lines(trials, per_hour, world_size))
    )
    print(told)
    return 0 if any(trial.fits for trial in trials) else 2 if any(trial.status == "failed" for trial in trials) else 1


def parse(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options up to the program, each with its values; and the program with its arguments. Raises ValueError."""
    options: dict[str, list[str]] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        name, equals, value = rest.pop(0).partition("=")
        if name in ("--json", "--help", "-h"):
            options["--help" if name == "-h" else name] = []
        elif name not in WITH_VALUE:
            raise ValueError(
                f"there is no option {name!r} (fit --help lists them; options of the program come after it)"
            )
        elif equals or rest:
            options.setdefault(name, []).append(value if equals else rest.pop(0))
        else:
            raise ValueError(f"{name} needs a value after it")
    return options, rest


def _varied(text: str) -> tuple[str, list[str] | fit.Range]:
    name, equals, values = text.lstrip("-").partition("=")
    if not equals or not name or not values:
        raise ValueError(
            f"--vary {text!r}: give an option of the program and its values, such as batch-size=8,16,32 or batch-size=8..512"
        )
    if between := re.fullmatch(r"(\d+)\.\.(\d+)", values):
        return name, fit.Range(int(between[1]), int(between[2]))
    return name, values.split(",")


def _list(options: dict[str, list[str]], name: str, default: str, form: str = r".+") -> list[str]:
    values = [value.strip() for value in options.get(name, [default])[-1].split(",")]
    if wrong := [value for value in values if not re.fullmatch(form, value)]:
        raise ValueError(f"{name} {wrong[0]!r}: give {'names' if form == '.+' else 'whole numbers'} with commas")
    return values


def _number(name: str, options: dict[str, list[str]], default: int | None = None) -> int | None:
    return cli.whole(name.lstrip("-"), options[name][-1]) if name in options else default


class _Bar:
    """One line on a terminal: how many trials have ended, and the last of them."""

    def __init__(self):
        self.count, self.shown = 0, sys.stderr is not None and sys.stderr.isatty()

    def told(self, trial: fit.Trial) -> None:
        self.count += 1
        if self.shown:
            values = " ".join(f"{name}={value}" for name, value in trial.values.items())
            print(
                f"\r\033[K{self.count} tried: {trial.gpus} x {trial.card} {values} {trial.status}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
