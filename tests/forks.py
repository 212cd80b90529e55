"""Programs that are the first of their kind in a process: each in a fork of one that has imported PyTorch and virtualgpu, and nothing more."""

import os
import subprocess
import sys
from pathlib import Path

DYNAMO = (
    "import sympy, torch.distributed.tensor"  # what torch._dynamo imports at its first use, and what takes its time
)
PARENT = """
import multiprocessing, os, sys, torch, virtualgpu
def first(file, program):
    for stream in (1, 2):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    exec(program, {**globals(), "__name__": "__main__"})
for number, (file, program) in enumerate(PROGRAMS.items()):
    if number == FIRST:
        LIBRARIES
    process = multiprocessing.get_context("fork").Process(target=first, args=(file, program))
    process.start(), process.join()
    with open(file + ".status", "w") as status:
        status.write(str(process.exitcode))
"""


def outcomes(programs: list[str], folder: Path, libraries: str = "pass", first: int = 0) -> list[tuple[int, list[str]]]:
    """Of each program its exit status and the lines that it wrote, one after the other, without the one of virtualgpu.gpus.

    libraries: an import whose first use the programs from this number on are not about: made once for all of them.
    """
    files = {str(folder / str(number)): program for number, program in enumerate(programs)}
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUALGPU", "RANK")}
    code = PARENT.replace("PROGRAMS", repr(files)).replace("LIBRARIES", libraries).replace("FIRST", str(first))
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, env=environ, check=True, timeout=300)
    ended = [int(Path(f"{file}.status").read_text("utf-8")) for file in files]
    said = [Path(file).read_text("utf-8").splitlines() for file in files]
    return [
        (status, [line for line in lines if "virtual GPUs, each" not in line])
        for status, lines in zip(ended, said, strict=True)
    ]
