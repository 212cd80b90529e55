"""The course in another language, from the same sources: an edition is a checkout whose words are others, with the same code and numbers.

    translate.py update ko 02    catalogues of lesson 02 and of what all lessons share, under locales/ko/; what has changed is marked fuzzy
    translate.py build ko 02     the edition under build/ko/, lesson 02 executed there, and its site: build/ko/build/site/index.html

A catalogue (gettext's .po, edited by hand or in any tool for it) holds paragraphs, and of Python what a reader sees: comments of cells,
and texts in quotes (printed lines, figures' titles, graders' words). What has no translation, or a fuzzy one, stays as it is; so leave a name
that code needs empty ("cuda:0"), keep what stands in braces, and keep `[passed]`, `[not yet]` and `(measured)`, which tools look for.
locales/ko/files/ is copied over the edition: a font that has the language's letters goes to helpers/plots/.
"""

import argparse
import ast
import copy
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import lesson_text
import nbformat
import series
import stamp
from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po
from markdown_it import MarkdownIt

LOCALES = "locales"
SHARED = "shared"  # the catalogue of what several lessons say, and of these files
SHARED_FILES = (
    "helpers/*.py", "helpers/plots/*.py", "checks/grader.py",
    "tools/website.py", "tools/lesson_page.py", "docs/conf.py", "docs/index.md", "docs/start.md",
)  # fmt: skip
LEFT_OUT = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info", LOCALES)
MARKDOWN = MarkdownIt("commonmark").enable("table")
WORDS_OF_DIRECTIVE = re.compile(
    r'^\s*(?:[:`]{3,}\{(?:grid-item-card|tab-item)\} |:caption: |"?(?:property=og:)?description"?: ")(.+?)"?$'
)
NO_PROSE = {"toctree", "raw", "include", "code-cell"}  # directives
SUMMARY = re.compile(r"<summary>(.+?)</summary>")
TITLE = re.compile(r"# @title (.+?) \{")  # of a folded cell
SHOWN = {"xlabel", "ylabel", "label", "title", "origin", "unit", "desc"}  # arguments that are words of a figure
HEADER = {"project": "Beyond One GPU", "version": "2026", "copyright_holder": "the Beyond One GPU authors"}

Say = Callable[[str], str]  # words in the edition's language, or the same ones


class Broken(ValueError):
    """A translation that would be other code."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["update", "build"])
    parser.add_argument("language", help="ko, de, ...")
    parser.add_argument("only", nargs="*", help="the beginning of a lesson's name: 02")
    options = parser.parse_args(arguments)
    chosen = [path for path in series.notebooks() if not options.only or path.name.startswith(tuple(options.only))]
    if options.what == "update":
        update(chosen, options.language)
        return 0
    try:
        missing = write(chosen, options.language)
    except (Broken, FileNotFoundError) as error:
        print(error)
        return 2
    for name, number in missing.items():
        print(f"{name}: {number} texts in English" if number else f"{name}: whole")
    return run(chosen, options.language)


# ---- what is said, and saying it otherwise ----


def blocks(source: str) -> Iterator[tuple[int, int, str]]:
    """(first line, line after the last, words) of each heading, paragraph, list item, table cell and folded title of a text."""
    for token in MARKDOWN.parse(without_directives(source)):
        if token.type == "inline" and token.map and token.content.strip():
            yield (*token.map, " ".join(token.content.split()))
        elif token.type == "html_block" and (found := SUMMARY.search(token.content)):
            yield (*token.map, found[1])
    for number, line in enumerate(source.split("\n")):
        if found := WORDS_OF_DIRECTIVE.match(line):
            yield number, number + 1, found[1]


def without_directives(source: str) -> str:
    """A page with its front matter and MyST's own lines empty, which are no paragraphs; what stands between them is prose."""
    lines = re.sub(r"^---\n.*?\n---\n", lambda head: "\n" * head[0].count("\n"), source, flags=re.S).split("\n")
    closed_by = None  # in a block of code, or in a directive without prose
    for number, line in enumerate(lines):
        fence = re.match(r"\s*(`{3,}|:{3,})(?:\{([\w-]+)\})?", line)
        if closed_by:
            code, end = closed_by
            if line.strip() == end:
                closed_by = None
            if code:
                continue
        elif fence and (not fence[2] and line.strip() != fence[1]):
            closed_by = True, fence[1]
            continue
        elif fence and fence[2] in NO_PROSE:
            closed_by = False, fence[1]
        elif not fence and not re.match(r"\s*:[\w-]+:", line):
            continue
        lines[number] = ""
    return "\n".join(lines)


