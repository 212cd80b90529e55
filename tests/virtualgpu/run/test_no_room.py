"""Where there is no room to write, nobody to read, or a stream is closed: the program runs, and what is lost is said."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.virtualgpu.run.test_environment import T4
from virtualgpu import scratch
from virtualgpu.environment import Settings
from virtualgpu.run import cli, report, results

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def start(clean_environ, tmp_path):
    """start("--cards"): the runner, which has this test's folder for what is temporary."""

    def start(*arguments, **options):
        environ = {**clean_environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-m", "virtualgpu", *arguments]
        return subprocess.Popen(command, env=environ, text=True, **options)

    return start


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_closed_streams(start, tmp_path, closed):
    """As a service starts it: `<&-` and its kind."""
    found = tmp_path / "found"
    code = f"import os, sys; open({str(found)!r}, 'w').write(os.environ['VIRTUALGPU']); sys.exit(7)"
    runner = start("-c", code, preexec_fn=lambda: [os.close(number) for number in closed] and None)
    assert runner.wait(60) == 7
    assert "Tesla T4" in found.read_text()
    assert os.listdir(tmp_path) == ["found"]


def test_who_reads_one_line(start):
    runner = start("--cards", stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    runner.stdout.close()
    assert (runner.stderr.read(), runner.wait(60)) == ("", 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_words_on_a_full_disk(start):
    with open("/dev/full", "w") as full:
        runner = start("--help", stdout=full, stderr=subprocess.PIPE)
        said = runner.stderr.read()
    assert (said.count("\n"), runner.wait(60)) == (1, 2) and "No space left" in said


def test_nowhere_to_put_a_folder(monkeypatch, capsys):
    from virtualgpu.run import cli

    def full():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(scratch.tempfile, "gettempdir", full)
    assert cli.main(["-c", "print('never')"]) == 2
    out, error = capsys.readouterr()
    assert not out and "No usable temporary directory" in error and "set TMPDIR" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "number, words, cure",
    [(11, "Resource temporarily unavailable", "`ulimit -u`"), (24, "Too many open files", "`ulimit -n 1024`")],
)
def test_no_process_or_file_more(monkeypatch, capsys, number, words, cure):
    from virtualgpu.run import cli

    def full(settings, *arguments):
        raise OSError(number, words)

    monkeypatch.setattr(cli, "run", full)
    assert cli.main(["-c", "print('never')"]) == 2
    error = capsys.readouterr().err
    assert words in error and cure in error and error.count("\n") == 1


@pytest.mark.parametrize("quiet", [True, False])
def test_a_trace_that_was_not_written_is_said_even_to_the_quiet(tmp_path, capsys, quiet):
    cli._tell(Settings((T4,)), str(tmp_path), str(tmp_path / "gone" / "t.json"), quiet, sys.stderr)
    assert "The trace was not written: " in capsys.readouterr().err
    cli._tell(Settings((T4,)), str(tmp_path), str(tmp_path / "t.json"), quiet, sys.stderr)
    assert bool(capsys.readouterr().err) is not quiet


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(("ends", "status"), [(0, 1), (7, 7)])
def test_a_run_without_its_trace_has_failed(run, ends, status):
    found = run("--trace", "/dev/full", "-c", f"raise SystemExit({ends})")
    assert found.returncode == status and "The trace was not written: " in found.stderr


def test_an_earlier_trace_stays_where_there_is_no_room(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    path.write_text("earlier")

    def full(trace, file):
        file.write('{"trace')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.json, "dump", full)
    assert (
        results.merge(str(tmp_path), [], str(path)) == "The trace was not written: [Errno 28] No space left on device."
    )
    assert (os.listdir(tmp_path), path.read_text()) == (["t.json"], "earlier")
    monkeypatch.undo()
    assert results.merge(str(tmp_path), [], os.devnull).startswith("Trace of 0 processes") and not os.path.isfile(
        os.devnull
    )


def test_a_report_that_was_cut_off(tmp_path):
    """Its process was killed while it wrote, or the disk was full; the others' are told."""
    (tmp_path / "11.report").write_text("[]")
    (tmp_path / "12.report").write_text('[{"gpu": 0, "card": "Tes')
    (tmp_path / "13.report").touch()
    assert report.collect(str(tmp_path)) == ["Report: 2 processes did not finish writing one."]


@pytest.mark.parametrize("status, output", [(0, ""), (120, "")], ids=["ended", "without a word"])
def test_fit_and_explain_tell_a_full_disk(monkeypatch, status, output):
    """Python ends with 120 where what it printed cannot be kept."""
    from virtualgpu.run.explain import runs
    from virtualgpu.run.fit import search

    def full(*arguments):
        raise OSError(28, "No space left on device")

    class Programs:
        def output_of(self, *arguments):
            return status, output

    monkeypatch.setattr(results, "leave", full)
    assert "No space left on device" in runs.once(Programs(), Settings((T4,)), ["x.py"]).failed
    words = search._trial(Programs(), Settings((T4,)), ["x.py"], search.Trial("T4", 1, {}, ""), None).words
    assert "No space left on device" in words and "TMPDIR" in words


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
    found = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    warned, listed, refused, left = found.stdout.splitlines()
    assert "there is no room in" in warned and "in no table" in warned and "TMPDIR" in warned
    assert listed == "[]"
    assert "share a page of memory, and there is no room for it" in refused and "TMPDIR" in refused
    assert "moments" not in left
