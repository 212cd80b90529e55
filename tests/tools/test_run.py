"""make run: one notebook that fails does not hide the others; all of them, and their times, go into the site."""

import concurrent.futures
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
import run
import series
import website
import zmq
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.processes import wait_until


def of(title: str, *sources: str, **metadata) -> nbformat.NotebookNode:
    cells = [new_code_cell(source, metadata=metadata if source == sources[-1] else {}) for source in sources]
    return new_notebook(cells=[new_markdown_cell(f"# {title}"), *cells])


GOOD = of("01 · Add", "1 + 1")
BAD = of("02 · Fail", "x = 1", "raise ValueError('the cure is tea\\nwith milk')")
DEAD = of("03 · Die", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
WHERE = of("04 · Where", f"import os\n[os.environ.get(name) for name in {[*run.ENVIRONMENT, 'OMP_NUM_THREADS']}]",
           "import pathlib, sys\nprint(pathlib.Path.home() / 'x', file=sys.stderr)", tags=["nbval-ignore-output"])  # fmt: skip
SITES = []  # what was asked for: notebooks, and seconds of each; test_website.py builds one


def series_in(root, monkeypatch):
    """A series of its own: notebooks/ and build/ in this folder. What it gives writes notebooks there."""
    for name, value in (("ROOT", root), ("NOTEBOOKS", root / "notebooks"), ("BUILD", root / "build")):
        monkeypatch.setattr(series, name, value)
    site = root / "build" / "index.html"
    monkeypatch.setattr(website, "build", lambda paths, seconds: SITES.append((paths, seconds)) or site)
    monkeypatch.setattr(
        run.stamp, "stamp_lesson", lambda path, fix: []
    )  # these have neither an opening nor a set-up cell
    (root / "notebooks").mkdir()

    def write(**notebooks):
        for name, notebook in notebooks.items():
            nbformat.write(notebook, root / "notebooks" / f"{name.removeprefix('nb_')}.ipynb")
        return root

    return write


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return series_in(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """build/ after a run of four notebooks, of which two fail; and what was printed."""
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()) as printed:
        for name in [*run.ENVIRONMENT, "OMP_NUM_THREADS"]:
            monkeypatch.delenv(name, raising=False)
        write = series_in(tmp_path_factory.mktemp("series"), monkeypatch)
        root = write(nb_01_good=GOOD, nb_02_bad=BAD, nb_03_dead=DEAD, nb_04_where=WHERE)
        assert run.main(["--jobs", "2"]) == 1
        return root / "build", printed.getvalue()


def test_a_failing_notebook_does_not_hide_the_others(ran):
    build, printed = ran
    told = {"[ OK ] 01_good", "[FAIL] 02_bad", "[FAIL] 03_dead", "[ OK ] 04_where"}
    assert set(re.findall(r"^\[.{4}\] \w+", printed, re.M)) == told, "each as soon as it ends"
    assert "  02_bad: cell 2 of 2: ValueError: the cure is tea\n  with milk\n" in printed, (
        "whole: the cause stands last"
    )
    assert "03_dead: cell 1 of 1: the kernel died" in printed
    assert "2 of 4 notebooks ran" in printed
    copies = ["01_good.ipynb", "02_bad.ipynb", "03_dead.ipynb", "04_where.ipynb"]
    assert sorted(path.name for path in build.glob("0*")) == copies
    paths, seconds = SITES[-1]
    assert [path.relative_to(build).name for path in paths] == copies, "the site is made of the executed copies"
    assert list(seconds) == [Path(name).stem for name in copies]
    assert list(json.loads((build / "times.json").read_text("utf-8"))) == ["01_good", "04_where"]
    assert nbformat.read(build / "02_bad.ipynb", 4).cells[2].outputs[0].ename == "ValueError", "the copy shows it"


@pytest.mark.parametrize("error, words", [
    (RuntimeError("Kernel died before replying to kernel_info"), " (too little memory? free some; or a damaged set-up? make clean, then make run)"),
    (zmq.ZMQError(24, "Too many open files"), " (raise this process's limit, by `ulimit -n 1024`"),
])  # fmt: skip
def test_a_kernel_that_does_not_start_is_a_failure_with_its_cure(folder, capsys, monkeypatch, error, words):
    folder(nb_01_good=GOOD)

    async def broken(client, **options):
        client.km = None  # as nbclient has it then
        raise error

    monkeypatch.setattr(run.NotebookClient, "async_start_new_kernel", broken)
    assert run.main([]) == 1
    assert f"01_good: the kernel did not start: {error}{words}" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_too_few_open_files_are_said_before_a_kernel_dies_of_it(folder, capsys, open_files_left):
    folder(nb_01_good=GOOD)
    open_files_left(40)
    assert run.main([]) == 1
    assert "the processes of a notebook need 128 more open files" in capsys.readouterr().out


@pytest.mark.parametrize(
    "whose, words", [("build", "its copy was not written: "), ("notebooks", "Not all was written: ")]
)
def test_a_full_disk_is_said_and_what_was_kept_is_whole(folder, monkeypatch, capsys, whose, words):
    root = folder(nb_01_good=GOOD)
    (root / "build").mkdir()
    (root / "build" / "times.json").write_text('{"01_go')  # cut off by another time
    before, write_text = (root / "notebooks" / "01_good.ipynb").read_bytes(), Path.write_text

    def full(self, text, **options):
        if self.parent.name == whose and "ipynb" in self.name:
            write_text(self, text[:10], **options)
            raise OSError(28, "No space left on device", str(self))
        return write_text(self, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert run.main(["--store"]) == 1
    printed = capsys.readouterr().out
    assert words in printed and "No space left" in printed and "ree some space, then run it again" in printed
    assert (root / "notebooks" / "01_good.ipynb").read_bytes() == before
    assert not list(root.rglob("*.part")) and "is no notebook" not in printed


def test_of_a_folder_that_does_not_fit_one_file_is_named(folder, monkeypatch, capsys):
    """shutil.copytree goes on, and raises a list."""
    folder(nb_01_good=GOOD)

    def full(paths, seconds):
        raise shutil.Error(
            [(f"docs/{name}", f"build/{name}", f"[Errno 28] No space left on device: {name!r}") for name in "abc"]
        )

    monkeypatch.setattr(website, "build", full)
    assert run.main(["--stored"]) == 1
    said = "Not all was written: [Errno 28] No space left on device: 'a'. What was there before is as it was; free some space"
    assert said in capsys.readouterr().out


NO_NOTEBOOKS = {
    "truncated": b'{"cells": [',
    "empty": b"",
    "list": b"[1]",
    "latin": b'{"cells": "\xe9"}',
    "no_cells": b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}',
    "dead_link": None,
}


@pytest.mark.parametrize("mode, failed", [("--check", "Failed:"), ("--stored", "There is no site:")])
def test_what_is_no_notebook_is_a_failure_that_names_the_file(folder, capsys, mode, failed):
    """The others go on."""
    root = folder(nb_01_good=GOOD)
    for number, (name, content) in enumerate(NO_NOTEBOOKS.items(), 2):
        path = root / "notebooks" / f"{number:02}_{name}.ipynb"
        path.write_bytes(content) if content is not None else path.symlink_to("nowhere")
    assert run.main([mode]) == 1
    printed = capsys.readouterr().out
    ran, told = printed.split(failed)
    assert ("[ OK ] 01_good" in ran) == (mode == "--check")
    for number, name in enumerate(NO_NOTEBOOKS, 2):
        assert re.search(rf"{root}/notebooks/{number:02}_{name}\.ipynb is no notebook: .+\. Restore it", told)
    assert "free some space" not in printed


def test_the_stored_site_executes_nothing_and_says_what_has_no_outputs(folder, capsys):
    root = folder(nb_01_good=GOOD, nb_03_dead=DEAD, nb_04_prose=new_notebook(cells=DEAD.cells[:1]))
    assert run.main(["--stored"]) == 0
    assert SITES[-1] == ([*sorted((root / "notebooks").iterdir())], {})
    said = "Without outputs on the site: 01_good, 03_dead. `make store` executes and keeps them."
    assert said in capsys.readouterr().out


def test_who_is_second_waits(folder, capsys, monkeypatch):
    """Else both write one site's sources. Threads stand for processes: each opens what is locked."""
    pytest.importorskip("fcntl")
    root, inside, together = folder(nb_03_dead=DEAD), [], []

    def build(paths, seconds):
        inside.append(1)
        time.sleep(0.2)
        together.append(len(inside))
        inside.pop()
        return root / "build" / "index.html"

    monkeypatch.setattr(website, "build", build)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run.main, [["--stored"]] * 2)) == [0, 0]
    assert (
        together == [1, 1] and capsys.readouterr().out.count("Another run works in this folder: this one begins") == 1
    )


