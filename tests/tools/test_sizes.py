"""The engine's rooms: imports go down the table of its guide, and never in a circle."""

import re

import series
import sizes


def test_no_circle_of_rooms_or_of_files():
    graph = sizes.imports(series.ROOT / "virtualgpu")
    assert len(graph) > 100 and sum(map(len, graph.values())) > 300
    assert (sizes.circle(graph), sizes.circle(sizes.rooms(graph))) == ([], [])


def test_imports_go_down_the_table():
    guide = (series.ROOT / "virtualgpu" / "docs" / "contributing.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.+?) \|", guide, re.M)
    place = {name.strip("/"): number for number, row in enumerate(rows) for name in re.findall(r"`([\w/]+)`", row)}
    assert {"run", "torch_api", "hardware", "timeline"} <= set(place)
    graph = sizes.rooms(sizes.imports(series.ROOT / "virtualgpu"))
    up = [
        f"{name} imports {other}"
        for name in place
        for other in graph[name]
        if other in place and place[other] < place[name]
    ]
    assert up == []


def test_a_circle_is_named():
    assert sizes.circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})[0] in "abc"
