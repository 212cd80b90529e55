"""The command line of `python -m virtualgpu`: a program is started on the cards that it asks for, waited for, and told of."""

import contextlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, TextIO

from virtualgpu import environment
from virtualgpu.distributed.topology import RankConfig
from virtualgpu.hardware import specs
from virtualgpu.hardware.machine import find_network, find_settings, nodes
from virtualgpu.memory.ledger import entries
from virtualgpu.run import report
from virtualgpu.run.launcher import command, cure, environment_of, find_cards, folder
from virtualgpu.run.options import listed, misplaced, number_of_gpus, split, whole_number
from virtualgpu.run.processes import end_marked

# -- Start a program on virtual GPUs, wait for it, and tell what it did.


def run(settings: environment.Settings, arguments: list[str], trace: str | None, quiet: bool) -> int:
    """The program's exit status, as Popen gives it (negative: the signal that ended it); 1 for 0 where its trace could not be written.
    `arguments`: what Python would get, or a command.

    Raises ValueError where this Python was told to heed no environment, or no site: then virtual GPUs could not be there;
    OSError where there is no room for its folder, or no process more.
    """
    if sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError("Python's -I, -E and -S keep virtual GPUs out of the program: start it without them")
    with folder() as path:
        settings = settings._replace(folder=path)
        environ = environment_of(settings, os.environ)
        started = command(arguments, environ["PATH"])
        if os.name == "posix":
            from virtualgpu.run.processes import Supervisor

            supervisor = Supervisor(path)
            try:
                status = supervisor.wait(subprocess.Popen(started, env=environ))
            finally:
                supervisor.dismiss()
            if status < 0 or 128 < status <= 128 + signal.NSIG:  # of itself, or of what a shell ran: ranks may be left
                end_marked(path)
        else:  # Windows knows neither groups nor these signals
            with subprocess.Popen(started, env=environ) as program:
                status = _wait(program)
        complete = _tell(settings, path, trace, quiet, sys.stderr)
    return status or int(not complete)


def _wait(program: subprocess.Popen) -> int:
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return program.wait()


def _tell(settings: environment.Settings, folder: str, trace: str | None, quiet: bool, out: TextIO | None) -> bool:
    """False where the trace could not be written."""
    processes, complete = entries(folder), True
    lines = [] if quiet else report.table_lines(processes, settings)
    if trace is not None:
        from virtualgpu.run import results

        sentence = results.merge(folder, processes, trace)
        complete = not sentence.startswith(results.NOT_WRITTEN)
        lines += [] if quiet and complete else [sentence]
    if settings.report:
        lines += report.collect(folder)
    if out is not None and lines:
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            out.write("\n".join(lines) + "\n")
            out.flush()
    return complete


# -- The command line

USAGE = """\
usage: python -m virtualgpu [options] SCRIPT [arguments]
       python -m virtualgpu [options] COMMAND [arguments]      such as torchrun x.py, accelerate launch x.py, bash run.sh
       python -m virtualgpu [options] -m MODULE [arguments]
       python -m virtualgpu [options] -c CODE [arguments]
       python -m virtualgpu fit [options] SCRIPT [arguments]   will it fit, on which cards, and how fast? (fit --help)

Run a program as if this machine had GPUs. They are there before its first line, also in the processes that it starts.

  --gpus N       how many (2, or as many as --like names)
  --like CARD    a card's name (T4), or the path of a card's file; several with commas (T4,H100) for one of each
  --memory SIZE  memory of each, such as 16GB; the card's own unless given
  --dry          shapes alone: places, memory and time without the numbers
  --world-size N one rank of so many plays alone, with --dry: what no laptop could hold
  --rank R       which of them (0)
  --gpus-per-node G  how many GPUs a node has: with --world-size 8 unless given; otherwise all, or as many
                 as --gpus are divided into (several agents of torchrun: each has those of its node)
  --network NAME what joins nodes: "InfiniBand NDR", "Ethernet 25", ..., or a rate, "100 Gb/s" for each GPU or
                 "100 Gb/s per node" (what PyTorch's model of NCCL has for the card)
  --clock NAME   measured: kernels take what others measured on such cards; datasheet: what the maker promises (measured)
  --host NAME    what an operation costs the processor: 2026, 2024, 2023, 2021, launch (2026)
  --timers KIND  simulated: the program's time.time(), perf_counter(), timeit and their kind tell how long its GPUs take, and its
                 own work beside them; real: how long this machine does (simulated)
  --trace FILE   write what each GPU did, on the simulated clock, as a Chrome trace (ui.perfetto.dev opens it)
  --explain      where a step of the optimizer goes, and which changes would gain most: a dry run, and one more with each change
  --steps N      with --explain: steps after which the program is ended (5); 0: it runs to its end
  --jobs N       with --explain: programs at a time (one a core, as far as memory goes)
  --limit S      with --explain: seconds after which a program is ended that has not come to those steps
  --json         with --explain: for machines
  --sanitize     the first race of two streams, or of a stream and the host, raises an error that names both lines
  --report       also tell what lay on each GPU at its peak
  --quiet        no table at the end
  --cards        list the cards there are, and end
"""
OPTIONS = listed(USAGE)
OF_EXPLAIN = ("json", "steps", "jobs", "limit")
NUMBERS = ("world_size", "rank", "gpus_per_node", "steps", "jobs", "limit")