def markdown(source: str, say: Say) -> str:
    """The text with its words as `say` has them."""
    places: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for first, end, words in blocks(source):
        places.setdefault((first, end), []).append((words, say(words)))
    lines = source.split("\n")
    for (first, end), several in sorted(places.items(), reverse=True):  # so that the lines before keep their numbers
        text, at = "\n".join(lines[first:end]), 0
        for words, said in several:  # the cells of a table's row, from the left
            pattern = r"[\s>]+".join(map(re.escape, words.split()))  # line breaks and indents may differ
            if found := re.compile(pattern).search(text, at):
                said = found[0] if said == words else said
                text, at = text[: found.start()] + said + text[found.end() :], found.start() + len(said)
        lines[first:end] = text.split("\n")
    return "\n".join(lines)


class Words(NamedTuple):
    """What a reader sees of a piece of Python: source[start:end] is a literal, or a comment's text."""

    start: int
    end: int
    text: str
    written: Callable[[str], str]  # a translation as source


def python(source: str, say: Say, comments: bool = False) -> str:
    """The code with its words as `say` has them. Raises Broken where that would be other code."""
    both = [(words, say(words.text)) for words in sorted(words_of(source, comments))]
    for words, said in reversed(both):
        if said != words.text:
            source = source[: words.start] + words.written(said) + source[words.end :]
    return source


def words_of(source: str, comments: bool) -> list[Words]:
    """The texts in quotes that are words, and of a cell its comments."""
    source = re.sub(r"^[%!].*", lambda line: "0".ljust(len(line[0])), source, flags=re.M)  # IPython's own lines
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines() or [""]

    def place(row: int, column: int) -> int:  # ast counts bytes
        return starts[row - 1] + len(lines[row - 1].encode()[:column].decode())

    found = []
    for node in literals(ast.parse(source)):
        where = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        if isinstance(node, ast.Constant):
            found.append(Words(*where, node.value, lambda said: quoted(repr(said))))
        else:
            text = template(node)
            found.append(Words(*where, text, lambda said, text=text: formatted(said, text)))
    for token in tokenize.generate_tokens(io.StringIO(source).readline) if comments else ():
        if token.type == tokenize.COMMENT:
            start = starts[token.start[0] - 1] + token.start[1]
            title = TITLE.match(token.string)
            text = title[1] if title else token.string.lstrip("# ")
            at = start + token.string.index(text) if text else start
            if re.search(r"[A-Za-z]{2}", text) and not token.string.startswith(("# fmt", "# noqa", "# type")):
                found.append(Words(at, at + len(text), text, str))
    return found


