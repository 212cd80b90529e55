"""A lesson as the site's page: what a notebook shows by itself and a page does not is put into words and files."""

import base64
import copy
import html
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import series
from nbformat.v4 import new_output

PICTURES = "pictures"
PAGE = 105  # columns of a line that is whole from 800 pixels on (docs/_static/series.css)


def cover(stem: str) -> str:
    """Where the site has the lesson's picture for the table of lessons."""
    return f"_static/{PICTURES}/{stem}.png"


def made_of(notebook, stem: str, static: Path, onward: Callable[[str, str], str]) -> nbformat.NotebookNode:
    """The page of an executed notebook; its pictures become files below `static`. onward: a text with its links as the site has them."""
    folder = static / PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    if picture := series.summary(notebook).picture:
        (folder / f"{stem}.png").write_bytes(base64.b64decode(picture))
    page = copy.deepcopy(notebook)
    names = (f"{stem}-{number}.png" for number in itertools.count(1))
    for cell in page.cells:
        if cell.cell_type == "markdown":
            badges_as_buttons = re.sub(r"\[!\[(.+?)\]\(.+?\)\](\(.+?\))", r"[\1]\2{.open-in}", cell.source)
            cell.source = onward(badges_as_buttons, series.NOTEBOOKS.name)
            continue
        if "exercise" in series.tags(cell) and "[not yet]" in str(cell.outputs):
            cell.outputs = []  # the grader's word to who has not begun
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            fold(cell)
        if columns := columns_of(cell):
            cell.metadata["tags"] = [*series.tags(cell), "columns" if columns <= PAGE else "wide-columns"]
        for index, output in enumerate(cell.outputs):
            if "cover" in series.tags(cell) and "image/png" in output.get("metadata", {}):
                output.metadata["image/png"]["alt"] = series.summary(notebook).picture_says
            if "text/html" in output.get("data", {}):
                output.data.pop("image/png", None)
                output.data["text/html"] = with_files(output.data["text/html"], folder, names)
            elif "image/png" in output.get("data", {}):
                cell.outputs[index] = picture_file(output, folder, next(names))
    page.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return page


def fold(cell) -> None:
    """What is folded in JupyterLab is folded on the page, under its title: drawings, the set-up; solutions with what they show."""
    title = re.match(r"# @title (.+?) \{.*\}\n", cell.source)
    whole = "solution" in series.tags(cell) and cell.outputs
    cell.metadata = {"tags": [*series.tags(cell), "hide-cell" if whole else "hide-input"]}
    if title:
        cell.metadata["mystnb"] = {"code_prompt_show": title[1], "code_prompt_hide": title[1]}
        cell.source = cell.source[title.end() :]


def columns_of(cell) -> int:
    """The length of the longest printed line that has columns, 0 if none has: docs/_static/series.css breaks other lines at the page's edge."""
    printed = nbformat.v4.new_code_cell(outputs=[output for output in cell.outputs if output.output_type != "error"])
    return max((len(line) for line in series.said(printed).splitlines() if re.search(r"\S {2,}\S", line)), default=0)


def picture_file(output, folder: Path, name: str):
    """The same output with its picture as a file, its words as the alternative text, and its width."""
    (folder / name).write_bytes(base64.b64decode(output.data["image/png"]))
    facts = output.metadata.get("image/png", {})
    words, width = html.escape(facts.get("alt", ""), quote=True), facts.get("width")
    size = f' width="{width}"' if width else ""
    image = f'<img src="../_static/{folder.name}/{name}" alt="{words}"{size} loading="lazy">'
    return new_output("display_data", {"text/html": image, "text/plain": facts.get("alt", "")})


def with_files(text: str, folder: Path, names: Iterator[str], up: str = "../") -> str:
    """The same HTML with its pictures as files: of sliders, of folded answers. up: from its page to the site's first."""

    def file(match: re.Match) -> str:
        name = next(names)
        (folder / name).write_bytes(base64.b64decode(match[1]))
        return f'loading="lazy" src="{up}_static/{folder.name}/{name}"'

    return EMBEDDED.sub(file, text)


EMBEDDED = re.compile(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"')
