"""A lesson's text and its notebook: which one counts, what is folded, and what JupyterLab writes of them."""

import os
import shutil
import time

import lesson_text
import nbformat
import pytest
import series
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

SOURCES = "# 01 · A lesson", "print(1)", "print(2)"


@pytest.fixture
def folder(tmp_path):
    for name in ("lessons", "notebooks"):
        (tmp_path / name).mkdir()
    return tmp_path


def lesson(*sources: str, outputs: bool = False) -> nbformat.NotebookNode:
    prose, *code = sources
    shown = [new_output("stream", text=f"{source}\n") for source in code] if outputs else []
    cells = [new_code_cell(source, outputs=shown[i : i + 1]) for i, source in enumerate(code)]
    notebook = new_notebook(cells=[new_markdown_cell(prose), *cells])
    notebook.metadata["lesson"] = {"title": "A lesson"}
    return notebook


def put(folder, notebook, text, newer: str):
    """Both files, those that are given; which of them is newer."""
    path = folder / "notebooks" / "01_a.ipynb"
    if notebook:
        nbformat.write(notebook, path)
    if text:
        lesson_text.text_of(path).write_text(lesson_text.written(text), "utf-8")
    files = {"notebook": path, "text": lesson_text.text_of(path)}
    for name, file in files.items():
        if file.exists():
            os.utime(file, (time.time() - 100 * (name != newer),) * 2)
    return path


CHANGED = SOURCES[0], "print(1)", "print(3)"


@pytest.mark.parametrize("notebook, text, newer, sources, shown", [
    (SOURCES, CHANGED, "text", CHANGED, [1, 0]),  # what the cell showed was another cell's
    (SOURCES, CHANGED, "notebook", SOURCES, [1, 1]),
    (None, CHANGED, "text", CHANGED, [0, 0]),
    (SOURCES, None, "notebook", SOURCES, [1, 1]),
])  # fmt: skip
def test_the_newer_one_counts(folder, notebook, text, newer, sources, shown):
    stored = notebook and lesson(*notebook, outputs=True)
    paired = lesson_text.paired(put(folder, stored, text and lesson(*text), newer))
    assert tuple(cell.source for cell in paired.cells) == sources
    assert [len(cell.outputs) for cell in paired.cells[1:]] == shown
    assert paired.metadata["lesson"]["title"] == "A lesson"


def test_what_was_measured_below_a_changed_cell_is_measured_anew(folder):
    def timed(first):
        notebook = lesson("# A", first, "print(2)", "print('3 s (measured)')", outputs=True)
        notebook.cells[3].metadata["tags"] = ["nbval-ignore-output"]
        return notebook

    paired = lesson_text.paired(put(folder, timed("print(1)"), timed("print(10)"), "text"))
    assert [len(cell.outputs) for cell in paired.cells[1:]] == [0, 1, 0]


def test_what_is_no_text_is_named(folder):
    path = put(folder, None, lesson(*SOURCES), "text")
    lesson_text.text_of(path).write_bytes(b"---\nlesson: [\n---\n")
    with pytest.raises(ValueError, match=r"01_a\.md is no lesson's text: "):
        lesson_text.paired(path)


CLOSED = {"cellView": "form", "jupyter": {"source_hidden": True}, "_kg_hide-input": True}


@pytest.mark.parametrize("tags, metadata", [
    ([], {}),
    (["exercise"], {}),
    (["folded"], CLOSED),
    (["solution"], CLOSED | {"jupyter": {"source_hidden": True, "outputs_hidden": True}, "_kg_hide-output": True}),
])  # fmt: skip
def test_what_closes_a_cell_follows_from_its_tags(tags, metadata):
    cell = new_code_cell("x", metadata={"tags": tags, "collapsed": False, "jupyter": {"source_hidden": not metadata}})
    lesson_text.fold(cell)
    assert cell.metadata == metadata | ({"tags": tags} if tags else {})


def test_minutes_are_counted():
    """Up to *Going further*: 360 words, 20 lines, a prediction and an exercise; links' addresses and closed cells do not count."""
    shown = [new_output("stream", text="x")]
    code = "\n".join(["x = 1", "", "# why"] * 18)
    notebook = new_notebook(cells=[
        new_markdown_cell("# One " + "word " * 356 + "**Predict:** [a](https://x.y/z) <b>it</b>"),
        new_code_cell(code, outputs=shown),
        new_code_cell("guess = None", metadata={"tags": ["prediction"]}),
        new_code_cell("y = 2", metadata={"tags": ["exercise"]}, outputs=shown),
        new_code_cell("z = 3", metadata={"tags": ["solution"]}),
        new_markdown_cell("## Going further"),
        new_code_cell(code),
    ])  # fmt: skip
    counted = lesson_text.count(notebook)
    assert counted == lesson_text.Count(words=360, lines=20, silent=1, prompts=1, guesses=1, exercises=1)
    assert counted.minutes == 2 + 1 + 2 + 10


def test_jupyterlab_saves_both_and_nothing_but_the_change(folder):
    """Its contents manager with the settings of `make lab`: a reader opened cells, the kernel told its version, one line was edited."""
    shutil.copy(series.ROOT / "pyproject.toml", folder)
    stored = series.NOTEBOOKS / "02_model_parallel.ipynb"
    files = [folder / "notebooks" / stored.name, folder / "lessons" / f"{stored.stem}.md"]
    notebook = lesson_text.paired(stored)
    for cell in notebook.cells:
        lesson_text.fold(cell)
    lesson_text.settle(notebook)
    files[0].write_text(nbformat.writes(notebook).rstrip("\n") + "\n", "utf-8")
    files[1].write_text(lesson_text.written(notebook), "utf-8")
    before = [file.read_text("utf-8") for file in files]

    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)()
    manager.root_dir, manager.pre_save_hook = str(folder), lesson_text.saved
    model = manager.get(f"notebooks/{stored.name}")
    content = model["content"]
    content["metadata"]["language_info"] = {"name": "python", "version": "3.13.1", "pygments_lexer": "ipython3"}
    content["metadata"]["kernelspec"]["display_name"] = "Python 3 (ipykernel)"
    for cell in content["cells"]:
        if "jupyter" in cell["metadata"]:
            cell["metadata"]["jupyter"] = {"source_hidden": False}
    old = content["cells"][2]["source"].splitlines()[0]
    content["cells"][2]["source"] = content["cells"][2]["source"].replace(old, "## Another heading")
    manager.save(model, f"notebooks/{stored.name}")
    for file, text in zip(files, before, strict=True):
        assert file.read_text("utf-8") == text.replace(old, "## Another heading", 1)

    model = {"type": "notebook", "content": lesson(*SOURCES) | {"metadata": {"mine": 1}}}
    lesson_text.saved(model, "notebooks/mine.ipynb")
    assert model["content"]["metadata"] == {"mine": 1}, "other files are saved as they are"
