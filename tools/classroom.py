"""For a class: what students are handed, and who has solved what.

    python -m tools.classroom release OUT              a notebook a lesson without solutions, and the files beside it
    python -m tools.classroom collect FOLDER [03 ...]  CSV: a row a student, a column an exercise ("03.1": 1 or 0), and notes

Of nbgrader's conventions: exercise cells carry its metadata (grade_id "exercise-03-1", a point each; of the kind that nbgrader leaves to
manual grading, because answer and grader share a cell), and collect reads its folders, submitted/<student>/<assignment>/, beside plain
<student>/ ones. Of otter's: none.

How an exercise is graded: our own lesson runs, once for all students; at each exercise this process is forked, once a student. The
fork has what a reader has at that place whatever the student did elsewhere. It runs the student's cell (and cells that the student put
right before it), where the grader's name only notes what it is called with. Then we call the real grader: with the student's answer, and
with our own budget, model and data. It answers through a pipe. A fork that hangs, exits or dies costs one exercise of one student.
One that needs what no fork has (Ray, the lesson's virtual GPU) is given up, and the lesson runs once more for this student.

This keeps out accidents and simple tricks (a printed "[passed]", a replaced grader). It is no sandbox: a program that means harm, or reads
this file, needs a container around all of it.
"""

import argparse
import ast
import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import lesson_text
import nbformat
import series
from graded import Exercise, exercises
from tqdm import tqdm

from virtualgpu.run.processes import kill_tree
from virtualgpu.run.trials import ended_by_sigterm

GUARD = Path(__file__).resolve().parent / "guarded"
LIMIT = 180  # seconds an exercise: graders have limits of their own below it, and say more
ENVIRONMENT = {"HELPERS_GPUS": "virtual", "MPLBACKEND": "agg", "TQDM_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"  # threads of a pool would be missing in a fork
KEPT = {"tags", "cellView", "jupyter", "nbgrader", *lesson_text.HIDDEN}  # of a cell's metadata


def release(out: Path) -> None:
    """Raises FileExistsError where something is there."""
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    pages = "](https://github.com/{repository}/blob/{tag}/".format(**series.settings())
    for path in series.notebooks():
        lesson = series.read(path)
        for at, exercise in exercises(lesson, path.name[:2]).items():
            cell = lesson.cells[at]
            cell.outputs, cell.execution_count = [], None
            cell.metadata["nbgrader"] = nbformat.from_dict(
                {"schema_version": 3, "grade_id": exercise.grade_id, "grade": True, "points": 1, "solution": True}
                | {"locked": False, "task": False}
            )
        lesson.cells = [cell for cell in lesson.cells if "solution" not in series.tags(cell)]
        for cell in lesson.cells:
            cell.metadata = nbformat.from_dict({key: value for key, value in cell.metadata.items() if key in KEPT})
            if cell.cell_type == "markdown":
                cell.source = cell.source.replace("](../", pages)  # the links of the repository
        lesson.metadata = nbformat.from_dict(
            {key: lesson.metadata[key] for key in ("kernelspec", "language_info") if key in lesson.metadata}
        )
        nbformat.validate(lesson)
        nbformat.write(lesson, out / path.name)
    for folder in (path.name for path in series.NOTEBOOKS.iterdir() if path.is_dir() and path.name[0] not in "._"):
        shutil.copytree(series.NOTEBOOKS / folder, out / folder, ignore=shutil.ignore_patterns("__pycache__"))


def handed_in(folder: Path) -> dict[str, dict[str, Path]]:
    """Student -> number of a lesson -> the newest notebook of it below the student's folder."""
    folder = folder / "submitted" if (folder / "submitted").is_dir() else folder
    students: dict[str, dict[str, Path]] = {}
    for student in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        found = [path for path in student.rglob("[0-9][0-9]_*.ipynb") if ".ipynb_checkpoints" not in path.parts]
        students[student.name] = {path.name[:2]: path for path in sorted(found, key=lambda path: path.stat().st_mtime)}
    return students


def answer(submitted: nbformat.NotebookNode, lesson: nbformat.NotebookNode, exercise: Exercise) -> list[str]:
    """The student's cell, by its grade_id, else the last that calls the grader; before it, what was added right above. [] where there is none."""
    cells = [cell for cell in submitted.cells if cell.cell_type == "code" and "solution" not in series.tags(cell)]
    ours = {cell.get("id") for cell in lesson.cells} | {cell.source.strip() for cell in lesson.cells}
    places = range(len(cells))
    marked = [
        at
        for at in places
        if {"grade_id": exercise.grade_id}.items() <= dict(cells[at].metadata.get("nbgrader", {})).items()
    ]
    others = ours - {
        exercise.source.strip(),
        exercise.solution.strip(),
    }  # the lesson may call the grader in a cell of its own
    calling = [
        at
        for at in places
        if re.search(rf"\bchecks\.{exercise.grader}\s*\(", cells[at].source) and cells[at].source.strip() not in others
    ]
    if not (marked or calling):
        return []
    first = last = (marked or calling)[-1]
    while (
        first
        and not {cells[first - 1].get("id"), cells[first - 1].source.strip()} & ours
        and "nbgrader" not in cells[first - 1].metadata
    ):
        first -= 1
    return [cell.source for cell in cells[first : last + 1]]


def plain(source: str) -> str:
    """Without comments and layout."""
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source.strip()


class Results:
    """A value (1, 0, or None: not graded) of each student and exercise, and notes."""

    def __init__(self, students: list[str], names: list[str]):
        self.names = names
        self.values: dict[str, dict[str, int | None]] = {student: dict.fromkeys(names) for student in students}
        self.notes: dict[str, dict[str, list[str]]] = {student: {} for student in students}

    def note(self, student: str, name: str, text: str) -> None:
        line = "".join(
            c if c.isprintable() else "?" for c in " ".join(text.split())
        )  # a terminal or a table may obey others
        self.notes[student].setdefault(name, []).append(line[:200])

    def write(self, file) -> None:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["student", *self.names, "notes"])
        for student, values in self.values.items():
            notes = [f"{name}: {', '.join(texts)}" for name, texts in sorted(self.notes[student].items())]
            table.writerow([student, *("" if values[n] is None else values[n] for n in self.names), "; ".join(notes)])