def main(arguments: list[str]) -> int:
    """Run what the command line says. The status is the program's; 2, after one sentence, where it says nothing useful, or nothing
    could be started.
    """
    if arguments[:1] == ["fit"]:
        from virtualgpu.run.fit import cli as fit

        return fit.main(arguments[1:])
    try:
        line = parse(arguments)
        if line.help:
            return _print(USAGE)
        if line.cards:
            return _print(specs.table() + "\n")
        if not line.program:
            raise ValueError("name a program to run: a script, a command, or -m and a module (--help says more)")
        settings = _settings(line)
        if line.explain:
            from virtualgpu.run.explain import cli as explain

            return explain.main(line.program, settings, line.steps, line.jobs, line.limit, bool(line.json))
        sentence = misplaced(line.program, OPTIONS.keys() - {"--help"})
        if sentence is not None and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
                print(f"python -m virtualgpu: {sentence}", file=sys.stderr, flush=True)
        status = run(settings, list(line.program), line.trace, bool(line.quiet))
    except (ValueError, OSError) as error:
        print(f"python -m virtualgpu: {error}{cure(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there was a program, or after its end
        status = -signal.SIGINT
    if status < 0:
        from virtualgpu.run.processes import end_as

        return end_as(status)
    return status


def _print(text: str) -> int:
    """Also where nobody reads to the end (`| head -1`). Raises OSError where there is no room for it."""
    try:
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes again at its end
        if not isinstance(error, BrokenPipeError):
            raise
    return 0


def parse(arguments: list[str]) -> SimpleNamespace:
    """Each option before the program by its name, None where it was not given; and `program`, what Python gets. Raises ValueError."""
    given, program = split(arguments, OPTIONS, "--help")
    values: dict[str, Any] = {name[2:].replace("-", "_"): words[-1] for name, words in given.items()}
    for name in values.keys() & NUMBERS:
        values[name] = whole_number(f"--{name.replace('_', '-')}", values[name])
    if "gpus" in values:
        values["gpus"] = number_of_gpus(values["gpus"])
    if "trace" in values:
        values["trace"] = _writable(values["trace"])
    if "quiet" in values and "report" in values:
        raise ValueError("--quiet and --report contradict each other: choose one")
    _check_explain(values)
    absent = dict.fromkeys(name[2:].replace("-", "_") for name in OPTIONS) | {"like": "T4"}
    return SimpleNamespace(**absent | values, program=tuple(program))


def _check_explain(values: dict) -> None:
    """Options that go with --explain, and those that do not."""
    if "explain" not in values:
        if names := [name for name in OF_EXPLAIN if name in values]:
            raise ValueError(f"--{names[0]} is of --explain (or of fit): add it, or leave this out")
        return
    if names := [name for name in ("trace", "report", "sanitize", "quiet") if name in values]:
        raise ValueError(
            f"--explain ends the program after a few steps: leave out --{names[0]}, or run it without --explain"
        )
    if values.get("steps") == 1:
        raise ValueError("--steps 1: one step has the beginnings of all others in it; give 2 at least, or 0 for all")
    values["dry"] = True


def _settings(line: SimpleNamespace) -> environment.Settings:
    """What the program's processes are told. Raises ValueError, in a sentence."""
    alone, per_node = _alone(line), line.gpus_per_node
    gpus = find_cards(1 if alone and not line.gpus else line.gpus, line.like, line.memory)
    if alone is not None:
        specs.check([specs.find_spec(gpus[0].like)] * min(alone.world_size, alone.gpus_per_node))
        per_node = None
    elif per_node is not None:
        _checked(f"--gpus-per-node {per_node}", nodes, len(gpus), per_node)
    network = None if line.network is None else _checked("--network", find_network, line.network).name
    timed = _checked("--clock, --host", lambda: find_settings(clock=line.clock, host=line.host))
    return environment.Settings(
        gpus,
        dry=bool(line.dry),
        trace=bool(line.trace),
        report=bool(line.report),
        sanitize=bool(line.sanitize),
        single_rank=alone and (alone.world_size, alone.rank, alone.gpus_per_node),
        gpus_per_node=per_node,
        network=network,
        clock=timed.clock,
        host=timed.host,
        timers=_timers(line),
    )


def _timers(line: SimpleNamespace) -> str:
    """Raises ValueError."""
    if line.timers not in (None, "simulated", "real"):
        raise ValueError(f"--timers {line.timers!r}: choose simulated or real")
    return line.timers or ("real" if line.explain else "simulated")


def _alone(line: SimpleNamespace) -> RankConfig | None:
    """Which rank, where one process plays one of many. Raises ValueError."""
    if line.world_size is None:
        if line.rank is not None:
            raise ValueError("--rank is of one rank of many: say of how many, --world-size N")
        return None
    if not line.dry:
        advice = "add --dry (or start all ranks, by torchrun)"
        raise ValueError(f"--world-size plays one rank of many, on shapes alone: {advice}")
    per_node = 8 if line.gpus_per_node is None else line.gpus_per_node
    return _checked(f"--world-size {line.world_size}", RankConfig.checked, line.world_size, line.rank or 0, per_node)


def _checked(option: str, check, *values):
    """What `check` says of these values; its ValueError names the option."""
    try:
        return check(*values)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _writable(path: str) -> str:
    absolute = os.path.abspath(path)  # the program may change the folder
    folder = os.path.dirname(absolute)
    if not path or os.path.isdir(absolute) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"--trace {path!r}: name a file in a folder that is there and can be written to")
    return absolute
