"""One lesson of `classroom.py collect`, in a process of its own: it runs our cells, and at each exercise is forked, once a student.

graded.py JOB PIPE                        JOB: a file, by classroom.py. PIPE: the number of one that takes a line of JSON a result
graded.py JOB PIPE NAME STUDENT FOLDER    one exercise of one student without a fork, for which the lesson runs again
"""

import ast
import contextlib
import ctypes
import importlib
import io
import json
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import series

from virtualgpu.run.processes import keep_tree, kill_tree

LESSON = 600  # seconds that our own cells may take, where they run once more for one student
FORKED, AGAIN = "forked subprocess", "once more, without a fork"  # FORKED: of PyTorch's message
NEWUSER, NEWNET = 0x10000000, 0x40000000  # linux/sched.h
PDEATHSIG = 1  # linux/prctl.h
SET_FLAGS, UP = 0x8914, 0x41  # of an interface: linux/sockios.h, linux/if.h


@dataclass
class Exercise:
    """name: "03.1". source: our cell. solution: our solution's cell, or "" where there is none."""

    name: str
    source: str
    solution: str

    @property
    def grade_id(self) -> str:
        """nbgrader allows letters, digits, hyphens."""
        return f"exercise-{self.name.replace('.', '-')}"

    @property
    def call(self) -> ast.Call:
        """Of the grader: checks.keeps_both_busy(forward)."""
        return grader_call(self.source)

    @property
    def grader(self) -> str:
        return self.call.func.attr

    def is_answer(self, place: int | str) -> bool:
        """Is this argument of the grader the student's? It is where our solution passes another expression, or a name that it binds."""
        if not self.solution:
            return isinstance(place, int)
        ours, solved = argument(self.call, place), argument(grader_call(self.solution), place)
        bound = set()
        for node in ast.parse(self.solution).body:
            bound |= {node.name} if hasattr(node, "name") else stored(node)
        names = {node.id for node in ast.walk(ours) if isinstance(node, ast.Name)}
        return solved is None or ast.dump(ours) != ast.dump(solved) or bool(names & bound)


