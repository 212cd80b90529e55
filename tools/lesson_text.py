"""A lesson's source is a text, lessons/NN_name.md (MyST, by jupytext); its notebook holds the same cells, with their outputs.

JupyterLab (`make lab`) writes both when you save (`saved`). Where another editor wrote one of them, `make store` and `python -m tools.stamp --fix` bring
the older one up to the newer; outputs stay until a cell is run again. The settings of the pair are in pyproject.toml, [tool.jupytext].

    python -m tools.lesson_text            what each lesson asks of its reader: a row a lesson
    python -m tools.lesson_text --strict   and exit status 1 where one is beyond the budget
"""

import copy
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import jupytext
import nbformat
import series
from jupytext.combine import combine_inputs_with_outputs
from jupytext.config import find_jupytext_configuration_file, load_jupytext_configuration_file

TEXTS = "lessons"
MYST = {"extension": ".md", "format_name": "myst"}
FILTERS = "cell_metadata_filter", "notebook_metadata_filter"
FOLDED = {"bootstrap", "solution", "folded"}  # tags of cells whose source is closed when a reader opens the lesson
HIDDEN = "_kg_hide-input", "_kg_hide-output"  # Kaggle's own keys


def text_of(notebook: Path) -> Path:
    """The text of lessons/ that belongs to a notebook of notebooks/."""
    return notebook.parent.parent / TEXTS / f"{notebook.stem}.md"


def lessons() -> list[Path]:
    """The notebooks of all lessons, also of those that are a text alone yet."""
    texts = (series.NOTEBOOKS.parent / TEXTS).glob("[0-9][0-9]_*.md")
    return sorted({*series.notebooks(), *(series.NOTEBOOKS / f"{text.stem}.ipynb" for text in texts)})


def read(notebook: Path) -> nbformat.NotebookNode:
    """The lesson as its text has it, without outputs. Raises ValueError, naming the file, where there is none."""
    text = text_of(notebook)
    try:
        return jupytext.reads(text.read_text(encoding="utf-8"), MYST)
    except Exception as error:  # the system's, yaml's, jupytext's
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{text} is no lesson's text: {why}") from error


def written(notebook: nbformat.NotebookNode) -> str:
    """The text of a lesson."""
    settings = load_jupytext_configuration_file(find_jupytext_configuration_file(str(series.ROOT / "pyproject.toml")))
    lesson = copy.deepcopy(notebook)
    # in each text: by them JupyterLab's jupytext leaves a folded cell folded
    lesson.metadata["jupytext"] = {name: getattr(settings, name) for name in FILTERS}
    return jupytext.writes(lesson, MYST, config=settings)


def same(one: nbformat.NotebookNode, other: nbformat.NotebookNode) -> bool:
    """Do both have the same cells and facts? Outputs do not count, nor what follows from tags."""
    return _cells(one) == _cells(other) and one.metadata.get("lesson") == other.metadata.get("lesson")


def _cells(notebook: nbformat.NotebookNode) -> list[tuple]:
    return [(cell.cell_type, cell.source, series.tags(cell)) for cell in notebook.cells]


def paired(path: Path) -> nbformat.NotebookNode:
    """The lesson as its newer file has it, with the outputs that the notebook keeps; the file that is there, where one is missing."""
    text = text_of(path)
    if not text.exists():
        return series.read(path)
    lesson = read(path)
    lesson.metadata.pop("jupytext", None)
    if not path.exists():
        return lesson
    stored = series.read(path)
    if same(stored, lesson) or path.stat().st_mtime > text.stat().st_mtime:
        return stored
    combined = combine_inputs_with_outputs(lesson, stored, fmt=MYST)
    combined.metadata = nbformat.from_dict({**stored.metadata, **lesson.metadata})
    known, changed = {cell.source for cell in series.code_cells(stored)}, False
    for cell in series.code_cells(combined):
        new = cell.source not in known
        changed |= new
        if new or (changed and "nbval-ignore-output" in series.tags(cell)):
            cell.outputs = []  # another cell's, or measured by what is another program now
    return combined


