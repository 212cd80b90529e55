"""The rows as text, and as the READMEs' tables."""

from pathlib import Path

from tests.accuracy.row import Row

BEGIN, END = "<!-- accuracy: written by make accuracy -->", "<!-- accuracy ends -->"
HEADER = ("what", "published (measured by others)", "simulated", "difference")
SHORT = ("memory", "ratio", "count")  # what the front page shows; speeds are in the longer table


def figure(row: Row, value: float) -> str:
    if row.kind == "ratio":
        return f"{value:.3f}"
    return f"{value:,.0f} {row.unit}".strip() if value >= 300 or row.kind == "count" else f"{value:.2f} {row.unit}"


def told(row: Row) -> tuple[str, str, str, str]:
    verdict = {True: "", False: " (missed)", None: ""}[row.met]
    return row.what, figure(row, row.published), figure(row, row.simulated), row.told() + verdict


def plain(rows: list[Row]) -> str:
    """For a terminal, with the source of each group."""
    lines, widths = [], [max(len(told(row)[i]) for row in rows) for i in range(4)]
    source = None
    for row in rows:
        if row.source != source:
            source = row.source
            lines.append(f"\n{source}  {row.url}")
        cells = told(row)
        note = f"  {row.note}" if row.note else ""
        lines.append(f"  {cells[0]:<{widths[0]}}  {cells[1]:>{widths[1]}}  {cells[2]:>{widths[2]}}  {cells[3]}{note}")
    judged = [row for row in rows if row.met is not None]
    lines.append(f"\n{sum(row.met for row in judged)} of {len(judged)} within their targets; the others say missed")
    return "\n".join(lines)


def markdown(rows: list[Row]) -> str:
    """One table, each group with its source."""
    lines = [f"| {' | '.join(HEADER)} |", "|---|---|---|---|"]
    source = None
    for row in rows:
        if row.kind == "cost":
            continue
        cells = list(told(row))
        if row.source != source:
            source = row.source
            cells[0] = f"{cells[0]} ([source]({row.url.split()[0]}))"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speed_sentence(rows: list[Row]) -> str:
    factors = sorted(row.difference for row in rows if row.kind in ("speed", "time"))
    return (
        f"In speed, what was measured is {factors[0]:.2f} to {factors[-1]:.2f} of what is simulated: the simulated clock runs each kernel at "
        "the peak that the card's data sheet promises, and real kernels reach that share of it; within one table the share is steadier, so "
        "that ratios are what to read."
    )


def write(rows: list[Row], root: Path) -> None:
    """Between the two marks of each README. Raises ValueError where they are missing."""
    for name, chosen in (
        ("README.md", [row for row in rows if row.kind in SHORT and not row.note]),
        ("virtualgpu/README.md", rows),
    ):
        path = root / name
        text = path.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            raise ValueError(f"{name} has no place for the table: put {BEGIN} and {END} into it, once each")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        new = f"{before}{BEGIN}\n{markdown(chosen)}\n\n{speed_sentence(rows)}\n{END}{after}"
        path.write_text(new, encoding="utf-8")