def test_a_site_that_is_not_whole_is_a_failure(folder, capsys, monkeypatch):
    folder(nb_01_good=GOOD)

    def broken(paths, seconds):
        raise website.Broken("target not found: 02_gone.ipynb")

    monkeypatch.setattr(website, "build", broken)
    assert run.main(["--stored"]) == 1
    assert "target not found: 02_gone.ipynb" in capsys.readouterr().out


def test_a_kernel_has_the_environment_that_outputs_are_compared_in(ran):
    """And no private path is stored from a cell that is not compared."""
    cells = nbformat.read(ran[0] / "04_where.ipynb", 4).cells
    half = str(max(1, os.cpu_count() // 2))  # of the cores: another notebook runs beside it
    assert cells[1].outputs[0].data["text/plain"] == str([*run.ENVIRONMENT.values(), half])
    assert cells[2].outputs[0].text == "~/x\n"


def test_a_kernel_has_time_to_end(folder):
    """jupyter_client kills it after five seconds, with a signal after half of them; then its temporary folders stay."""
    root = folder(
        nb_01_slow=of("01 · End", "import atexit, time\natexit.register(lambda: [time.sleep(4), open('ended', 'w')])")
    )
    assert run.main(["--check"]) == 0
    assert (root / "notebooks" / "ended").exists()


def test_only_some_and_what_ran_is_stored(folder, capsys):
    root = folder(nb_01_good=GOOD, nb_02_bad=BAD)
    before = (root / "notebooks" / "02_bad.ipynb").read_bytes()
    assert run.main(["--store", "01"]) == 0
    stored = nbformat.read(root / "notebooks" / "01_good.ipynb", 4)
    assert stored.cells[1].outputs[0].data["text/plain"] == "2" and stored.cells[1].execution_count == 1
    assert (root / "notebooks" / "02_bad.ipynb").read_bytes() == before
    built = [root / "build" / "01_good.ipynb", root / "notebooks" / "02_bad.ipynb"]
    assert SITES[-1][0] == built, "and the stored others"
    assert run.main(["07"]) == 2
    assert "There are: 01_good, 02_bad" in capsys.readouterr().out


@pytest.mark.parametrize("number, status", [(2, 130), (15, 143), (9, -9)])
def test_a_signal_leaves_no_process(folder, tmp_path_factory, number, status):
    """An interrupted `make run` ends its kernels too: two run at a time, the shortest waits. What a killed one leaves goes with the next."""

    def slow(number):
        return of(f"{number} · Wait", f"import time\nopen('started{number}', 'w').close()\ntime.sleep(600)")

    root = folder(nb_01_slow=slow(1), nb_02_slow=slow(2), nb_05_slow=slow(5))
    code = (
        f"import sys; sys.path.insert(0, {str(Path(run.__file__).parent)!r}); import pathlib, series, run\n"
        f"series.ROOT = root = pathlib.Path({str(root)!r}); series.NOTEBOOKS, series.BUILD = root / 'notebooks', root / 'build'\n"
        "sys.exit(run.main(['--jobs', '2']))"
    )
    temporary = tmp_path_factory.mktemp("temporary")
    environ = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ)
    started = [root / "notebooks" / f"started{number}" for number in (1, 5)]
    try:
        wait_until(lambda: process.poll() is not None or all(path.exists() for path in started), 120)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "the kernels"
        assert not (root / "notebooks" / "started2").exists(), "the longest are begun first"
        process.send_signal(number)
        printed, _ = process.communicate(timeout=30)
        assert process.returncode == status and ("Interrupted" in printed) == (number == 2)
        assert not psutil.wait_procs(family, timeout=30)[1]
    finally:
        process.kill()
    left = [path.name for path in temporary.iterdir()]
    assert all(name.startswith("virtualgpu-") for name in left) and bool(left) == (number == 9)


def drawn(words: str, picture: str):
    return new_output("display_data", {"image/png": picture, "text/plain": words})


def folded(words: str, picture: str):
    page = f'<details><img alt="{words}" src="data:image/png;base64,{picture}"></details>'
    return new_output("display_data", {"text/html": page, "text/plain": "The answer is folded."})


OUTPUTS = {  # name of a cell: what is stored, what another run shows, and whether that says something else
    "measured": (drawn("Figure (measured): x", "old"), drawn("Figure (measured): x", "new"), False),
    "otherwise": (drawn("Figure (measured): x", "old"), drawn("Figure (measured): y", "new"), True),
    "simulated": (drawn("Figure (simulated): x", "old"), drawn("Figure (simulated): x", "new"), True),
    "folded": (folded("Figure (measured): x", "old"), folded("Figure (measured): x", "new"), False),
    "folded simulated": (folded("Figure (simulated): x", "old"), folded("Figure (simulated): x", "new"), True),
    "ignored": (new_output("stream", text="3 s"), new_output("stream", text="4 s"), False),
}


def of_cells(which: int) -> nbformat.NotebookNode:
    """A notebook with these outputs."""
    cells = [new_markdown_cell("# 01 · Keep", id="title")]
    for name, outputs in OUTPUTS.items():
        tags = {"tags": ["nbval-ignore-output"]} if name == "ignored" else {}
        cells.append(new_code_cell(f"{name!r}", id=name.replace(" ", "-"), outputs=[outputs[which]], metadata=tags))
    return new_notebook(cells=cells)


@pytest.mark.parametrize(
    "options, anew", [([], {name for name, (*_, other) in OUTPUTS.items() if other}), (["--anew"], {*OUTPUTS})]
)
def test_what_says_the_same_is_kept(folder, monkeypatch, options, anew):
    """And stored once more, the file is the same to the byte."""
    root = folder(nb_01_keep=of_cells(0))

    async def execute_all(paths, jobs):
        run.write(root / "build" / "01_keep.ipynb", run.text_of(of_cells(1)))
        return [{"path": root / "build" / "01_keep.ipynb", "seconds": 1.0, "error": None}]

    monkeypatch.setattr(run, "execute_all", execute_all)
    assert run.main(["--store", *options]) == 0
    file = root / "notebooks" / "01_keep.ipynb"
    cells = series.code_cells(series.read(file))
    assert {name for name, cell in zip(OUTPUTS, cells, strict=True) if cell.outputs == [OUTPUTS[name][1]]} == anew
    before = file.read_bytes()
    assert run.main(["--store"]) == 0
    assert file.read_bytes() == before