def literals(tree: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Phrases; single words where they are values (not keys, and not options of a call)."""
    skipped, single = set(), set()  # single: of these, phrases only
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)  # a docstring
        elif isinstance(node, ast.JoinedStr | ast.FormattedValue):
            skipped.update(child for child in ast.walk(node) if child is not node)
        elif isinstance(node, ast.Dict):
            single.update(node.keys)
        elif isinstance(node, ast.Subscript):
            single.add(node.slice)
        elif isinstance(node, ast.Call):
            single.update(keyword.value for keyword in node.keywords if keyword.arg not in SHOWN)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            plain = "".join(part.value for part in node.values if isinstance(part, ast.Constant))
            if re.search(r"[A-Za-z]{2}", plain) and " " in plain.strip("\n") and not re.match(r"\s*<", plain):
                yield node
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            phrase = re.search(r"[A-Za-z]{2}", node.value) and re.search(r"\S[ \n]\S", node.value)
            if phrase or (re.fullmatch(r"[A-Za-z-]{3,}:?", node.value) and node not in single):
                yield node


def template(node: ast.JoinedStr) -> str:
    """An f-string's text as it is written, whatever its quotes."""
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(part.value.replace("{", "{{").replace("}", "}}"))
        else:
            parts.append(re.sub(r"^f('''|\"\"\"|'|\")(.*)\1$", r"\2", unparsed(ast.JoinedStr([part])), flags=re.S))
    return "".join(parts)


def unparsed(node: ast.AST) -> str:
    """As source, with 1e9 where Python writes nine noughts."""
    return re.sub(r"\b(\d{1,3})((?:000)+)\.0\b", lambda found: f"{found[1]}e{len(found[2])}", ast.unparse(node))


def quoted(literal: str) -> str:
    """In double quotes, as all code here, where there are no quotes within."""
    return re.sub(r"^(f?)'(?!')([^'\"]*)'$", r'\1"\2"', literal)


def formatted(said: str, text: str) -> str:
    """A translated f-string as source. Raises Broken where its braces hold something else (a text in quotes may be translated)."""
    try:
        now, before = (ast.parse(f"rf'''{one} '''", mode="eval").body for one in (said, text))
    except SyntaxError as error:
        raise Broken(f"{said!r}: {error.msg}") from None
    if values(now) != values(before):
        raise Broken(f"{said!r}: in braces stands something else than in {text!r}")
    now.values[-1].value = now.values[-1].value[:-1]  # the space, which parts the text's last quote from ours
    return quoted(unparsed(now))


def values(node: ast.JoinedStr) -> Counter:
    """The code in an f-string's braces, without its own texts."""

    def bare(value: ast.AST) -> str:
        value = copy.deepcopy(value)
        for child in ast.walk(value):
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                child.value = ""
        return ast.dump(value)

    return Counter(bare(value) for value in node.values if isinstance(value, ast.FormattedValue))


def lesson(notebook: nbformat.NotebookNode, say: Say) -> nbformat.NotebookNode:
    """The lesson with its facts, prose and words of code as `say` has them, without outputs."""
    notebook = copy.deepcopy(notebook)
    minutes = stamp.minutes(notebook)
    notebook.metadata["lesson"] = {**facts(notebook.metadata.get("lesson", {}), say), "minutes": minutes}
    for cell in notebook.cells:
        cell.source = (
            markdown(cell.source, say) if cell.cell_type == "markdown" else python(cell.source, say, comments=True)
        )
    for cell in series.code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    return notebook


def facts(fact, say: Say):
    if isinstance(fact, Mapping):
        return {name: facts(value, say) for name, value in fact.items()}
    return say(fact) if isinstance(fact, str) else fact


# ---- catalogues ----


def collected(path: Path) -> list[str]:
    """What a file says, in its order."""
    said: list[str] = []

    def listen(words: str) -> str:
        said.append(words)
        return words

    translated(path, listen)
    return [*dict.fromkeys(said)]


def translated(path: Path, say: Say) -> str | nbformat.NotebookNode:
    """A file of the project as `say` has it: a lesson (as a notebook), a page, a module."""
    if path.suffix == ".ipynb":
        return lesson(lesson_text.paired(path), say)
    source = path.read_text(encoding="utf-8")
    return markdown(source, say) if path.suffix == ".md" else python(source, say)


def files_of(notebook: Path) -> list[Path]:
    """A lesson's own: the notebook, its figures, its graders."""
    number = notebook.name[:2]
    own = series.NOTEBOOKS / "figures" / f"lesson_{number}.py", series.ROOT / "checks" / f"notebook_{number}.py"
    return [notebook, *(path for path in own if path.exists())]


def shared_files() -> list[Path]:
    return [path for pattern in SHARED_FILES for path in sorted(series.ROOT.glob(pattern))]


def update(chosen: list[Path], language: str) -> None:
    """Bring the catalogues up to the sources: new texts are added, changed ones are fuzzy, those that are gone are kept at the end."""
    said = {path: {file: collected(file) for file in files_of(path)} for path in series.notebooks()}
    times = Counter(text for files in said.values() for text in {text for texts in files.values() for text in texts})
    shared = {file: collected(file) for file in shared_files()}
    of_all = {text for texts in shared.values() for text in texts} | {text for text, n in times.items() if n > 1}
    for path in chosen:
        own = {file: [text for text in texts if text not in of_all] for file, texts in said[path].items()}
        bring_up(catalogue_file(path.stem, language), own, language)
        for file, texts in said[path].items():
            shared.setdefault(file, [text for text in texts if text in of_all])
    bring_up(catalogue_file(SHARED, language), shared, language)


def bring_up(file: Path, said: Mapping[Path, list[str]], language: str) -> None:
    known: dict[str, str] = {}  # by another catalogue, too: where a second lesson says the same, it is shared
    for other in file.parent.glob("*.po"):
        known |= catalogue(other.stem, language)
    new = Catalog(locale=language, **HEADER)
    for path, texts in said.items():
        for text in texts:
            new.add(text, known.get(text, ""), locations=[(path.relative_to(series.ROOT).as_posix(), None)])
    old = read_po(file.open("rb"), locale=language) if file.exists() else Catalog(locale=language, **HEADER)
    old.update(new)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        write_po(stream, old, width=0, include_lineno=False)
    bare = sum(not entry.string for entry in old if entry.id)
    stale = sum(entry.fuzzy for entry in old if entry.id)
    print(f"{file.relative_to(series.ROOT)}: {len(old)} texts, {bare} without a translation, {stale} fuzzy")


def catalogue_file(name: str, language: str) -> Path:
    return series.ROOT / LOCALES / language / f"{name}.po"


def catalogue(name: str, language: str) -> dict[str, str]:
    """The translations that hold: there, and not fuzzy. Raises FileNotFoundError, naming the cure."""
    file, number = catalogue_file(name, language), "" if name == SHARED else name[:2]
    if not file.exists():
        raise FileNotFoundError(
            f"{file.relative_to(series.ROOT)} is not there: python -m tools.translate update {language} {number} makes it"
        )
    with file.open("rb") as stream:
        return {entry.id: entry.string for entry in read_po(stream) if entry.id and entry.string and not entry.fuzzy}


# ---- an edition ----


def write(chosen: list[Path], language: str) -> dict[str, int]:
    """Make build/<language>/, a checkout with these lessons in that language. Returns how many paragraphs of each are English."""
    own = {path: catalogue(path.stem, language) for path in chosen}
    shared = catalogue(SHARED, language)
    edition = series.BUILD / language
    shutil.rmtree(edition, ignore_errors=True)
    shutil.copytree(series.ROOT, edition, ignore=LEFT_OUT)
    if (files := series.ROOT / LOCALES / language / "files").exists():
        shutil.copytree(files, edition, dirs_exist_ok=True)
    for file in shared_files():
        (edition / file.relative_to(series.ROOT)).write_text(translated(file, say_of(shared)), encoding="utf-8")
    conf = edition / "docs" / "conf.py"
    conf.write_text(conf.read_text("utf-8").replace('language = "en"', f'language = "{language}"'), encoding="utf-8")
    missing = {}
    for path, words in own.items():
        known = shared | words
        for file in files_of(path):
            said, target = translated(file, say_of(known)), edition / file.relative_to(series.ROOT)
            if isinstance(said, str):
                target.write_text(said, encoding="utf-8")
            else:
                nbformat.write(said, target)
                lesson_text.text_of(target).write_text(lesson_text.written(said), encoding="utf-8")
        prose = [cell.source for cell in series.read(path).cells if cell.cell_type == "markdown"]
        missing[path.stem] = sum(words not in known for source in prose for *_, words in blocks(source))
    return missing


def say_of(known: Mapping[str, str]) -> Say:
    return lambda words: known.get(words, words)


def run(chosen: list[Path], language: str) -> int:
    """Execute the edition's lessons, build its site, and say where a number is another than in English: the exit status."""
    edition = series.BUILD / language
    command = [sys.executable, "-m", "tools.run", *(path.name[:2] for path in chosen)]
    if status := subprocess.run(command, cwd=edition, env={**os.environ, "PYTHONPATH": str(edition)}).returncode:
        return status
    for line in (other := other_numbers(chosen, edition)):
        print(line)
    print(
        f"{edition.relative_to(series.ROOT)}: {'other numbers' if other else 'every number is that of the English edition'}"
    )
    return int(bool(other))


def other_numbers(chosen: list[Path], edition: Path) -> list[str]:
    """A line for each cell whose output has other numbers than the English lesson's; measured ones may be others."""
    said = []
    for path in chosen:
        both = series.read(path), series.read(edition / "build" / path.name)
        for number, cells in enumerate(zip(*map(series.code_cells, both), strict=True), 1):
            english, here = map(numbers, cells)
            where = {"English": english - here, "the edition": here - english}
            only = [f"{', '.join(found)} only in {name}" for name, found in where.items() if found]
            if only and "nbval-ignore-output" not in series.tags(cells[0]):
                said.append(f"{path.name[:2]}, code cell {number}: {'; '.join(only)}")
    return said


def numbers(cell) -> Counter:
    """Those that a cell shows."""
    return Counter(re.findall(r"\d+(?:[.,]\d+)*", series.said(cell)))


if __name__ == "__main__":
    sys.exit(main())
