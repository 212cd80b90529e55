"""What killed processes leave in the folder for temporary files goes with the next one that needs a folder."""

import os
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from tests.judges.report import ROOT
from tests.processes import family, wait_until
from virtualgpu import scratch

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no such locks")
MAKER = """
import os, signal, sys, tempfile
from virtualgpu import scratch

path = scratch.folder()
open(os.path.join(path, "1.ledger"), "w").close()
number, page = tempfile.mkstemp(prefix=scratch.PREFIX, suffix=".moments")
scratch.hold(number)
print(path, page, flush=True)
if sys.argv[1] == "ends":
    scratch.remove(path), os.unlink(page)
else:
    signal.pause()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def maker(how: str) -> tuple[subprocess.Popen, list[str]]:
    command = [sys.executable, "-c", MAKER, how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return process, process.stdout.readline().split()


def make_old(*paths) -> None:
    for path in paths:
        os.utime(path, (0, 0))


def test_what_a_killed_process_left_goes_with_the_next(temporary):
    alive, kept = maker("waits")
    killed, left = maker("waits")
    killed.kill()
    killed.communicate()
    young = temporary / "virtualgpu-young"
    others = temporary / "virtual-reality"
    for folder in (young, others):
        folder.mkdir()
    make_old(*kept, *left, others)
    try:
        mine = scratch.folder()
        assert not any(map(os.path.exists, left))
        assert all(map(os.path.exists, [*kept, young, others, mine]))
    finally:
        alive.kill()
        alive.communicate()
    scratch.remove(mine)
    assert not os.path.exists(mine)


def test_who_ends_by_itself_leaves_nothing(temporary):
    process, made = maker("ends")
    assert process.wait() == 0 and len(made) == 2
    assert os.listdir(temporary) == []


def test_a_link_is_not_followed(temporary):
    (temporary / "mine").mkdir()
    (temporary / "mine" / "thesis.tex").write_text("all of it")
    (temporary / "virtualgpu-link").symlink_to(temporary / "mine")
    scratch.YOUNG, before = -1e9, scratch.YOUNG
    try:
        scratch.sweep(str(temporary))
    finally:
        scratch.YOUNG = before
    assert (temporary / "mine" / "thesis.tex").read_text() == "all of it"


def nobody_holds(folder) -> bool:
    number = os.open(folder, os.O_RDONLY)
    try:
        return scratch.hold(number)
    finally:
        os.close(number)


def test_a_killed_runner(temporary, clean_environ):
    """Killed with all that it started, as a container's end does; what it left goes when the next one starts."""
    command = [sys.executable, "-m", "virtualgpu", "--gpus", "1", "-c", "print('up', flush=True); input()"]
    environ = {**clean_environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environ, text=True, start_new_session=True, **pipes) as runner:
        assert runner.stdout.readline() == "up\n"
        [left] = temporary.glob("virtualgpu-*")
        runner.send_signal(signal.SIGSTOP)  # nobody may clean up
        for process in [*psutil.Process(runner.pid).children(recursive=True), runner]:
            process.kill()
    wait_until(lambda: nobody_holds(left))  # they end a moment after
    make_old(left)
    mine = scratch.folder()
    assert list(map(str, temporary.glob("virtualgpu-*"))) == [mine]
    scratch.remove(mine)


NOTEBOOK = """
import sys, time, torch, torch.distributed as dist
from virtualgpu.run.ranks import launch

def worker(wait):
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=1)
    for batch in loader:
        if wait and dist.get_rank() == 0:
            open(wait, "w").close()
        time.sleep(600 if wait else 0)

launch(worker, sys.argv[1])
"""


def test_a_killed_notebook(temporary, tmp_path_factory, clean_environ):
    """Its sockets, its ranks', their loaders', and what passes between them."""
    begun = tmp_path_factory.mktemp("notebook") / "begun"
    mark = str(begun)
    environ = {**clean_environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "NOTEBOOK": mark}
    environ["TORCHINDUCTOR_CACHE_DIR"] = str(begun.parent)  # PyTorch's own, which is kept
    command = [sys.executable, "-c", NOTEBOOK]
    killed = subprocess.Popen([*command, str(begun)], env=environ)
    try:
        wait_until(begun.exists, 100)
    finally:
        killed.kill()
        killed.wait()
    wait_until(lambda: not family("NOTEBOOK", mark))
    left = list(temporary.iterdir())
    assert left and all(path.name.startswith(scratch.PREFIX) for path in left)
    make_old(*left)
    subprocess.run([*command, ""], env=environ, check=True)
    assert list(temporary.iterdir()) == []


RANKS = """
import tempfile
from virtualgpu.run.ranks import launch

scratch = tempfile.TemporaryDirectory(prefix="of-a-cell-")
launch(lambda: 0, nprocs=2)
"""


def test_a_notebook_that_had_ranks_ends_when_it_is_asked_to(temporary, clean_environ):
    """ipykernel waited half a minute for what ranks are forked from; Jupyter waits five seconds, then kills."""
    environ = {**clean_environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    manager, client = start_new_kernel(cwd=ROOT, env=environ)
    try:
        reply = client.execute(RANKS, reply=True, timeout=100)
        assert reply["content"]["status"] == "ok", reply["content"]
        assert list(temporary.glob("of-a-cell-*"))
    finally:
        client.stop_channels()
        manager.shutdown_wait_time = 20  # the kernel is killed after half of it
        manager.shutdown_kernel()
    assert not list(temporary.glob("of-a-cell-*"))
