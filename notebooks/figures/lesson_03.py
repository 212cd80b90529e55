"""Schedules on paper, each stage with what it holds."""

from collections.abc import Mapping, Sequence

from checks.notebook_03 import held
from helpers import plots
from virtualgpu import Timeline


def schedules(tables: Mapping[str, Sequence[Sequence[str | None]]], title: str) -> None:
    """{name: table}, below each other; beside a stage how many micro-batches it holds at most, from their forward to their backward."""
    drawn = {}
    for name, table in tables.items():
        timeline = Timeline.of_slots(table)
        names = [f"{stage}, holds {held(row)}" for stage, row in zip(timeline.rows, table, strict=True)]
        rows = dict(zip(names, timeline.rows.values(), strict=True))
        drawn[name] = Timeline(rows, timeline.seconds, timeline.origin)
    plots.timelines(drawn, title, xlabel="slots")