def collect(folder: Path, only: list[str], file, limit: float, jobs: int) -> int:
    """Grade all, and write the table; interrupted, what is known so far: the exit status."""
    students = handed_in(folder)
    numbers = {number for found in students.values() for number in found}
    paths = [path for path in series.notebooks() if path.name[:2] in numbers and (not only or path.name[:2] in only)]
    lessons = {path: series.read(path) for path in paths}
    found = {path: list(exercises(lesson, path.name[:2]).values()) for path, lesson in lessons.items()}
    if not found:
        raise ValueError(
            f"{folder} has no folder with a notebook of lesson {' or '.join(only) or 'any number'}: expected is STUDENT/03_....ipynb"
        )
    results = Results(list(students), [exercise.name for all_ in found.values() for exercise in all_])
    try:
        with (
            tqdm(total=len(students) * len(results.names), unit="exercise") as bar,
            tempfile.TemporaryDirectory(prefix="class", ignore_cleanup_errors=True) as root,
        ):
            for path, lesson in lessons.items():
                bar.set_postfix_str(path.stem)
                answers = sort_out(students, path.name[:2], lesson, found[path], results, bar)
                grade(path, answers, results, bar, root=Path(root).resolve(), limit=limit, jobs=jobs)
    except KeyboardInterrupt:
        print("Interrupted: what is not graded stays empty.", file=sys.stderr)
        return 130
    finally:
        results.write(file)
    return 0


