"""The command line of `python -m virtualgpu`: the cards that it asks for, and how it starts a program and waits for it."""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TextIO

from virtualgpu import environment, scratch
from virtualgpu.distributed.topology import RankConfig
from virtualgpu.environment import Card
from virtualgpu.hardware import specs
from virtualgpu.hardware.machine import find_network, find_settings, nodes
from virtualgpu.memory.ledger import entries
from virtualgpu.run import report
from virtualgpu.run.options import listed, misplaced, number_of_gpus, split, whole_number
from virtualgpu.run.processes import end_marked

# -- The cards of `virtualgpu.hardware`, as the runner asks for them.


DEFAULT = 2  # GPUs, as virtualgpu.gpus()


def find_cards(gpus: int | None, like: str, memory: int | str | None) -> tuple[Card, ...]:
    """`gpus` cards like `like`: a name, a file, or several with commas. Raises ValueError, in a sentence."""
    if gpus is None and ("," not in like or os.path.exists(like)):
        gpus = DEFAULT
    names = [like] if os.path.exists(like) else [name.strip() for name in like.split(",")]
    cards = specs.find_specs(gpus, like, memory)
    names = [
        os.path.abspath(name) if os.path.isfile(name) else name for name in names
    ]  # the program may change the folder
    names = names * len(cards) if len(names) == 1 else names
    return tuple(Card(name, spec.name, spec.memory, spec.capability) for name, spec in zip(names, cards, strict=True))


# -- Start a program on virtual GPUs, wait for it, and tell what it did.


HERE = os.path.dirname(os.path.abspath(__file__))
SITE = os.path.join(HERE, "site")
SMI = os.path.join(HERE, "nvidia_smi.py")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how OpenMP's threads wait
MACHINE_CODE = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # Linux, Windows, macOS


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A place for what processes leave, and for their nvidia-smi; removed at the end."""
    with scratch.lent() as path:
        if os.name == "posix":
            tool = os.path.join(path, "bin", "nvidia-smi")
            os.mkdir(os.path.dirname(tool))
            script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(SMI)} "$@"\n'
            with open(tool, "wb") as file:  # without site and environment: it starts in a tenth of the time
                file.write(os.fsencode(script))  # paths may have any letters, in any locale
            os.chmod(tool, 0o755)
        yield path


def variables(settings: environment.Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """What to set in a process's environment so that it, and whatever it starts, has these virtual GPUs."""
    names = {environment.VARIABLE: settings.text(), "PYTHONPATH": first(SITE, environ.get("PYTHONPATH"))}
    if settings.folder:
        names["PATH"] = first(os.path.join(settings.folder, "bin"), environ.get("PATH", os.defpath))
    return names


def defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """What a program gets that says nothing else.

    Threads that wait for others sleep: by default OpenMP's turn in circles meanwhile, for as long as a processor's whole share of time
    where ranks, or a neighbour, want it as well (on two shared cores a small GPT took 12 to 15 times as long). Their number stays what it
    is, so that no sum changes. Triton's kernels are interpreted, which needs NumPy (torch_api/hooks.py): there is no driver to compile for.
    """
    names = {} if any(name in environ for name in WAITING) else {"OMP_WAIT_POLICY": "passive"}
    if importlib.util.find_spec("numpy") is not None:
        names["TRITON_INTERPRET"] = "1"
    return names


def environment_of(settings: environment.Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program on these virtual GPUs."""
    return {**defaults(environ), **environ, **variables(settings, environ)}


def first(path: str, others: str | None) -> str:
    """A list of folders, such as PATH, with this one before all others."""
    return os.pathsep.join([path, *(part for part in (others or "").split(os.pathsep) if part and part != path)])


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


def command(arguments: list[str], search: str | None = None) -> list[str]:
    """What to start. A script goes to this Python, and so does a command that is one (torchrun); any other command runs by itself.
    search: the PATH on which it is found; this process's own unless given.

    Raises ValueError for a word that is neither a file nor a command.
    """
    name, *rest = arguments
    path = None if name.startswith("-") else _find(name, search)
    if path is None or _is_python(path):
        return [sys.executable, *interpreter_flags(sys.orig_argv), path or name, *rest]
    return [path, *rest]


def _find(name: str, search: str | None) -> str:
    """A file or a folder with a program in it, as Python takes them; otherwise a command, of this Python's environment or on PATH."""
    if os.path.exists(name) and (not os.path.isdir(name) or os.path.exists(os.path.join(name, "__main__.py"))):
        return name
    if os.path.basename(name) != name or name.endswith(".py"):
        return name  # a path: Python says that there is nothing
    beside = os.path.dirname(os.path.abspath(sys.executable))
    path = shutil.which(name, path=beside) or shutil.which(name, path=search)
    if path is None and not os.path.exists(name):
        raise ValueError(f"{name!r} is neither a file here nor a command on PATH")
    return path or name


def _is_python(path: str) -> bool:
    """Source code, or something else that Python takes, rather than a program that runs by itself."""
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        return True
    try:
        with open(path, "rb") as file:
            first, second = file.readline(256), file.readline(256)
    except OSError:  # not ours to read: Python says it
        return True
    if first.startswith(b"#!/bin/sh") and second.startswith(b"'''exec' "):
        return True  # pip's way to start a Python whose path has a space
    if first.startswith(b"#!"):
        return any(os.path.basename(word).startswith(b"python") for word in first[2:].split())
    return not first.startswith(MACHINE_CODE)


def interpreter_flags(command: list[str]) -> list[str]:
    """What stood between `python` and `-m virtualgpu`: -u, -X dev, -W error and their kind are meant for the program."""
    for index, word in enumerate(command[1:-1], 1):
        if command[index + 1] == "virtualgpu" and re.fullmatch("-[a-zA-Z]*m", word):
            return command[1:index] + ([word[:-1]] if word != "-m" else [])
    return []


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


# -- What a system says that has no process, thread or open file more to give, and the cure.


MORE_FILES = "raise this process's limit, by `ulimit -n 1024` before it starts"
CURES = {
    # unexpected EOF: multiprocessing's, of a forkserver that ended at once
    r"can't start new thread|Resource temporarily unavailable|unexpected EOF": "no process or thread more: raise this user's limit, "
    "`ulimit -u`, start fewer, or free memory of this machine",
    r"Too many open files": MORE_FILES,
}


def cure(message: str) -> str:
    """To add to that error's message, in brackets; nothing where it is another error."""
    return next((f" ({sentence})" for pattern, sentence in CURES.items() if re.search(pattern, message)), "")


# -- The command line of `python -m virtualgpu`.


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