def fold(cell) -> None:
    """Set what closes a cell in JupyterLab, in Colab and on Kaggle, as its tags say."""
    tags = series.tags(cell)
    metadata = {"tags": cell.metadata["tags"]} if tags else {}
    if tags & FOLDED:
        metadata |= {"cellView": "form", "jupyter": {"source_hidden": True}, HIDDEN[0]: True}
    if "solution" in tags:  # what it prints and draws is the answer, too
        metadata["jupyter"]["outputs_hidden"] = metadata[HIDDEN[1]] = True
    cell.metadata = nbformat.from_dict(metadata)


def settle(notebook: nbformat.NotebookNode) -> None:
    """Leave of the notebook's own metadata what every lesson has, whatever its kernel is called: so that a diff is its change."""
    lesson = {"lesson": notebook.metadata["lesson"]} if "lesson" in notebook.metadata else {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}, **lesson})


def saved(model: dict, path: str, **_) -> None:
    """For JupyterLab, before it saves a file: of a lesson it writes what the tools here would write. Cells that a reader opened are
    closed again in the file, and the kernel's version does not come into it."""
    if not re.fullmatch(rf"/?(notebooks/\d\d_\w+\.ipynb|{TEXTS}/\d\d_\w+\.md)", path):
        return
    if model["type"] == "notebook":
        notebook = nbformat.from_dict(model["content"])
        settle(notebook)
        for cell in notebook.cells:
            fold(cell)
        model["content"] = notebook
    elif model["type"] == "file":
        notebook = jupytext.reads(model["content"], MYST)
        settle(notebook)
        model["content"] = written(notebook)


@dataclass
class Count:
    """What a lesson asks of its reader, up to a heading *Going further*."""

    words: int  # of prose
    lines: int  # of code that stand open, without blank ones and comments
    silent: int  # open cells of code that show nothing
    prompts: int  # "Predict" in the prose
    guesses: int  # places to write a prediction into
    exercises: int

    @property
    def minutes(self) -> int:
        """Of one hour: reading, two for a prediction, ten for an exercise."""
        return round(self.words / 180 + self.lines / 20 + 2 * self.guesses + 10 * self.exercises)


BUDGET = {"words": 2400, "lines": 320, "silent": 8, "minutes": 60}


def count(notebook: nbformat.NotebookNode) -> Count:
    """Of the cells before *Going further*, which is optional."""
    cells = notebook.cells
    further = [at for at, cell in enumerate(cells) if re.search(r"^#+ .*Going further", cell.source, re.M)]
    cells = cells[: min(further, default=len(cells))]
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    code = [cell for cell in cells if cell.cell_type == "code"]
    open_cells = [cell for cell in code if not series.tags(cell) & FOLDED]
    plain = [re.sub(r"\(https?[^)]*\)|<[^>]+>|!\[.*?\]\(.*?\)", "", text) for text in prose]
    lines = (line.strip() for cell in open_cells for line in cell.source.splitlines())
    return Count(
        words=sum(len(re.findall(r"[A-Za-z0-9']+", text)) for text in plain),
        lines=sum(bool(line) and not line.startswith("#") for line in lines),
        silent=sum(not cell.get("outputs") for cell in open_cells),
        prompts=sum(len(re.findall(r"\bPredict\b", text)) for text in prose),
        guesses=sum(bool(re.search(r"^guess", cell.source, re.M)) for cell in code),
        exercises=sum("exercise" in series.tags(cell) for cell in cells),
    )


def main(arguments: list[str]) -> int:
    """The table, and the exit status."""
    over = []
    names = [*Count.__dataclass_fields__, "minutes"]
    print(f"{'lesson':<8}", *(f"{name:>9}" for name in names))
    for path in series.notebooks():
        counted = count(paired(path))
        row = {**asdict(counted), "minutes": counted.minutes}
        print(f"{path.name[:2]:<8}", *(f"{row[name]:>9,}" for name in names))
        over += [
            f"{path.name[:2]}: {row[name]:,} {name}, budget {most:,}"
            for name, most in BUDGET.items()
            if row[name] > most
        ]
    print(*over, sep="\n")
    return int("--strict" in arguments and bool(over))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