def sort_out(students, number, lesson, found: list[Exercise], results: Results, bar) -> dict[str, dict[str, list[str]]]:
    """Exercise -> student -> the cells to run; what need not run has its value and note already."""
    answers: dict[str, dict[str, list[str]]] = {exercise.name: {} for exercise in found}
    for student, notebooks in students.items():
        why, cells = "not handed in", {}
        if number in notebooks:
            try:
                submitted = series.read(notebooks[number])
                why, cells = "no cell of it", {exercise.name: answer(submitted, lesson, exercise) for exercise in found}
            except (ValueError, TypeError):  # TypeError: metadata of another kind
                why = "no notebook can be read from the file"
        for exercise in found:
            own = cells.get(exercise.name)
            same = own and [plain(source) for source in own] == [plain(exercise.source)]
            if own and not same:
                answers[exercise.name][student] = own
            else:
                results.values[student][exercise.name] = 0
                results.note(student, exercise.name, "as it was handed out" if same else why)
                bar.update()
    for exercise in found:
        alike: dict[str, list[str]] = {}
        for student, own in answers[exercise.name].items():
            alike.setdefault("".join(map(plain, own)), []).append(student)
        for text, group in alike.items():
            for student in group:
                if text == plain(exercise.solution):
                    results.note(student, exercise.name, "our solution, word for word")
                elif len(group) > 1:
                    other = next(one for one in group if one != student)
                    results.note(
                        student,
                        exercise.name,
                        f"the same code as {other}" + f" and {len(group) - 2} more" * (len(group) > 2),
                    )
    return answers


def grade(path: Path, answers, results: Results, bar, root: Path, limit: float, jobs: int) -> None:
    """One lesson, in a process of its own, which says each result in a line."""
    if not any(answers.values()):
        return
    work = root / path.name[:2]
    places = {"HOME": work / "home", "TMPDIR": root / "tmp", "IPYTHONDIR": work / "home" / "ipython"}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    shutil.copytree(path.parent, work / "cwd", ignore=shutil.ignore_patterns("*.ipynb", "__pycache__", ".*"))
    job = work / "job.json"
    job.write_text(
        json.dumps({"lesson": str(path), "answers": answers, "limit": limit, "jobs": jobs, "root": str(root)}), "utf-8"
    )
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environ |= {name: str(place) for name, place in places.items()} | ENVIRONMENT
    environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(GUARD), str(series.ROOT), environ.get("PYTHONPATH")])),
        "GUARDED": str(root),
    }
    reading, writing = os.pipe()
    command = [sys.executable, str(GUARD.with_name("graded.py")), str(job), str(writing)]
    log = (work / "log").open("w+", encoding="utf-8", errors="replace")
    process = subprocess.Popen(
        command, cwd=work / "cwd", env=environ, pass_fds=[writing], stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as lines:
            for line in lines:
                student, name, value, note = json.loads(line)
                results.values[student][name] = value
                if note:
                    results.note(student, name, note)
                answers[name].pop(student)
                bar.update()
    finally:
        kill_tree(process.pid)
        process.kill()
        process.wait()
    log.seek(0)
    said = (log.read().splitlines() or ["without a word"])[-1]
    log.close()
    for name, left in answers.items():
        for student in left:
            results.note(student, name, f"not graded, the lesson ended before it: {said}")
            bar.update()


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("release").add_argument("out", type=Path, help="a new folder")
    collecting = commands.add_parser("collect")
    collecting.add_argument("folder", type=Path, help="with a folder a student")
    collecting.add_argument("only", nargs="*", help="a lesson's number: 03")
    collecting.add_argument("--csv", type=Path, help="write the table there and not to the terminal")
    collecting.add_argument("--limit", type=float, default=LIMIT, help="seconds an exercise")
    collecting.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many students at a time")
    options = parser.parse_args(arguments)
    try:
        if options.command == "release":
            release(options.out)
            return 0
        if not hasattr(os, "fork"):
            raise OSError("collect forks a process a student, which this system cannot: use Linux, macOS or WSL")
        with ended_by_sigterm(), contextlib.ExitStack() as stack:
            file = stack.enter_context(options.csv.open("w", encoding="utf-8")) if options.csv else sys.stdout
            return collect(options.folder, options.only, file, options.limit, max(1, options.jobs))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
