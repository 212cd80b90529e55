"""A script forked from a Python that has PyTorch loaded: it does what it does when it is started anew."""

import os
import signal
import subprocess
import sys

import pytest

from tests.processes import wait_until
from virtualgpu import environment
from virtualgpu.run import cli
from virtualgpu.run.trials.forked import Forked, WarmPython

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no warm Python here")

SCRIPTS = {
    "variables before the import": (
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"\nfrom torch.nn import Linear\nimport torch\n'
        "print(torch.cuda.device_count(), torch.__spec__.name, torch.nn.Linear is Linear)"
    ),
    "virtualgpu before torch": (
        "import virtualgpu.session as s\nfrom virtualgpu.hardware import specs\n"
        "print(s._session.cards[0] == specs.find('T4'))"
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
    python = WarmPython()
    yield python
    python.end()


@pytest.fixture
def environ(clean_environ, tmp_path):
    settings = environment.Settings(
        tuple(cli.find_cards(2, "T4", None)), dry=True, steps=3, folder=str(tmp_path / "left")
    )
    os.mkdir(settings.folder)
    return cli.environment_of(settings, clean_environ | {"PYTEST_CURRENT_TEST": ""})


def plainly(command, environ, output):
    return subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_as_if_started_anew(name, python, environ, tmp_path):
    script, ends = tmp_path / "a script.py", []
    script.write_text(SCRIPTS[name])
    for start in (plainly, python.start):
        with open(tmp_path / "output", "wb") as file:
            started = start([sys.executable, str(script), "a", ""], environ, file)
            status = started.wait(60)
        ends.append((status, (tmp_path / "output").read_text()))
    assert isinstance(started, Forked)
    assert ends[1] == ends[0]


def test_what_it_does_not_start(python, environ, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass")
    with open(tmp_path / "output", "wb") as file:
        assert python.start([sys.executable, str(script)], environ, file).wait(60) == 0
        for command in (["ls", str(script)], [sys.executable, "-m", "train"], [sys.executable, "no such script.py"]):
            assert python.start(command, environ, file) is None
        assert python.start([sys.executable, str(script)], environ | {"OMP_NUM_THREADS": "7"}, file) is None
        environ.pop(environment.VARIABLE)
        assert python.start([sys.executable, str(script)], environ, file) is None


def test_where_it_has_died_programs_start_anew(environ, tmp_path):
    script, python = tmp_path / "train.py", WarmPython()
    script.write_text("import time\ntime.sleep(60)")
    with open(tmp_path / "output", "wb") as file:
        started = python.start([sys.executable, str(script)], environ, file)
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(0.01)
        os.kill(python._process.pid, signal.SIGKILL)
        wait_until(lambda: python._process.poll() is not None)
        assert python.start([sys.executable, str(script)], environ, file) is None
        started.kill()  # what it has started goes on, and ends as any process does
        assert started.wait(10) == -signal.SIGKILL
    python.end()


def test_nobody_waits_for_one_that_ends_before_it_is_warm(environ, tmp_path):
    script, python = tmp_path / "train.py", WarmPython()
    script.write_text("pass")
    python._begin(environ)
    python._process.kill()
    with open(tmp_path / "output", "wb") as file:
        assert python.start([sys.executable, str(script)], environ, file) is None
    python.end()
