"""A lesson in another language: prose from a catalogue, code and outputs byte for byte the same, what has changed marked fuzzy."""

import nbformat
import pytest
import series
import translate
from babel.messages.pofile import read_po, write_po


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of one lesson; catalogues and notebooks go into this folder."""
    path = series.notebooks()[2]
    copy = tmp_path / "notebooks" / path.name
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    (tmp_path / "docs").mkdir()  # the site's other pages, which no catalogue of a lesson needs
    (tmp_path / "pyproject.toml").symlink_to(series.ROOT / "pyproject.toml")
    for name, value in (("ROOT", tmp_path), ("NOTEBOOKS", copy.parent), ("BUILD", tmp_path / "build")):
        monkeypatch.setattr(series, name, value)
    (tmp_path / "build").mkdir()
    return copy


def test_a_lesson_in_a_test_language(project, tmp_path, capsys):
    """The language of capitals: a few sentences of it."""
    assert translate.main(["write", "ko", "03"]) == 2
    assert "translate.py update ko makes it" in capsys.readouterr().out
    translate.main(["update", "ko", "03"])
    file = tmp_path / "locales" / "ko" / f"{project.stem}.po"
    english = ["Two GPUs, and slower than one", "cut the model where it is fastest among the cuts that fit"]
    catalogue = read_po(file.open("rb"))
    assert all(catalogue.get(sentence) for sentence in english)
    for sentence in english:
        catalogue[sentence].string = sentence.upper()
    write_po(file.open("wb"), catalogue, width=0)

    assert translate.main(["write", "ko", "03"]) == 0
    before, after = series.read(project), series.read(tmp_path / "build" / "ko" / project.name)
    assert series.code_cells(before) == series.code_cells(after), "code and outputs"
    changed = [(b.source, a.source) for b, a in zip(before.cells, after.cells, strict=True) if b.source != a.source]
    assert len(changed) == 2
    assert "## TWO GPUS, AND SLOWER THAN ONE\n" in changed[1][1]
    assert f"- {english[1].upper()}\n" in changed[0][1]

    # a sentence that is written anew waits for its translator, and stays English until then
    notebook = series.read(project)
    notebook.cells[2].source = notebook.cells[2].source.replace(english[0], english[0] + " today")
    nbformat.write(notebook, project)
    translate.main(["update", "ko", "03"])
    assert read_po(file.open("rb"))[english[0] + " today"].fuzzy
    translate.main(["write", "ko", "03"])
    after = series.read(tmp_path / "build" / "ko" / project.name)
    assert english[0] + " today" in after.cells[2].source


def test_without_a_translation_nothing_changes(project):
    notebook = series.read(project)
    text = nbformat.writes(notebook)
    again, missing = translate.translate(notebook, {})
    assert nbformat.writes(again) == text and missing > 50


def test_blocks_of_every_kind():
    source = (
        "## A *b*\n\n- one\n  two\n- three\n\n> said\n\n| a | b |\n| --- | --- |\n| c | d |\n\n```\none\ntwo\n```\n"
    )
    words = {"A *b*": "X", "one two": "Y", "said": "Z", "c": "C", "three": "3"}
    text, missing = translate.translate_markdown(source, words)
    assert text == "## X\n\n- Y\n- 3\n\n> Z\n\n| a | b |\n| --- | --- |\n| C | d |\n\n```\none\ntwo\n```\n"
    assert missing == 3
