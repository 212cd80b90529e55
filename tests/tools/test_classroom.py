"""A class: notebooks without answers go out, forty come back, and each exercise counts, whatever the others do."""

import csv
import io
import os
import shutil
import signal
import subprocess
import sys

import classroom
import nbformat
import pytest
import series
from graded import exercises
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.processes import family, runs, wait_until

ROOT = series.ROOT


def lessons():
    return {path.name: series.read(path) for path in series.notebooks()}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    out = tmp_path_factory.mktemp("class") / "out"
    assert classroom.main(["release", str(out)]) == 0
    return out


def test_what_is_handed_out_has_every_exercise_and_no_solution(released):
    assert sorted(path.name for path in released.iterdir()) == sorted([*lessons(), "figures", "scripts"])
    for name, ours in lessons().items():
        theirs = nbformat.read(released / name, 4)
        nbformat.validate(theirs)
        text = (released / name).read_text("utf-8")
        assert "@title Solution" not in text and not any("solution" in series.tags(cell) for cell in theirs.cells)
        assert [cell.id for cell in theirs.cells] == [c.id for c in ours.cells if "solution" not in series.tags(c)]
        outputs = {cell.id: cell.outputs for cell in ours.cells if cell.cell_type == "code"}
        found = list(exercises(ours, name[:2]).values())
        tagged = [cell for cell in theirs.cells if "exercise" in series.tags(cell)]
        assert [(c.source, c.outputs, c.execution_count) for c in tagged] == [(e.source, [], None) for e in found]
        assert [cell.metadata.nbgrader.grade_id for cell in tagged] == [e.grade_id for e in found]
        assert all(c.outputs == outputs[c.id] for c in theirs.cells if c.cell_type == "code" and c not in tagged)
        assert "](../" not in text, "a link that leads nowhere outside of the repository"
    assert {path.name for path in (released / "scripts").iterdir()} >= {"train_ddp.py", "llama.py"}


def test_every_exercise_of_the_series_says_what_is_the_students():
    """What our solution passes to the grader or binds; budgets, models and data stay ours."""
    table = {}
    for name, lesson in lessons().items():
        for exercise in exercises(lesson, name[:2]).values():
            places = [*range(len(exercise.call.args)), *(keyword.arg for keyword in exercise.call.keywords)]
            theirs = [place for place in places if exercise.is_answer(place)]
            assert theirs and all(isinstance(place, int) for place in theirs), "a keyword is never the answer"
            table[exercise.name] = len(theirs), len(places) - len(theirs)
    assert table["02.2"] == (1, 3) and table["03.1"] == (1, 0) and table["01.1"] == (2, 0)


# A lesson of two exercises, which takes no time, with graders of its own

CHECKS = """
def _said(passed):
    print("[passed] well done" if passed else "[not yet]")
    return passed

def doubles(function, start, budget):
    return _said(function(start) == 2 * start and budget == 7)

def found(answer):
    return _said(answer == 42)
"""
ONE = "import checks\n\n\ndef double(x):\n    return x  # your turn\n\n\nchecks.doubles(double, start, budget=7)"
TWO = "answer = 0  # your turn\nchecks.found(answer)"
SOLVED = (
    "def double(x):\n    return 2 * x\n\n\nchecks.doubles(double, start, budget=7)",
    "answer = 42\nchecks.found(answer)",
)


