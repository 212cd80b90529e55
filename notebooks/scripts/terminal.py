"""Terminals for a notebook: commands as you type them, started on virtual GPUs. Whatever ends the cell leaves no process."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

SCRIPTS = Path(__file__).resolve().parent
RUNNERS = {"torchrun": ["-m", "torch.distributed.run"], "python": []}


def terminals(folder: Path, *commands: str) -> None:
    """Run the commands at the same time, each as on a machine of its own, in this folder, and print what they print: the first's lines
    as they come, then the next one's.

    Each begins with `torchrun` or `python`, and has as many virtual GPUs as its --nproc-per-node says (two without it). The series'
    scripts are found by name. All machines are this one, so `first-node:29500` becomes 127.0.0.1 and a free port; `127.0.0.1:2568`, too.

    Where a command fails, the end of its errors is printed; one that is killed says nothing.
    """
    ports: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        runs: list[subprocess.Popen] = []
        stack.callback(_end, runs)
        for node, (command, file) in enumerate(zip(commands, errors, strict=True)):
            line = list(_typed(command, node, ports))
            runs.append(
                subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=file, text=True, env=_environment())
            )
        for run in runs:
            for line in run.stdout:
                print(line, end="", flush=True)
        for run, file in zip(runs, errors, strict=True):
            if run.wait() > 0:
                file.seek(0)
                print(file.read()[-2000:], end="")


def _typed(command: str, node: int, ports: dict[str, int]) -> Iterator[str]:
    """What is started for it. Agents tell by the host's name who of them is the meeting point; here all have the same."""
    program, *words = shlex.split(command)
    gpus = re.search(r"--nproc-per-node=(\d+)", command)
    yield from (sys.executable, "-m", "virtualgpu", "--gpus", gpus[1] if gpus else "2", "--quiet", *RUNNERS[program])
    for word in words:
        if name := re.search(r"(first-node|127\.0\.0\.1):\d+", word):
            port = ports.setdefault(name[0], _free_port())
            word = word.replace(name[0], f"127.0.0.1:{port}")
        if word.startswith("--rdzv-conf="):
            word += f",is_host={node == 0}"
            yield f"--local-addr=127.0.0.{1 + node}"  # agents are numbered in the order of their addresses
        yield str(SCRIPTS / word) if (SCRIPTS / word).is_file() else word


def _environment() -> dict[str, str]:
    """torchrun says at length that it sets the threads, where nobody has."""
    return {"OMP_NUM_THREADS": "1"} | os.environ


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _end(runs: list[subprocess.Popen]) -> None:
    for run in runs:
        _kill(run)
        run.stdout.close()


def _kill(run: subprocess.Popen) -> None:
    """At once, with all that it has started."""
    if run.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            program = psutil.Process(run.pid)
            for process in [program, *program.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    run.wait()
