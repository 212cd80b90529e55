"""Processes forked from a Python that has PyTorch loaded: scripts that `fit` tries, what multiprocessing spawns, the commands of these tests.
Each does and finds what it would in a new Python."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import forks
from tests.processes import free_port, wait_until
from virtualgpu import environment
from virtualgpu.run import launcher
from virtualgpu.run.prefork import Forked, ScriptServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="each starts anew here")

# -- Scripts that `fit` and `--explain` try

SCRIPTS = {
    "variables before the import": (
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"\nfrom torch.nn import Linear\nimport torch\n'
        "print(torch.cuda.device_count(), torch.__spec__.name, torch.nn.Linear is Linear)"
    ),
    "virtualgpu before torch": (
        "import virtualgpu.session as s\nfrom virtualgpu.hardware import specs\n"
        "print(s._session.cards[0] == specs.find_spec('T4'))"
    ),
    "what main is": (
        "import __main__, inspect, os, pickle, sys\nclass A: pass\n"
        "print(sys.argv, sys.path[0], __file__, __name__, __spec__, pickle.loads(pickle.dumps(A)) is A is __main__.A, inspect.getsource(A))\n"
        "print('torch' in sys.modules, os.getpid() == os.getsid(0), os.read(0, 1), sys.stdout.line_buffering, os.listdir('/proc/self/fd'))"
    ),
    "other processes": (
        "import torch\nimport torch.multiprocessing as mp\n"
        "def work(rank):\n    torch.ones(2, device=f'cuda:{rank}')\n    print(rank, torch.cuda.get_device_name(rank), flush=True)\n"
        "if __name__ == '__main__':\n    mp.spawn(work, nprocs=1)"
    ),
    "an error": "import torch\ndef f():\n    torch.ones(2, device='cuda') + torch.ones(3, device='cuda')\nprint('before')\nf()",
    "a syntax error": "def f(:\n    pass",
    "its status": "import sys\nsys.exit(3)",
    "its last words": "import sys\nsys.exit('not today')",
    "a signal": "import os, torch\nos.kill(os.getpid(), 9)",
    "atexit, and a thread": (
        "import atexit, threading, time\natexit.register(print, 'at the end')\n"
        "threading.Thread(target=lambda: (time.sleep(.1), print('a thread'))).start()"
    ),
    "what C has not written": "import ctypes\nctypes.CDLL(None).printf(b'by C\\n')",
}


@pytest.fixture(scope="module")
def python():
    python = ScriptServer()
    yield python
    python.end()


@pytest.fixture
def environ(clean_environ, tmp_path):
    cards = tuple(launcher.find_cards(2, "T4", None))
    settings = environment.Settings(cards, dry=True, steps=3, folder=str(tmp_path / "left"))
    os.mkdir(settings.folder)
    return launcher.environment_of(settings, clean_environ)


@pytest.fixture
def script(tmp_path):
    """script("pass"): its command, and a file for what it prints."""
    with open(tmp_path / "output", "wb") as output:

        def write(text: str, *arguments: str):
            (tmp_path / "a script.py").write_text(text)
            output.truncate(0)
            return [sys.executable, str(tmp_path / "a script.py"), *arguments], output

        yield write


def anew(command, environ, output):
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    return subprocess.Popen(command, env=environ, start_new_session=True, **streams)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_anew(name, python, environ, tmp_path, script):
    ends = []
    for start in (anew, python.start):
        command, output = script(SCRIPTS[name], "a", "")
        output.seek(0)
        started = start(command, environ, output)
        ends.append((started.wait(60), (tmp_path / "output").read_text()))
    assert isinstance(started, Forked)
    assert ends[1] == ends[0]


def test_what_is_started_anew(python, environ, script):
    command, output = script("pass")
    assert python.start(command, environ, output).wait(60) == 0
    for other in (["ls", command[1]], [sys.executable, "-m", "train"], [sys.executable, "no such script.py"]):
        assert python.start(other, environ, output) is None
    assert python.start(command, environ | {"OMP_NUM_THREADS": "7"}, output) is None
    environ.pop(environment.VARIABLE)
    assert python.start(command, environ, output) is None


def test_where_it_has_died_programs_start_anew(environ, script):
    command, output = script("import time\ntime.sleep(60)")
    python = ScriptServer()
    started = python.start(command, environ, output)
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(0.01)
    os.kill(python._process.pid, signal.SIGKILL)
    wait_until(lambda: python._process.poll() is not None)
    assert python.start(command, environ, output) is None
    started.kill()  # what it has started goes on, and ends as any process does
    assert started.wait(10) == -signal.SIGKILL
    python.end()


# -- What multiprocessing spawns

PROGRAM = r"""
import json, os, sys
before = [name in sys.modules for name in ("torch", "virtualgpu.session")]
first = "CUDA_VISIBLE_DEVICES" in os.environ
import gc, multiprocessing, random, signal, threading, warnings
import numpy, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def facts(way, parent):
    import __main__
    flags = str(sys.flags), sys.warnoptions, str(warnings.filters), sys.stdout.line_buffering, sys.stdout.encoding, gc.isenabled(), gc.get_freeze_count() > 0
    here = os.getcwd(), sys.argv, sys.path, __name__, __main__.__name__, __main__.__file__, os.environ["MASTER_PORT"], os.environ.get("PYTHONPATH")
    above = os.getppid() == parent == multiprocessing.parent_process().pid, os.getpgrp(), sorted(multiprocessing.active_children())
    handlers = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    way.send([before, flags, here, above, handlers, torch.cuda.device_count(), torch.cuda.is_initialized(),
              sorted(map(kind, os.listdir("/proc/self/fd"))), threading.active_count(),
              torch.ones(2, device="cuda").sum().item(), torch.__spec__.name, dist.is_initialized()])
    way.send([numpy.random.rand(), random.random(), torch.rand(1).item(), torch.initial_seed()])
    way.send(open("/proc/self/cmdline").read())

