"""Where the series' files are, and what a notebook says of itself: read here once for the runner, the pages and the guards."""

import contextlib
import html
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"
LONGEST = (
    "12",
    "05",
    "07",
    "09",
    "10",
    "08",
    "01",
    "04",
    "11",
    "03",
    "06",
    "02",
)  # by the time that their processes take together
TAGS = {
    "bootstrap", "cover", "exercise", "solution", "folded", "prediction", "nbval-ignore-output", "raises-exception",
}  # fmt: skip


def settings() -> dict[str, str]:
    """The repository's name and the tag, from pyproject.toml."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["tool"]["series"]


def marked(page: str, name: str, tool: str, text: str) -> str:
    """The page with this text between its marks, which say what writes it."""
    begin, end = f"<!-- {name}: written by tools/{tool}.py -->\n", f"<!-- {name} end -->"
    before, rest = page.split(begin)
    return "".join([before, begin, text, "\n", end, rest.split(end)[1]])


def notebooks() -> list[Path]:
    """The lessons in the order of reading, which is that of their numbers."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def longest_first(paths: list[Path]) -> list[Path]:
    """One that LONGEST does not know yet comes first."""
    return sorted(paths, key=lambda path: LONGEST.index(path.name[:2]) if path.name[:2] in LONGEST else -1)


def read(path: Path) -> nbformat.NotebookNode:
    """Raises ValueError, naming the file, where it is no notebook."""
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)  # to read an invalid one, nbformat logs a line and goes on
        return notebook
    except Exception as error:  # its own, json's, jsonschema's, the system's, AttributeError for a list
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is no notebook: {why}. Restore it (git checkout), then run it again") from error


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In this block nobody else of this checkout writes below build/: who is second waits. A killed process lets go of its lock."""
    BUILD.mkdir(exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows: one at a time is up to the user
        yield
        return
    number = os.open(BUILD, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another run works in this folder: this one begins when that has ended.", flush=True)
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


@dataclass
class Summary:
    """What the front page shows of a notebook."""

    title: str
    teaches: list[str]
    builds: str  # what the reader has made at its end
    gpus: int  # so many real ones it uses, where they are there
    level: str  # beginner, intermediate or advanced
    needs: str  # what the reader has read before, with links
    runs: str  # how long the machine takes
    note: str
    picture: str | None  # PNG, base64
    picture_says: str  # what it shows, as `cover` in the facts has it; otherwise its title


def summary(notebook) -> Summary:
    """The facts of the lesson's text, and the picture of the cell tagged `cover`, or the first one. Without facts, the title alone."""
    facts = notebook.metadata.get("lesson", {})
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = re.search(r"^# (.+)$", prose, re.M)
    found = [("cover" not in tags(cell), *one) for cell in code_cells(notebook) for one in pictures(cell)]
    _, picture, says = min(found, key=lambda one: one[0], default=(None, None, ""))
    return Summary(
        title=title[1] if title else "Untitled",
        teaches=list(facts.get("goals", {}).values()),
        gpus=facts.get("gpus", 0),
        **{name: facts.get(name, "") for name in ("builds", "level", "needs", "runs", "note")},
        picture=picture,
        picture_says=facts.get("cover", says),
    )


def pictures(cell) -> list[tuple[str, str]]:
    """(PNG in base64, its words) of each picture that a cell shows; of a slider the one that is seen first; a folded one, too."""
    found = []
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            found.append((data["image/png"], output.metadata.get("image/png", {}).get("alt", "")))
        else:
            found += [(png, html.unescape(alt)) for alt, png in IMAGE.findall(data.get("text/html", ""))]
    return found


def said(cell) -> str:
    """What a cell printed and returned, and the words of its pictures, folded or not."""
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        texts += [output.get("text", ""), data.get("text/plain", "")]
        texts.append(html.unescape(re.sub(r"<[^>]*>", "", data.get("text/html", ""))))
    return "\n".join(texts + [words for _, words in pictures(cell)])


IMAGE = re.compile(r'<img alt="([^"]*)"[^>]* src="data:image/png;base64,([A-Za-z0-9+/=]+)"')
