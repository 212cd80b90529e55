"""Where a program is tried: a folder of its own, which it takes for /tmp and /dev/shm too where this user may mount, on small disks that
can be filled. What it leaves there is seen, and so is who is left of its processes."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil

from tests.processes import family

ROOT = Path(__file__).resolve().parents[2]
MARK = "FAULTS_ATTEMPT"  # a variable by which an attempt's processes are known
IN_NAMESPACE = "FAULTS_MOUNTS"  # set where mounts are this script's own
TEMPORARY = ("/tmp", "/dev/shm")
DISKS = {"work": 200, "tmp": 400, "shm": 600}  # MB
BOUND = 'mount --bind "$1" /tmp && mount --bind "$2" /dev/shm && shift 2 && exec "$@"'
# The tools of the project start their processes with the environment that they have; these would change what is tried
LEFT_OUT = ("VIRTUALGPU", "HELPERS_GPUS", "RANK", "WORLD_SIZE", "MASTER_PORT", "TMPDIR", "OMP_NUM_THREADS")


def enter_namespace() -> None:
    """Start this script again where its mounts are its own and end with it, if that can be done."""
    if os.environ.get(IN_NAMESPACE) or not shutil.which("unshare"):
        return
    if any(ROOT.is_relative_to(folder) for folder in TEMPORARY):
        print("The project lies among temporary files, which a program could not have for its own: no disk is filled.")
        return
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0:
        os.environ[IN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, "-m", "tests.faults", *sys.argv[1:]])


class Place:
    """folder/work is where the program runs, folder/tmp and folder/shm are what it has of temporary files."""

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.work, self.tmp, self.shm, self.home = (folder / name for name in ("work", "tmp", "shm", "home"))
        self.own = bool(os.environ.get(IN_NAMESPACE))
        self.process: subprocess.Popen | None = None
        self._said = {"out": b"", "err": b""}
        for path in (self.work, self.tmp, self.shm, self.home):
            path.mkdir(parents=True)
        for name, size in DISKS.items() if self.own else ():
            _mount("-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(folder / name))
        for path in (self.work, self.tmp, self.shm, self.home):
            path.chmod(0o777)  # another user may be the one

    def start(self, command: list[str], environ: dict[str, str], prepare=None, before: list[str] = ()) -> None:
        """The program, in a session of its own. prepare: called in the new process; before: words in front of the command."""
        named = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        named |= {"PYTHONPATH": str(ROOT), "HOME": str(self.home), MARK: self.mark, "HELPERS_GPUS": "virtual"}
        named |= {} if self.own else {"TMPDIR": str(self.tmp)}
        command = [*before, *command]
        if self.own:
            command = ["unshare", "--mount", "sh", "-c", BOUND, "sh", str(self.tmp), str(self.shm), *command]
        self.process = subprocess.Popen(
            command,
            cwd=self.work,
            env={**named, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,
        )
        # by pipes: a limit on the size of files would be one on files that it prints into
        for name, pipe in (("out", self.process.stdout), ("err", self.process.stderr)):
            threading.Thread(target=self._read, args=(name, pipe), daemon=True).start()

    def _read(self, name: str, pipe) -> None:
        for line in pipe:
            self._said[name] += line

    def said(self) -> tuple[str, str]:
        """What it printed so far, and what it complained of."""
        time.sleep(0.2)  # for the last lines
        return tuple(self._said[name].decode("utf-8", "replace") for name in ("out", "err"))

    def members(self) -> list[psutil.Process]:
        """Its living processes but the first one, in the order in which they began."""
        found = [process for process in family(MARK, self.mark) if process.pid != self.process.pid]
        return sorted(found, key=lambda process: process.pid)

    def left(self, patience: float) -> list[str]:
        """Processes that are there yet, so many seconds after the first one has ended; what they are called."""
        deadline = time.monotonic() + patience
        while members := self.members():
            if time.monotonic() > deadline:
                return [_called(process) for process in members]
            time.sleep(0.1)
        return []

    def end(self) -> None:
        """Nothing of it is left."""
        for _ in range(5):  # some start others meanwhile
            processes = family(MARK, self.mark)
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not processes:
                break
            time.sleep(0.1)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for name in DISKS if self.own else ():
            subprocess.run(["umount", "--lazy", str(self.folder / name)], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def fill(self, name: str) -> None:
        """To the last byte."""
        with open(self.folder / name / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * size) == size:
                        pass

    def lock(self, name: str) -> bool:
        """Nothing can be written there any more. False: the system refuses it, for somebody has a file open for writing."""
        words = ["mount", "-o", "remount,ro", str(self.folder / name)]
        return subprocess.run(words, capture_output=True).returncode == 0

    def unlock(self) -> None:
        """Room again, and writable, to see what is left."""
        for name in DISKS if self.own else ():
            subprocess.run(["mount", "-o", "remount,rw", str(self.folder / name)], capture_output=True)
            (self.folder / name / "filler").unlink(missing_ok=True)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


def _called(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:90]!r} ({process.status()})"
    return str(process.pid)
