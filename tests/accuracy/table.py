"""The rows as text, and as the tables of the README and of the engine's docs."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, median

from tests.accuracy.published import TITLES, Row

BEGIN, END = "<!-- accuracy: written by make accuracy -->", "<!-- accuracy ends -->"
BANDS = (5, 10, 15, 30)  # percent
KINDS = {  # of figures, and the bands that the first page tells
    "memory": (5,),
    "kernels of a step, one GPU": (15, 30),
    "time, one GPU": (15, 30),
    "time, several GPUs": (15, 30),
    "ratios": (10, 30),
}
FAR = BANDS[-1]  # a row beyond is told with its reason
STATISTICS = ("rows", *(f"within {band} %" for band in BANDS), "median of measured / simulated", "worst")


def figure(row: Row, value: float) -> str:
    if row.kind == "ratio":
        return f"{value:.3f}"
    if row.kind == "fits":
        return "fits" if value else "out of memory"
    return f"{value:,.0f} {row.unit}".strip() if value >= 300 or row.kind == "count" else f"{value:.2f} {row.unit}"


def told(row: Row) -> tuple[str, str, str, str]:
    verdict = {True: "", False: " (missed)", None: ""}[row.met]
    return row.what, figure(row, row.published), figure(row, row.simulated), row.told() + verdict


def plain(rows: list[Row]) -> str:
    """For a terminal, with the source of each group."""
    printed, widths = [], [max(len(told(row)[i]) for row in rows) for i in range(4)]
    source = None
    for row in rows:
        if row.group != source:
            source = row.group
            printed.append(f"\n{source}  {row.url}")
        what, *figures, difference = told(row)
        numbers = "  ".join(f"{number:>{width}}" for number, width in zip(figures, widths[1:3], strict=True))
        notes = "".join(f"  {note}" for note in (row.note, reason(row)) if note)
        printed.append(f"  {what:<{widths[0]}}  {numbers}  {difference}{notes}")
    judged = [row for row in rows if row.met is not None]
    printed.append(f"\n{sum(row.met for row in judged)} of {len(judged)} within their targets; the others say missed")
    return "\n".join([*printed, "", by_kind(rows), "", confusion(rows)])


def kind(row: Row) -> str | None:
    """Its row of the table by kind; None where it has none."""
    if row.note or row.kind in ("count", "fits"):
        return None
    named = {"memory": "memory", "ratio": "ratios", "kernels": "kernels of a step, one GPU"}
    return named.get(row.kind) or ("time, one GPU" if row.gpus == 1 else "time, several GPUs")


def by(rows: list[Row], key: Callable[[Row], str | None], order: Iterable[str]) -> dict[str, list[Row]]:
    """Rows by that key, of those in this order that there are any of."""
    groups = {name: [row for row in rows if key(row) == name] for name in order}
    return {name: group for name, group in groups.items() if group}


def reason(row: Row) -> str:
    """Why it is missed, of a row that is."""
    far = row.met is False if row.kind == "fits" else not row.within(FAR)
    return row.missed if far else ""


def share(rows: list[Row], band: float) -> str:
    return f"{100 * mean(row.within(band) for row in rows):.0f} %"


def alike(rows: list[Row]) -> str:
    """The mean over sources of the share within the widest band: a source with many rows counts once."""
    groups = by(rows, lambda row: row.group, {row.group: None for row in rows})
    return f"{100 * mean(mean(row.within(FAR) for row in group) for group in groups.values()):.0f} %"


def statistics(rows: list[Row]) -> list[str]:
    """Number of rows, those within each band in percent, the median of measured over simulated, and the worst, as cells."""
    worst = max(rows, key=lambda row: abs(math.log(row.factor)))
    why = "; ".join(filter(None, (f"x {worst.factor:.2f}", reason(worst))))
    said = f"{worst.what}: {figure(worst, worst.published)}, simulated {figure(worst, worst.simulated)} ({why})"
    return [str(len(rows)), *(share(rows, band) for band in BANDS), f"{median(row.factor for row in rows):.2f}", said]


def by_kind(rows: list[Row]) -> str:
    """A row for each kind, in Markdown."""
    at, header, cells = 1 + len(BANDS), ["", *STATISTICS], []
    header.insert(at + 1, f"within {FAR} %, each source once")
    for name, group in by(rows, kind, KINDS).items():
        cells.append([name, *statistics(group)])
        cells[-1].insert(at + 1, alike(group))
    return lines(header, cells)


def by_source(rows: list[Row]) -> str:
    """The same of each source."""
    cells = []
    for group, chosen in by(rows, lambda row: row.group, {row.group: None for row in rows}).items():
        title, url = TITLES.get(group, group), chosen[0].url.split(" ")[0]
        title = f"[{title}]({url})" if url.startswith("https:") else title
        for name, alike in by(chosen, kind, KINDS).items():
            cells.append([title, name, *statistics(alike)])
            title = ""
    return lines(["source", "kind", *STATISTICS], cells)


def confusion(rows: list[Row]) -> str:
    """Batches that were trained, and that ran out of memory: measured against simulated. Nothing without such rows."""
    pairs = Counter((bool(row.published), bool(row.simulated)) for row in rows if row.kind == "fits")
    if not pairs:
        return ""
    names = {True: "fits", False: "out of memory"}
    cells = [[f"measured: {names[real]}", *(str(pairs[real, here]) for here in names)] for real in names]
    return lines(["batch", *(f"simulated: {name}" for name in names.values())], cells)


def lines(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def in_words(rows: list[Row]) -> str:
    """What the figures say, in a sentence for each kind: what the first page has."""
    sentences = []
    for name, group in by(rows, kind, KINDS).items():
        shares = ", ".join(f"{share(group, band)} within {band} %" for band in KINDS[name])
        sentences.append(f"**{name[0].upper()}{name[1:]}**: {shares} (of {len(group)} figures).")
    if fits := [row for row in rows if row.kind == "fits"]:
        sentences.append(f"**Does this batch fit?** {sum(row.met for row in fits)} of {len(fits)} predicted correctly.")
    return " ".join(sentences)


def verdict(rows: list[Row]) -> str:
    judged = [row for row in rows if row.met is not None and row.kind != "fits"]
    return (
        f"{sum(row.met for row in judged)} of the {len(judged)} figures that have a target are within it (memory 1 % for Llama 3, 3 % for the "
        "recipe, 10 % for older PyTorch; ratios 10 points). *Measured / simulated* is of times, also where a speed was published: above 1, "
        "the real program took longer."
    )


def write(rows: list[Row], root: Path) -> None:
    """Between the two marks of each file: in words in the README, all tables in the engine's page. Raises ValueError where a mark is missing."""
    tables = [by_kind(rows), by_source(rows), confusion(rows), verdict(rows)]
    for name, parts in (("README.md", [in_words(rows)]), ("virtualgpu/docs/accuracy.md", tables)):
        path = root / name
        if not path.exists():  # the package in a repository of its own
            continue
        text = path.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            raise ValueError(f"{name} has no place for the table: put {BEGIN} and {END} into it, once each")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        body = "\n\n".join(filter(None, parts))
        path.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")
