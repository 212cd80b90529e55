"""An edition in another language: words from a catalogue, the same code, what has changed marked fuzzy."""

import ast

import nbformat
import pytest
import series
import translate
from babel.messages.pofile import read_po, write_po


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of two lessons, each of which says that it has a drawing; catalogues and the edition go into this folder."""
    files = {
        "checks/grader.py": '"""Graders."""\nPASSED = "[passed] well done"\n',
        "checks/notebook_02.py": 'def said(place):\n    return f"{place} is still on the CPU"\n',
        "docs/conf.py": 'language = "en"\n',
        "docs/index.md": "# Course\n\n:::{grid-item-card} Learn\n:link: lessons\nRead\nit.\n:::\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "pyproject.toml").symlink_to(series.ROOT / "pyproject.toml")
    for name, value in (("ROOT", tmp_path), ("NOTEBOOKS", tmp_path / "notebooks"), ("BUILD", tmp_path / "build")):
        monkeypatch.setattr(series, name, value)
    for folder in ("build", "notebooks", "lessons"):
        (tmp_path / folder).mkdir()
    for number in ("02", "03"):
        cells = [
            nbformat.v4.new_markdown_cell(f"# {number} · Lesson {number}\n\n- cut it\n\nTwo GPUs,\nand slower."),
            nbformat.v4.new_code_cell('# a drawing\nprint(f"{1 + 1} GPUs wait on", "cuda:0")  # twice'),
        ]
        lesson = nbformat.v4.new_notebook(cells=cells, metadata={"lesson": {"goals": {"1": "cut it"}}})
        nbformat.write(lesson, tmp_path / "notebooks" / f"{number}_lesson.ipynb")
    return tmp_path


def learn(file, words):
    """Write translations into a catalogue."""
    catalogue = read_po(file.open("rb"))
    for english, other in words.items():
        assert catalogue.get(english), f"{english!r} is not in {file.name}"
        catalogue[english].string = other
    write_po(file.open("wb"), catalogue, width=0)


def test_an_edition(project, capsys, monkeypatch):
    assert translate.main(["build", "ko", "02"]) == 2
    assert "python -m tools.translate update ko sh makes it" not in (said := capsys.readouterr().out)
    assert "update ko 02 makes it" in said
    translate.main(["update", "ko", "02"])
    shared, own = (project / "locales" / "ko" / name for name in ("shared.po", "02_lesson.po"))
    # what both lessons say is shared
    learn(shared, {"cut it": "CUT", "a drawing": "DRAWN", "{1 + 1} GPUs wait on": "ON WAIT {1 + 1} GPUS"})
    learn(
        shared, {"Two GPUs, and slower.": "SLOWER", "Learn": "LEARN", "Read it.": "READ", "[passed] well done": "DONE"}
    )
    learn(own, {"02 · Lesson 02": "02 · ONE", "{place} is still on the CPU": "CPU, not {place}"})
    (project / "locales" / "ko" / "files" / "helpers").mkdir(parents=True)
    (project / "locales" / "ko" / "files" / "helpers" / "font.ttf").write_text("letters")
    monkeypatch.setattr(translate, "run", lambda chosen, language: 0)
    assert translate.main(["build", "ko", "02"]) == 0
    assert "02_lesson: whole" in capsys.readouterr().out
    edition = project / "build" / "ko"
    lesson = series.read(edition / "notebooks" / "02_lesson.ipynb")
    assert lesson.cells[0].source == "# 02 · ONE\n\n- CUT\n\nSLOWER"
    assert lesson.cells[1].source == '# DRAWN\nprint(f"ON WAIT {1 + 1} GPUS", "cuda:0")  # twice'
    assert lesson.metadata.lesson.goals["1"] == "CUT"
    assert "SLOWER" in (edition / "lessons" / "02_lesson.md").read_text("utf-8")
    assert "SLOWER" not in str(series.read(edition / "notebooks" / "03_lesson.ipynb")), "another lesson"
    assert (edition / "checks" / "notebook_02.py").read_text() == 'def said(place):\n    return f"CPU, not {place}"\n'
    assert (edition / "checks" / "grader.py").read_text() == '"""Graders."""\nPASSED = "DONE"\n'
    assert (edition / "docs" / "conf.py").read_text() == 'language = "ko"\n'
    assert "} LEARN\n:link: lessons\nREAD\n:::" in (edition / "docs" / "index.md").read_text()
    assert (edition / "helpers" / "font.ttf").exists()

    # a sentence that is written anew waits for its translator, and stays English until then
    path = project / "notebooks" / "02_lesson.ipynb"
    lesson = series.read(path)
    lesson.cells[0].source = lesson.cells[0].source.replace("Lesson 02", "Lesson 02 anew")
    nbformat.write(lesson, path)
    translate.main(["update", "ko", "02"])
    assert read_po(own.open("rb"))["02 · Lesson 02 anew"].fuzzy
    translate.main(["build", "ko", "02"])
    assert "02_lesson: 1 texts in English" in capsys.readouterr().out
    assert "02 · Lesson 02 anew" in series.read(edition / "notebooks" / "02_lesson.ipynb").cells[0].source


def test_a_number_that_is_another_is_named(project, capsys):
    """As where a translation says 2 for two."""
    path = project / "notebooks" / "02_lesson.ipynb"
    (project / "build" / "ko" / "build").mkdir(parents=True)
    lesson = series.read(path)
    for folder, text in ((path.parent, "two of 1,024\n"), (project / "build" / "ko" / "build", "1,024, 2\n")):
        lesson.cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
        nbformat.write(lesson, folder / path.name)
    assert translate.other_numbers([path], project / "build" / "ko") == ["02, code cell 1: 2 only in the edition"]


@pytest.mark.parametrize("said", ["{b} waits", "{a", "{a} {a} waits", "waits"])
def test_a_translation_that_would_be_other_code_is_refused(said):
    with pytest.raises(translate.Broken, match="waits" if "waits" in said else "a"):
        translate.formatted(said, "{a} waits")


def test_words_of_code():
    source = (
        '"""A docstring."""\n%matplotlib inline\n'
        "names = {'key': f\"xx{{y}} {', '.join('ab') or 'no thing'}\", 'ab cd': \"it's\", 'ms': f'{1e3 * 5:.0f} ms'}\n"
        "axes.set(loc='center', xlabel='seconds')  # fmt: skip\n# @title Draw it { display-mode: \"form\" }\n"
    )
    words = {
        "xx{{y}} {', '.join('ab') or 'no thing'}": "{', '.join('ab') or '\"q\"'} z{{",
        "ab cd": "c'd\"",
        "{1e3 * 5:.0f} ms": "MS {1e3 * 5:.0f}",
        "Draw it": "D",
    }
    said = []
    new = translate.python(source, lambda text: (said.append(text), words.get(text, text))[1], comments=True)
    assert said == ["xx{{y}} {', '.join('ab') or 'no thing'}", "ab cd", "{1e3 * 5:.0f} ms", "seconds", "Draw it"]
    assert new.endswith('# @title D { display-mode: "form" }\n') and "%matplotlib inline" in new
    names = {}
    exec(new.splitlines()[2], names)
    assert names["names"] == {"key": "a, b z{", "c'd\"": "it's", "ms": "MS 5000"}
    assert ast.parse(new.replace("%matplotlib inline", ""))


def test_blocks_of_every_kind():
    source = (
        "## A *b*\n\n- one\n  two\n- three\n\n> said\n> so\n\n| a | b | a |\n| --- | --- | --- |\n| c | d | c |\n\n"
        "```python\none\n```\n\n<details><summary>Why?</summary>\n\nthree\n\n</details>\n\n```{toctree}\nthree\n```\n"
    )
    words = {"A *b*": "X", "one two": "Y", "said so": "Z", "c": "C", "three": "3", "one": "no", "Why?": "WHY"}
    text = translate.markdown(source, lambda block: words.get(block, block))
    assert text == (
        "## X\n\n- Y\n- 3\n\n> Z\n\n| a | b | a |\n| --- | --- | --- |\n| C | d | C |\n\n"
        "```python\none\n```\n\n<details><summary>WHY</summary>\n\n3\n\n</details>\n\n```{toctree}\nthree\n```\n"
    )
    assert translate.markdown(source, str) == source
