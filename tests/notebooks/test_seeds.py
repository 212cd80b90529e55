"""Each topic and snippet of the lecture notes has its place: seeds.md says where, and there it worked."""

import re
from pathlib import Path

import pytest
import series

TABLE = Path(__file__).with_name("seeds.md").read_text("utf-8")
ROWS = re.findall(r"^\| (?!topic)([^|]+?) \| (\d\d) \| (.+?) \| `([^|]+)` \| `([^|]+)` \|$", TABLE, re.M)
REFUSED = ("NotImplementedError", "not installed", "[not yet]")


def section(number: str, heading: str) -> list:
    """The cells under that heading, up to the next one of the same or a higher level."""
    (path,) = (path for path in series.notebooks() if path.name.startswith(number))
    level, cells = 0, []
    for cell in series.read(path).cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^(#+) (.+)$", cell.source, re.M)):
            if found[2] == heading or re.search(rf"^#+ {re.escape(heading)}$", cell.source, re.M):
                level = len(found[1])
            elif level and len(found[1]) <= level:
                break
        if level:
            cells.append(cell)
    return cells


def test_the_table_is_read_whole():
    assert len(ROWS) == len(re.findall(r"^\|", TABLE, re.M)) - 2
    beyond = {"10", "11", "12"}  # of which the lecture notes say nothing
    assert {row[1] for row in ROWS} == {path.name[:2] for path in series.notebooks()} - beyond


@pytest.mark.parametrize("topic, number, heading, words, shown", ROWS, ids=[row[0] for row in ROWS])
def test_a_topic_has_a_cell_that_worked(topic, number, heading, words, shown):
    """A cell of code that holds the words, and whose own output holds what it should show."""
    cells = section(number, heading)
    assert cells, f"notebook {number} has no section {heading!r}"
    holding = [series.said(cell) for cell in cells if cell.cell_type == "code" and words in cell.source]
    assert holding, f"no cell with code of {heading!r} holds {words!r}"
    assert not any(word in shown for word in REFUSED), "a refusal shows nothing"
    assert any(shown in text for text in holding), f"{words!r} shows {holding}, not {shown!r}"
