"""A lesson as the site's page: what a notebook shows by itself and a page does not is put into words and files."""

import base64
import copy
import html
import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import series
from nbformat.v4 import new_markdown_cell, new_output

PICTURES = "pictures"


def cover(stem: str) -> str:
    """Where the site has the lesson's picture for the table of lessons."""
    return f"_static/{PICTURES}/{stem}.png"


def made_of(notebook, stem: str, static: Path, colab: str, onward: Callable[[str, str], str]) -> nbformat.NotebookNode:
    """The page of an executed notebook; its pictures become files below `static`. onward: a text with its links as the site has them."""
    folder = static / PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    if picture := series.summary(notebook).picture:
        (folder / f"{stem}.png").write_bytes(base64.b64decode(picture))
    page = copy.deepcopy(notebook)
    cells, count = [], 0
    for cell in page.cells:
        cells.append(cell)
        if cell.cell_type == "markdown":
            cell.source = onward(
                re.sub(r"\[!\[(.+?)\]\(.+?\)\]", r"[\1]", cell.source), series.NOTEBOOKS.name
            )  # a badge's words do
            continue
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            fold(cell)
        for index, output in enumerate(cell.outputs):
            if "image/png" in output.get("data", {}) and "text/html" not in output.data:  # a slider has both
                count += 1
                cell.outputs[index] = picture_file(output, folder, f"{stem}-{count}.png")
        if "prediction" in series.tags(cell):
            words = f"[Open in Colab]({colab}) to write your answer down before you see the result."
            cells.append(new_markdown_cell("{.predict}\n" + words))
    page.cells = cells
    page.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return page


def fold(cell) -> None:
    """What is folded in JupyterLab is folded on the page, under its title: solutions, drawings, the set-up."""
    title = re.match(r"# @title (.+?) \{.*\}\n", cell.source)
    cell.metadata = {"tags": [*series.tags(cell), "hide-input"]}
    if title:
        cell.metadata["mystnb"] = {"code_prompt_show": title[1], "code_prompt_hide": title[1]}
        cell.source = cell.source[title.end() :]


def picture_file(output, folder: Path, name: str):
    """The same output with its picture as a file, its words as the alternative text, and its width."""
    (folder / name).write_bytes(base64.b64decode(output.data["image/png"]))
    facts = output.metadata.get("image/png", {})
    words, width = html.escape(facts.get("alt", ""), quote=True), facts.get("width")
    size = f' width="{width}"' if width else ""
    image = f'<img src="../_static/{folder.name}/{name}" alt="{words}"{size} loading="lazy">'
    return new_output("display_data", {"text/html": image, "text/plain": facts.get("alt", "")})
