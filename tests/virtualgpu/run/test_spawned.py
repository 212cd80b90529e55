"""A process that multiprocessing spawns, forked from a Python that has PyTorch loaded: it finds what it finds in a new Python."""

import json
import socket
import sys

import pytest

from tests import forks

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
    told = []
    for _ in range(times):
        ours, theirs = context.Pipe()
        child = context.Process(target=facts, args=(theirs, os.getpid()))
        child.start()
        theirs.close()
        told.append([ours.recv() for _ in range(3)])
        child.join()
    found, drawn, commands = zip(*told)
    children = [context.Process(target=ends, args=(how,)) for how in ("exit", "error", "killed", "interrupted")]
    for act in ("start", "join"):
        for child in children:
            getattr(child, act)()
    mp.spawn(reduces, nprocs=2)
    codes = [child.exitcode for child in children]
    return {"found": found[-1], "codes": codes, "drawn": drawn, "forked": ["import processes" in command for command in commands]}

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    context = multiprocessing.get_context("spawn")
    print("facts", json.dumps(look(context, 2), default=str), flush=True)
    os.environ["SOMETHING"] = "that a library may have read"
    print("facts", json.dumps(look(context, 1), default=str), flush=True)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="each starts anew here")


@pytest.fixture(scope="module")
def looks(run, tmp_path_factory):
    """What was found by forked processes, and by new ones: the facts, and what was written meanwhile."""
    script = tmp_path_factory.mktemp("program") / "a program.py"
    script.write_text(PROGRAM)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    ended = run("--gpus", "2", script, port, anew=True)
    assert ended.returncode == 0, ended.stderr
    first, second, third = ended.stdout.split("facts ")
    forked, rest = second.split("\n", 1)
    return (json.loads(forked), sorted(first.splitlines())), (
        json.loads(third.split("\n")[0]),
        sorted(rest.splitlines()),
    )


@pytest.mark.parametrize("what", ["found", "codes"])
def test_as_in_a_new_python(looks, what):
    (forked, _), (new, _) = looks
    assert forked["forked"] == [True, True] and new["forked"] == [False]
    assert forked[what] == new[what]


def test_it_writes_where_a_new_one_would(looks):
    (_, forked), (_, new) = looks
    assert forked == new


def test_each_draws_numbers_of_its_own(looks):
    drawn = [number for found, _ in looks for numbers in found["drawn"] for number in numbers]
    assert len(set(drawn)) == len(drawn)


def test_the_commands_of_these_tests_are_forked_too():
    """By tests/forks.py, which starts anew what it cannot fork: the runner, its program, and what that starts."""
    told = "import subprocess, sys; print('import processes' in open('/proc/self/cmdline').read(), 'torch' in sys.modules, flush=True); "
    leaf = [sys.executable, "-c", told + "print(sys.stdin.read(), end='', flush=True); 1 / 0"]
    ended = forks.run(
        "-m", "virtualgpu", "--quiet", "-c", f"{told}sys.exit(4 + subprocess.call({leaf!r}))", input="read"
    )
    assert (ended.returncode, ended.stdout) == (5, "True False\nTrue False\nread")
    assert ended.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
