"""Where a stream is closed, nobody reads, or a disk is full: the program runs, and what is lost is said. Figures that are lost: test_report,
test_fit, test_explain."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_closed_streams(start, tmp_path, closed):
    """As a service starts it: `<&-` and its kind."""
    found = tmp_path / "found"
    code = f"import os, sys; open({str(found)!r}, 'w').write(os.environ['VIRTUALGPU']); sys.exit(7)"
    closes = {"stdout": None, "preexec_fn": lambda: [os.close(number) for number in closed] and None}
    assert start("-c", code, **closes).wait(60) == 7
    assert "Tesla T4" in found.read_text()
    assert os.listdir(tmp_path) == ["found"]


def test_who_reads_one_line(start):
    runner = start("--cards", stderr=subprocess.PIPE, bufsize=0)
    runner.stdout.close()
    assert (runner.stderr.read(), runner.wait(60)) == ("", 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_text_on_a_full_disk(start):
    with open("/dev/full", "w") as full:
        runner = start("--help", stdout=full, stderr=subprocess.PIPE)
        error = runner.stderr.read()
    assert (error.count("\n"), runner.wait(60)) == (1, 2) and "No space left" in error


def test_python_told_to_heed_no_environment():
    command = [sys.executable, "-s", "-E", "-m", "virtualgpu", "-c", "print('never')"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "") and "-E" in ended.stderr


FULL = """
import os, sys, warnings
from datetime import timedelta
from virtualgpu.distributed.shared_clock import Arrivals
from virtualgpu.memory.ledger import Ledger, entries

folder = sys.argv[1]
try:
    with open(os.path.join(folder, "fill"), "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError:
    pass
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    ledger = Ledger(folder, 2)
    ledger.note(1, 4096, 2048, 4096)
    print(*(warning.message for warning in told))
print(entries(folder))
try:
    Arrivals.meet(None, 0, 2, folder)
except RuntimeError as error:
    print(error)
print(os.listdir(folder))
"""


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs a disk of its own")
def test_a_folder_that_is_full(clean_environ, tmp_path):
    """What is mapped into memory has its room from the beginning: else a store would end the process by SIGBUS."""
    (tmp_path / "disk").mkdir()
    mount = f'mount -t tmpfs -o size=64k tmpfs "{tmp_path}/disk" && exec "$@"'
    small = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    environ = {**clean_environ, "PYTHONPATH": str(ROOT)}
    command = [*small, sys.executable, "-c", FULL, str(tmp_path / "disk")]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    warned, listed, refused, left = ended.stdout.splitlines()
    assert "there is no room in" in warned and "in no table" in warned and "TMPDIR" in warned
    assert listed == "[]"
    assert "share a page of memory, and there is no room for it" in refused and "TMPDIR" in refused
    assert "moments" not in left
