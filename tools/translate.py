"""Lessons in another language, from the same notebooks: prose from a catalogue of gettext, code and outputs byte for byte the same.

    translate.py update ko      locales/ko/NN_name.po of every lesson; a paragraph that has changed is marked fuzzy
    translate.py write ko 03    build/ko/03_name.ipynb; what is not translated, or fuzzy, stays in English

Catalogues are edited by hand or in any tool for .po files. No translation is kept here yet.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
import series
import website
from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po
from markdown_it import MarkdownIt

LOCALES = "locales"
MARKDOWN = MarkdownIt("commonmark").enable("table")  # the blocks that Sphinx's gettext sees


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["update", "write"])
    parser.add_argument("language", help="ko, de, ...")
    parser.add_argument("only", nargs="*", help="the beginning of a notebook's name: 03")
    options = parser.parse_args(arguments)
    paths = [path for path in series.notebooks() if not options.only or path.name.startswith(tuple(options.only))]
    if options.what == "update":
        with series.alone():
            update(paths, options.language)
        return 0
    for path in paths:
        file = catalogue_file(path, options.language)
        if not file.exists():
            print(f"{file.relative_to(series.ROOT)} is not there: translate.py update {options.language} makes it")
            return 2
        target = series.BUILD / options.language / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        translated, missing = translate(series.read(path), messages(file))
        nbformat.write(translated, target)
        print(f"{target.relative_to(series.ROOT)}: {missing} paragraphs in English")
    return 0


def catalogue_file(path: Path, language: str) -> Path:
    return series.ROOT / LOCALES / language / f"{path.stem}.po"


def update(paths: list[Path], language: str) -> None:
    """Bring the catalogues of a language up to the notebooks: new paragraphs are added, changed ones are fuzzy."""
    folder = website.catalogues(paths)
    for path in paths:
        template = read_po((folder / f"{path.stem}.pot").open("rb"))
        file = catalogue_file(path, language)
        file.parent.mkdir(parents=True, exist_ok=True)
        catalogue = read_po(file.open("rb"), locale=language) if file.exists() else Catalog(locale=language)
        catalogue.update(template)
        with file.open("wb") as stream:
            write_po(stream, catalogue, width=0, omit_header=False)
        stale = sum(message.fuzzy for message in catalogue if message.id)
        print(f"{file.relative_to(series.ROOT)}: {len(catalogue)} paragraphs, {stale} fuzzy")


def messages(file: Path) -> dict[str, str]:
    """The translations of a catalogue that hold: there, and not fuzzy."""
    with file.open("rb") as stream:
        return {entry.id: entry.string for entry in read_po(stream) if entry.id and entry.string and not entry.fuzzy}


def translate(notebook, translations: Mapping[str, str]) -> tuple[nbformat.NotebookNode, int]:
    """The notebook with its prose in other words, and how many paragraphs have none. Code cells and outputs are not touched."""
    missing = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source, without = translate_markdown(cell.source, translations)
            missing += without
    return notebook, missing


def translate_markdown(source: str, translations: Mapping[str, str]) -> tuple[str, int]:
    """Block by block, from the last on, so that the lines before keep their numbers."""
    lines, missing = source.split("\n"), 0
    for token in reversed(MARKDOWN.parse(source)):
        if token.type != "inline" or not token.map or not token.content.strip():
            continue
        words = translations.get(" ".join(token.content.split()))
        if words is None:
            missing += 1
            continue
        first, end = token.map
        block = "\n".join(lines[first:end])
        pattern = r"\s+".join(
            re.escape(word) for word in token.content.split()
        )  # its line breaks and indents may differ
        lines[first:end] = re.sub(pattern, lambda _, words=words: words, block, count=1).split("\n")
    return "\n".join(lines), missing


if __name__ == "__main__":
    sys.exit(main())