def cell(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


@pytest.fixture
def series_of_one(tmp_path, monkeypatch):
    root = tmp_path / "series"
    (root / "notebooks").mkdir(parents=True)
    (root / "checks").mkdir()
    (root / "checks" / "__init__.py").write_text(CHECKS)
    cells = [
        new_markdown_cell("# 01 · Tiny"),
        cell("start = 3\nguess = None", "prediction"),
        cell(ONE, "exercise"),
        cell(SOLVED[0], "solution"),
        cell("open('left', 'w').write(str(double(4)))\nassert double(4) == 8"),
        cell(TWO, "exercise"),
        cell(SOLVED[1], "solution"),
        cell("raise RuntimeError('behind the last exercise nothing need run')"),
    ]
    nbformat.write(new_notebook(cells=cells), root / "notebooks" / "01_tiny.ipynb")
    monkeypatch.setattr(series, "ROOT", root)
    monkeypatch.setattr(series, "NOTEBOOKS", root / "notebooks")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return root


def submission(root, one=None, two=None, added="", marked=True):
    """The lesson as a student hands it in: sources of both cells, one above the first."""
    notebook = nbformat.read(root / "notebooks" / "01_tiny.ipynb", 4)
    for place, exercise in exercises(notebook, "01").items():
        source = (one if exercise.name == "01.1" else two) or exercise.source
        notebook.cells[place].source = source
        notebook.cells[place].metadata = {"tags": ["exercise"]}
        if marked:
            notebook.cells[place].metadata["nbgrader"] = {"grade_id": exercise.grade_id}
    notebook.cells = [one for one in notebook.cells if "solution" not in series.tags(one)]
    if added:
        notebook.cells.insert(2, new_code_cell(added))
    return nbformat.writes(notebook)


RIGHT = "def double(x):\n    return x + x\nchecks.doubles(double, start, budget=7)"
ALSO = "answer = 6 * 7\nchecks.found(answer)"
HANDED_OUT = "as it was handed out"


def students(root, outside):
    """name -> (text of the file, or None where there is none; 01.1, 01.2; what the notes say, in order)."""

    def hand(*values, says=(), **cells):
        return submission(root, **cells), *values, says

    def first(source, value=0, *says):
        """A right second answer, whatever becomes of the first."""
        one, two = f"{source}\nchecks.doubles(double, start, budget=7)", f"mine = {source!r}\n{ALSO}"
        return hand(value, 1, one=one, two=two, says=says)

    same, late = "01.1: the same code as", "no end within the time limit"
    table = {
        "ann": hand(1, 1, one=RIGHT, two="answer = 40 + 2\nchecks.found(answer)"),
        "without marks": hand(1, 1, one=f"two = 2\n{RIGHT}", two="answer = 84 // 2\nchecks.found(answer)", marked=False),
        "helper above": hand(1, 0, one="double = twice\nchecks.doubles(double, start)", added="def twice(x): return 2 * x", says=[HANDED_OUT]),
        "no call": hand(1, 1, one="double = lambda x: 2 * x", two="answer = 21 + 21"),
        "solution": hand(1, 1, one=SOLVED[0], two="answer = 43 - 1", says=["01.1: our solution, word for word"]),
        "untouched": hand(0, 0, says=[HANDED_OUT, HANDED_OUT]),
        "wrong": hand(0, 0, one=RIGHT.replace("+", "-"), two=ALSO.replace("7", "8")),
        "signs as ann": hand(0, 1, one="name = student = 'ann'\ndouble = abs", two="# ann\nanswer = 44 - 2"),
        "replaces": first("checks.doubles = lambda *a, **k: True\ndouble = abs"),
        "replaces all": first("import sys, types\nsys.modules['checks'] = types.SimpleNamespace(doubles=lambda *a, **k: True)\ndouble = abs"),
        "begins at 0": first("start = 0\ndouble = lambda x: 0"),
        "a larger budget": hand(1, 1, one="double = lambda x: x * 2\nchecks.doubles(double, start, budget=9)", two="answer = 45 - 3"),
        "loop": first("while True: pass", 0, late),
        "deaf": first("import signal, time\n[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\ntime.sleep(1e5)", 0, late),
        "exit in function": first("def double(x): raise SystemExit(0)", 0, "SystemExit: 0"),
        "_exit": first("import os\nos._exit(5)", 0, "its process ended (status 5)"),
        "error": first("1 / 0", 0, "ZeroDivisionError: division by zero"),
        "syntax": hand(0, 1, one="def double(x]:\n", two="answer = 46 - 4", says=["SyntaxError"]),
        "asks": first("double = input('?')", 0, "EOFError"),
        "writes outside": first(f"open({str(outside / 'file')!r}, 'w')", 0, "lies outside the folder"),
        "writes at home": first("import pathlib\n(pathlib.Path.home() / 'a').write_text('')\ndouble = lambda x: 3 * x - x", 1),
        "reads what is there": hand(1, 1, one="double = lambda x: 6 if x else 0", two="answer = 34 + int(open('left').read())\nchecks.found(answer)"),
        # what CUDA says there; by itself a process has three arguments more
        "no fork": first("import sys\nif len(sys.argv) < 4: raise RuntimeError('not in a forked subprocess')\ndouble = lambda x: 2 * x", 1),
        "network": first("import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=9)", 0, "rror"),
        "daemon": first("import subprocess\nsubprocess.Popen(['sleep', '98765'], start_new_session=True)\ndouble = lambda x: x", 0),
        "copies": hand(1, 1, one=RIGHT + "\nmine = 8", two="answer = 48 - 6", says=[f"{same} copied"]),
        "copied": hand(1, 1, one=RIGHT + "\nmine =  8", two="answer = 47 - 5", says=[f"{same} copies"]),
        "no cell": (nbformat.writes(new_notebook()), 0, 0, ["01.1: no cell of it", "01.2: no cell of it"]),
        "no json": ("what?", 0, 0, ["01.1: no notebook can be read"]),
        "odd metadata": (submission(root).replace('"grade_id": "exercise-01-1"', '"grade_id": [[]]'), 0, 0, [HANDED_OUT]),
        "empty": (None, 0, 0, ["01.1: not handed in; 01.2: not handed in"]),
    }  # fmt: skip
    return table


def hand_in(folder, table):
    for name, (text, *_) in table.items():
        (folder / name).mkdir(parents=True)
        if text is not None:
            (folder / name / "01_tiny (1).ipynb").write_text(text, "utf-8")


def test_forty_students(series_of_one, tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    outside.mkdir()
    table = students(series_of_one, outside)
    hand_in(tmp_path / "in", table)
    monkeypatch.setenv("CLASS_OF_THIS_TEST", str(tmp_path))
    written = tmp_path / "grades.csv"
    assert classroom.main(["collect", str(tmp_path / "in"), "--csv", str(written), "--limit", "4", "--jobs", "6"]) == 0
    header, *rows = csv.reader(io.StringIO(written.read_text("utf-8")))
    assert header == ["student", "01.1", "01.2", "notes"]
    found = {name: (int(one), int(two)) for name, one, two, _ in rows}
    assert found == {name: tuple(values) for name, (_, *values, _) in table.items()}
    notes = {name: note for name, *_, note in rows}
    for name, (*_, says) in table.items():
        assert all(words in notes[name] for words in says), (name, notes[name])
        assert bool(says) == bool(notes[name]), (name, notes[name])
    assert not list(outside.iterdir())
    wait_until(lambda: not family("CLASS_OF_THIS_TEST", str(tmp_path)))


def test_folders_of_nbgrader(series_of_one, tmp_path, capsys):
    folder = tmp_path / "course" / "submitted" / "bob" / "lesson_one"
    folder.mkdir(parents=True)
    (folder / "01_tiny.ipynb").write_text(submission(series_of_one, two=ALSO), "utf-8")
    assert classroom.main(["collect", str(tmp_path / "course")]) == 0
    assert capsys.readouterr().out == f"student,01.1,01.2,notes\nbob,0,1,01.1: {HANDED_OUT}\n"


def test_what_cannot_be_done_is_said(series_of_one, tmp_path, capsys):
    (tmp_path / "in" / "ann").mkdir(parents=True)
    assert classroom.main(["collect", str(tmp_path / "in")]) == classroom.main(["collect", str(tmp_path / "no")]) == 1
    assert "has no folder with a notebook of lesson" in capsys.readouterr().err
    assert classroom.main(["release", str(tmp_path)]) == 1
    assert "is not empty: name a new folder" in capsys.readouterr().err


def test_interrupted_no_process_is_left_and_what_is_known_is_kept(series_of_one, tmp_path, monkeypatch):
    waits = "import subprocess\nsubprocess.run(['sleep', '98765'])"
    hand_in(
        tmp_path / "in", {name: (submission(series_of_one, one=one),) for name, one in (("a", RIGHT), ("b", waits))}
    )
    monkeypatch.setenv("CLASS_OF_THIS_TEST", str(tmp_path))
    code = (
        f"import sys, pathlib; sys.path.insert(0, {str(ROOT / 'tools')!r}); import classroom, series\n"
        f"series.ROOT = pathlib.Path({str(series_of_one)!r}); series.NOTEBOOKS = series.ROOT / 'notebooks'\n"
        f"sys.exit(classroom.main(['collect', {str(tmp_path / 'in')!r}, '--jobs', '1']))"
    )
    command = [sys.executable, "-c", code]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    wait_until(lambda: runs("sleep", "CLASS_OF_THIS_TEST", str(tmp_path)))
    started.send_signal(signal.SIGINT)
    out, _ = started.communicate(timeout=30)
    assert started.returncode == 130
    assert out == f"student,01.1,01.2,notes\na,1,0,01.2: {HANDED_OUT}\nb,,0,01.2: {HANDED_OUT}\n"
    wait_until(lambda: not family("CLASS_OF_THIS_TEST", str(tmp_path)))


# A JupyterHub's image, as docs/classroom.md says

LESSON = """
import sys
sys.path.insert(0, {tools!r})
import graded
graded.leave_network()
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read("02_model_parallel.ipynb", 4)
imports = nbformat.v4.new_code_cell("import torch; from torch import nn")
first, _ = [cell for cell in notebook.cells if "exercise" in cell.metadata.get("tags", [])]
notebook.cells = [*[cell for cell in notebook.cells if "bootstrap" in cell.metadata.get("tags", [])], imports, first]
notebook.cells.append(nbformat.v4.new_code_cell("import checks, helpers, virtualgpu; [m.__file__ for m in (checks, helpers, virtualgpu)]"))
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, "ran.ipynb")
"""


@pytest.mark.skipif(os.name != "posix", reason="the image is Linux")
def test_the_recipe_for_a_jupyterhub_needs_no_network(released, tmp_path):
    """The clone of the image on PYTHONPATH; set-up cell and exercise of a lesson as it was handed out, in a home that has nothing else."""
    assert "ENV PYTHONPATH=/opt/beyond-one-gpu" in (ROOT / "docs" / "classroom.md").read_text("utf-8")
    image, home, stubs, called = (tmp_path / name for name in ("opt", "home", "stubs", "called"))
    for name in ("virtualgpu", "helpers", "checks", "data", "notebooks"):
        shutil.copytree(ROOT / name, image / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    home.mkdir()
    (stubs / "pip").mkdir(parents=True)
    (stubs / "git").write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    (stubs / "git").chmod(0o755)
    (stubs / "pip" / "__init__.py").write_text(f"open({str(called)!r}, 'w')\nraise SystemExit(1)")
    shutil.copy(released / "02_model_parallel.ipynb", home)
    environ = os.environ | {
        "HOME": str(home), "PATH": f"{stubs}:{os.environ['PATH']}", "JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": f"{stubs}:{image}",
        "HELPERS_GPUS": "virtual", "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }  # fmt: skip
    command = [sys.executable, "-c", LESSON.format(tools=str(ROOT / "tools"))]
    done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = nbformat.read(home / "ran.ipynb", 4).cells
    assert cells[-1].outputs[0].data["text/plain"].count(f"'{image}{os.sep}") == 3, "all three are the image's"
    said = [output.text for cell in cells if "exercise" in series.tags(cell) for output in cell.outputs]
    assert [text.split("]")[0] for text in said] == ["[not yet"] and not called.exists()
