"""The rows as text, and as the READMEs' tables."""

from pathlib import Path

from tests.accuracy.row import Row

BEGIN, END = "<!-- accuracy: written by make accuracy -->", "<!-- accuracy ends -->"
HEADER = ("what", "published (measured by others)", "simulated", "difference")
TITLES = {  # of the short table, by program
    "zero_recipe": "DDP and ZeRO, 2 GPUs (PyTorch's recipe)",
    "tutorial": "model parallel and pipeline of a ResNet-50, 2 GPUs (PyTorch's tutorial)",
    "bert_large": "BERT-large on a V100, five ways (transformers, 2022)",
    "gpt2": "GPT-2 by DP and DDP, 2 TITAN RTX (transformers, 2021)",
    "zero_bubble": "1F1B over 8 A100, bubble (Zero Bubble, 2023)",
    "torchtitan_pr165": "Llama 2 7B, FSDP2, 8 H100 (torchtitan, March 2024)",
    "torchtitan_pr822": "Llama 3 8B, FSDP2, 8 H100 (torchtitan, February 2025)",
    "torchtitan_2024_12": "Llama 3.1 8B, FSDP2, 8 and 128 H100 (torchtitan, December 2024)",
    "torchtitan_a100": "Llama 3 8B and 70B, FSDP2, 64 A100 (torchtitan, 2024)",
}


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
    """Why speeds differ, and by how much; of torchtitan's tables, the most alike, on their own."""
    factors = sorted(row.difference for row in rows if row.kind in ("speed", "time"))
    titan = sorted(row.difference for row in rows if row.kind == "speed" and row.source.startswith("torchtitan"))
    alike = f" ({titan[0]:.2f} to {titan[-1]:.2f} in torchtitan's tables)" if titan else ""
    return (
        f"Measured speeds are {factors[0]:.2f} to {factors[-1]:.2f} of the simulated ones{alike}: the simulated clock lets every kernel reach "
        "the peak that the card's data sheet promises, and real kernels reach a part of it. Read ratios, not seconds."
    )


def short(rows: list[Row]) -> str:
    """A row for each source: the largest differences, and the range of the speeds."""
    lines = ["| source | memory, at most | ratios, at most | speed measured / simulated |", "|---|---|---|---|"]
    for name, title in TITLES.items():
        group = [row for row in rows if row.source == name and not row.note]
        if not group:
            continue
        cells = [f"[{title}]({group[0].url.split()[0]})"]
        for kinds in (("memory",), ("ratio",)):
            chosen = [row for row in group if row.kind in kinds]
            cells.append(max(chosen, key=lambda row: abs(row.difference)).told() if chosen else "")
        speeds = sorted(row.difference for row in group if row.kind in ("speed", "time"))
        cells.append(f"{speeds[0]:.2f} to {speeds[-1]:.2f}" if speeds else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    judged = [row for row in rows if row.met is not None and row.kind != "cost"]
    return (
        f"{sum(row.met for row in judged)} of {len(judged)} rows are within their targets (memory 1 % for Llama 3, 3 % for the recipe, 10 % "
        "for older PyTorch; ratios 10 points)."
    )


def write(rows: list[Row], root: Path) -> None:
    """Between the two marks of each README. Raises ValueError where they are missing."""
    for name, found in (("README.md", short(rows)), ("virtualgpu/README.md", markdown(rows))):
        path = root / name
        text = path.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            raise ValueError(f"{name} has no place for the table: put {BEGIN} and {END} into it, once each")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        body = f"{found}\n\n{verdict(rows)} {speed_sentence(rows)}"
        path.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")
