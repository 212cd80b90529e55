"""A Python that has PyTorch loaded and starts programs by fork: what tests try programs with that would each import it for two seconds.

What a program's real start is like, `tests/virtualgpu/run/test_programs.py` and `test_import_order.py` show, and the READMEs' examples.
"""

import array
import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class WarmPython:
    """The process, seen from the tests. In the place of `subprocess` it has what `virtualgpu.run.trials.programs` uses of it."""

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired

    def __init__(self):
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        names = {name: value for name, value in os.environ.items() if name not in ("VIRTUALGPU", "RANK")}
        names |= {"PYTHONPATH": str(ROOT), "HELPERS_GPUS": "real"}
        command = [sys.executable, "-m", "tests.warm_python", str(other.fileno())]
        self._process = subprocess.Popen(command, env=names, cwd=ROOT, pass_fds=[other.fileno()])
        other.close()

    def end(self) -> None:
        self._socket.close()
        self._process.kill()  # it does not see that: what tests have forked meanwhile may hold the socket, too
        self._process.wait()

    def Popen(self, command, **options):
        """As subprocess.Popen; what is no script of this Python is started by that."""
        if command[0] != sys.executable or command[1].startswith("-"):
            return subprocess.Popen(command, **options)
        return _Program(self, command[1:], options["env"], options["stdout"].fileno())

    def ask(self, message: dict, *files: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        with self._lock:
            self._socket.sendmsg([json.dumps(message).encode()], rights)


class _Program:
    def __init__(self, python, arguments, environ, output):
        self._told, telling = os.pipe()
        self._status = None
        python.ask({"arguments": arguments, "environ": environ, "cwd": os.getcwd()}, output, telling)
        os.close(telling)
        self.pid = int(self._line())

    def _line(self) -> bytes:
        return b"".join(iter(lambda: os.read(self._told, 1).strip(), b""))

    def wait(self, timeout=None):
        if self._status is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm program", timeout)
            self._status = os.waitstatus_to_exitcode(int(self._line()))
            os.close(self._told)
        return self._status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _serve(requests: socket.socket) -> tuple[dict, int]:
    """Each program has a process above it, which tells its number and how it ended. Returns in a program
    alone: what to run, and the file for its output."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, rights, *_ = requests.recvmsg(1 << 20, socket.CMSG_SPACE(8))
        if not message:
            os._exit(0)
        output, telling = array.array("i", rights[0][2])
        if os.fork():
            os.close(output)
            os.close(telling)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if not pid:
            os.close(telling)
            return json.loads(message), output
        os.write(telling, f"{pid}\n".encode())
        os.write(telling, f"{os.waitpid(pid, 0)[1]}\n".encode())
        os._exit(0)


def _run(arguments: list[str], environ: dict[str, str], cwd: str, output: int) -> int:
    """As Python runs a script: its status."""
    os.setsid()
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    from virtualgpu.run import child

    child.start()
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


if __name__ == "__main__":
    import virtualgpu.run.ranks.warm  # noqa: F401

    message, output = _serve(socket.socket(fileno=int(sys.argv[1])))
    status = _run(output=output, **message)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