def grader_call(source: str) -> ast.Call:
    """Raises ValueError where a cell calls no grader."""
    calls = [
        node.value for node in ast.parse(source).body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    found = [call for call in calls if ast.unparse(call.func).startswith("checks.")]
    if not found:
        raise ValueError(f"no grader is called in the cell that begins {source[:60]!r}")
    return found[-1]


def argument(call: ast.Call, place: int | str) -> ast.expr | None:
    """The expression at a position or of a keyword."""
    if isinstance(place, int):
        return call.args[place] if place < len(call.args) else None
    return next((keyword.value for keyword in call.keywords if keyword.arg == place), None)


def stored(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def exercises(lesson: nbformat.NotebookNode, number: str) -> dict[int, Exercise]:
    """Of a lesson, by the place of their cells."""
    found: dict[int, Exercise] = {}
    for at, cell in enumerate(lesson.cells):
        if "exercise" in series.tags(cell):
            after = next((c for c in lesson.cells[at + 1 :] if series.tags(c) & {"exercise", "solution"}), None)
            solution = after.source if after is not None and "solution" in series.tags(after) else ""
            found[at] = Exercise(f"{number}.{len(found) + 1}", cell.source, solution)
    return found


def main(job: Path, report: int, alone: list[str]) -> None:
    """alone: the exercise's name, the student, whose cells run in this very process, and a folder for them; or []."""
    token = sys.stdin.readline() if alone else ""
    todo = json.loads(job.read_text("utf-8"))
    leave_network()
    keep_tree()
    end_with_parent()
    if alone:
        move_into(Path(alone[2]), guarded=Path(todo["root"]))  # Ray writes elsewhere below it
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    lesson = series.read(Path(todo["lesson"]))
    found = exercises(lesson, Path(todo["lesson"]).name[:2])
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    shell.showtraceback = shell.showsyntaxerror = lambda *args, **kwargs: (
        None
    )  # nobody reads it, and to make the first takes a second
    for at, cell in enumerate(lesson.cells[: max(found) + 1]):
        if at in found:
            with noted(found[at].grader) as ours:
                run(shell, cell.source)
            name = found[at].name
            if alone and alone[0] == name:
                answer(report, token, shell, found[at], ours[-1], todo["answers"][name][alone[1]], forked=False)
            elif not alone:
                one_each(shell, job, found[at], ours[-1], todo, report)
        elif "solution" in series.tags(cell):  # later cells may use its names
            with contextlib.ExitStack() as stack:
                for exercise in found.values():
                    stack.enter_context(noted(exercise.grader))
                run(shell, cell.source)
        elif (
            cell.cell_type == "code"
            and (error := run(shell, cell.source))
            and "raises-exception" not in series.tags(cell)
        ):
            raise RuntimeError(f"our own cell {at} failed: {error}")


def run(shell, source: str) -> str:
    """What the cell raised, in words; "" where it came to its end."""
    result = shell.run_cell(source, silent=True)
    error = result.error_before_exec or result.error_in_exec
    return f"{type(error).__name__}: {error}" if error is not None else ""


@contextlib.contextmanager
def noted(grader: str) -> Iterator[list[tuple[tuple, dict]]]:
    """In this block the grader only notes with what it is called."""
    checks = importlib.import_module("checks")
    original, calls = getattr(checks, grader), []
    setattr(checks, grader, lambda *args, **kwargs: calls.append((args, kwargs)))
    try:
        yield calls
    finally:
        setattr(checks, grader, original)


def one_each(shell, job: Path, exercise: Exercise, ours: tuple[tuple, dict], todo: dict, report: int) -> None:
    """Grade this exercise of all students, so many at a time, and report each as it ends."""
    if "virtualgpu.run.ranks" in sys.modules:  # what ranks are forked from, for all students: to start it takes seconds
        importlib.import_module("virtualgpu.run.ranks").launch(int, nprocs=1)
    answers = todo["answers"][exercise.name]
    waiting, running = [(student, True) for student in answers], {}
    while waiting or running:
        while waiting and len(running) < todo["jobs"]:
            (student, forked), token, (reading, writing) = waiting.pop(0), secrets.token_hex(), os.pipe()
            until, folder = time.monotonic() + todo["limit"], Path(tempfile.mkdtemp(dir=todo["root"]))
            if forked:
                child = os.fork()
                if child == 0:
                    keep_tree()
                    end_with_parent()
                    os.close(report)
                    move_into(folder, guarded=folder)
                    without_parent()
                    answer(writing, token, shell, exercise, ours, answers[student], forked)
            else:
                command = [sys.executable, __file__, str(job), str(writing), exercise.name, student, str(folder)]
                process = subprocess.Popen(command, pass_fds=[writing], stdin=subprocess.PIPE, text=True)
                process.stdin.write(token)
                process.stdin.close()
                process.returncode = 0  # it is `result` that waits for it
                child, until = process.pid, until + LESSON
            os.close(writing)
            running[reading] = student, forked, child, token, until, folder
        ready = select.select(list(running), [], [], 0.1)[0]
        for reading, (student, forked, child, token, until, folder) in list(running.items()):
            if reading in ready or time.monotonic() > until:
                value, note = result(os.read(reading, 4096) if reading in ready else None, token, child)
                os.close(reading)
                shutil.rmtree(folder, ignore_errors=True)
                del running[reading]
                if forked and note == AGAIN:
                    waiting.append((student, False))
                else:
                    os.write(report, (json.dumps([student, exercise.name, value, note]) + "\n").encode())


def result(said: bytes | None, token: str, child: int) -> tuple[int | None, str]:
    """Value and note, of what came through the pipe (None: nothing in time). The child has ended, and all that it started."""
    ended, until = 0, time.monotonic() + 1
    while said == b"" and not ended and time.monotonic() < until:  # it is about to end: how?
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    kill_tree(child)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if said is None:
        return 0, "no end within the time limit"
    if not said:
        return 0, f"its process ended (status {os.waitstatus_to_exitcode(status)})"
    if not said.startswith(token.encode()):
        return 0, "something else came through the grader's pipe"
    return tuple(json.loads(said.removeprefix(token.encode())))


def answer(writing: int, token: str, shell, exercise: Exercise, ours: tuple, cells: list[str], forked: bool) -> None:
    """Grade one student's cells, say the result, and wait for the end, which comes to all that this process has started."""
    value, note = 0, ""
    try:
        value, note = attempt(shell, exercise, ours, cells, forked)
    except BaseException as error:
        note = f"{type(error).__name__}: {error}"
    finally:
        os.write(writing, (token + json.dumps([value, note[:200]])).encode())
        while True:
            signal.pause()


def move_into(folder: Path, guarded: Path) -> None:
    """This process lives there from now on, with a copy of what the lesson has in its folder, and writes below `guarded` alone."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory ends, this process goes and not the lesson
    shutil.copytree(".", folder / "cwd", symlinks=True)
    for name in ("HOME", "TMPDIR"):
        os.environ[name] = str(folder / name.lower())
        os.mkdir(os.environ[name])
    os.chdir(folder / "cwd")
    os.environ["GUARDED"], tempfile.tempdir = str(guarded), None


def without_parent() -> None:
    """What a fork has to do without: PyTorch's CUDA says so by itself, Ray would wait for ever."""
    if server := sys.modules.get(
        "multiprocessing.forkserver"
    ):  # the lesson's serves; but only its parent may ask whether it lives
        server._forkserver.ensure_running = lambda: None

    def refuse(*args, **kwargs):
        raise RuntimeError(f"Ray does not run in a {FORKED}")

    if (ray := sys.modules.get("ray")) and ray.is_initialized():
        ray.is_initialized = ray.get = ray.put = ray.init = refuse


def attempt(
    shell, exercise: Exercise, ours: tuple[tuple, dict], cells: list[str], forked: bool
) -> tuple[int | None, str]:
    """Value and note; AGAIN where a fork has not what this code needs."""
    kept = {
        name: (module, dict(vars(module))) for name, module in sys.modules.items() if name.split(".")[0] == "checks"
    }
    error = ""
    with noted(exercise.grader) as calls:
        for source in cells:
            error = run(shell, source)
    for name, (module, names) in kept.items():  # whatever was put into their places
        sys.modules[name] = module
        vars(module).clear()
        vars(module).update(names)

    def given(place: int | str):
        """What the grader gets there."""
        if not exercise.is_answer(place):
            return ours[0][place] if isinstance(place, int) else ours[1][place]
        if calls and (place in calls[-1][1] if isinstance(place, str) else place < len(calls[-1][0])):
            return calls[-1][0][place] if isinstance(place, int) else calls[-1][1][place]
        return eval(ast.unparse(argument(exercise.call, place)), shell.user_ns)

    args = [given(place) for place in range(len(ours[0]))]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        passed = getattr(sys.modules["checks"], exercise.grader)(*args, **{place: given(place) for place in ours[1]})
    if forked and not passed and FORKED in error + printed.getvalue():
        return None, AGAIN
    if passed is None:
        return None, "skipped: the grader gave no verdict on this machine"
    return int(passed is True), error


def leave_network() -> None:
    """On Linux, where users may have namespaces: only this machine is left to talk to. Elsewhere the guard has to do."""
    user, group = os.getuid(), os.getgid()
    if sys.platform == "linux" and ctypes.CDLL(None).unshare(NEWUSER | NEWNET) == 0:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(line)
        with socket.socket() as any_socket:
            import fcntl

            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh", b"lo", UP))


def end_with_parent() -> None:
    """Also where that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    pipe = int(sys.argv[2])
    os.set_inheritable(pipe, False)
    try:
        main(Path(sys.argv[1]), pipe, sys.argv[3:])
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os.close(pipe)
    signal.pause()  # who has started it ends it, and with it what students have left behind