def kind(file):
    path = f"/proc/self/fd/{file}"
    return os.readlink(path).partition(":")[0] if os.path.exists(path) else "this folder"

def ends(how):
    sys.stdout.write(f"says {how}\n")
    print("warns", how, file=sys.stderr)
    if how == "exit":
        sys.exit(3)
    if how == "error":
        torch.ones(2, device="cuda") + torch.ones(3, device="cuda")
    sys.stdout.flush()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)

def reduces(rank):
    dist.init_process_group("nccl", rank=rank, world_size=2)
    x = torch.full((2,), rank + 1.0, device=f"cuda:{rank}")
    dist.all_reduce(x)
    sys.stdout.write(f"{rank} {x.tolist()} {torch.cuda.memory_allocated(rank)}\n")
    dist.destroy_process_group()

def look(context, times):
    found_by_each = []
    for _ in range(times):
        ours, theirs = context.Pipe()
        child = context.Process(target=facts, args=(theirs, os.getpid()))
        child.start()
        theirs.close()
        found_by_each.append([ours.recv() for _ in range(3)])
        child.join()
    found, drawn, commands = zip(*found_by_each)
    children = [context.Process(target=ends, args=(how,)) for how in ("exit", "error", "killed", "interrupted")]
    for act in ("start", "join"):
        for child in children:
            getattr(child, act)()
    mp.spawn(reduces, nprocs=2)
    codes = [child.exitcode for child in children]
    return {"found": found[-1], "codes": codes, "drawn": drawn, "forked": ["import prefork" in command for command in commands]}

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    context = multiprocessing.get_context("spawn")
    print("facts", json.dumps(look(context, 2), default=str), flush=True)
    os.environ["SOMETHING"] = "that a library may have read"
    print("facts", json.dumps(look(context, 1), default=str), flush=True)
"""


@pytest.fixture(scope="module")
def looks(run, tmp_path_factory):
    """What was found by forked processes, and by new ones: the facts, and what was written meanwhile."""
    path = tmp_path_factory.mktemp("program") / "a program.py"
    path.write_text(PROGRAM)
    ended = run("--gpus", "2", path, free_port(), anew=True)
    assert ended.returncode == 0, ended.stderr
    first, second, third = ended.stdout.split("facts ")
    forked, rest = second.split("\n", 1)
    new = third.split("\n")[0]
    return (json.loads(forked), sorted(first.splitlines())), (json.loads(new), sorted(rest.splitlines()))


def test_a_spawned_process_is_as_in_a_new_python(looks):
    (forked, forked_lines), (new, new_lines) = looks
    assert forked["forked"] == [True, True] and new["forked"] == [False]
    assert forked["found"] == new["found"] and forked["codes"] == new["codes"]
    assert forked_lines == new_lines
    drawn = [number for found, _ in looks for numbers in found["drawn"] for number in numbers]
    assert len(set(drawn)) == len(drawn)  # each draws numbers of its own


def test_the_commands_of_these_tests_are_forked_too():
    """By tests/forks.py, which starts anew what it cannot fork: the runner, its program, and what that starts."""
    tells = "import subprocess, sys; print('import prefork' in open('/proc/self/cmdline').read(), 'torch' in sys.modules, flush=True); "
    leaf = [sys.executable, "-c", tells + "print(sys.stdin.read(), end='', flush=True); 1 / 0"]
    code = f"{tells}sys.exit(4 + subprocess.call({leaf!r}))"
    ended = forks.run("-m", "virtualgpu", "--quiet", "-c", code, input="read")
    assert (ended.returncode, ended.stdout) == (5, "True False\nTrue False\nread")
    assert ended.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
