"""The rows as text, and as the tables of the README and of the engine's docs."""

import math
from collections import Counter
from pathlib import Path
from statistics import mean, median

from tests.accuracy.published import Row

BEGIN, END = "<!-- accuracy: written by make accuracy -->", "<!-- accuracy ends -->"
KINDS = {
    "memory": "memory",
    "kernels": "kernels of a step, one GPU",
    "one": "time, one GPU",
    "several": "time, several GPUs",
    "ratio": "ratios",
}
BANDS = (5, 10, 15, 30)  # percent
BANDS_IN_WORDS = {
    "memory": (5,),
    "kernels of a step, one GPU": (15, 30),
    "time, one GPU": (15, 30),
    "time, several GPUs": (15, 30),
    "ratios": (10, 30),
}
FAR = BANDS[-1]  # a row beyond is told with its reason
STATISTICS = ("rows", *(f"within {band} %" for band in BANDS), "median of measured / simulated", "worst")
TITLES = {  # of the table by source, by program or group
    "timm": "torchvision's models, RTX 3090, 4090 and 5090, AMP (timm, 2022 to 2026)",
    "XHMY": "torchvision's models, TITAN RTX, RTX 4090, H100 and H200 (XHMY, 2023 to 2025)",
    "run_train_infer": "ResNet-50 on a V100, four ways (run_train_infer, 2021)",
    "NVIDIA": "ResNet-50 on a T4, V100 and A100 (NVIDIA, 2021)",
    "lambdal": "ResNet-50 on nine cards (lambdal, 2022)",
    "rasbt": "ViT-L/16 on an A100 (rasbt, 2023)",
    "one_card": "41 programs on an H100, 21 of them on an H200 (measured here, November 2026)",
    "unseen": "37 programs on an H100, 17 of them on an H200 (simulated first, then measured here, November 2026)",
    "flashoptim": "ResNet-101 on an H100, AdamW (flashoptim, 2026)",
    "LLMs-from-scratch": "GPT-2 124M on an A100, made faster step by step (LLMs-from-scratch, 2025)",
    "milabench": "BERT-base, ConvNeXt and ResNet-50 on an H100 and an H200 (milabench, 2025)",
    "NeuSight": "BERT-large on three cards (NeuSight, 2024)",
    "mvsjober": "ResNet-50 by DDP on 1 to 8 A100s and V100s (mvsjober, 2024 and 2026)",
    "zero_recipe": "DDP and ZeRO, 2 GPUs (PyTorch's recipe)",
    "tutorial": "model parallel and pipeline of a ResNet-50, 2 GPUs (PyTorch's tutorial)",
    "bert_large": "BERT-large on a V100, five ways (transformers, 2022)",
    "gpt2": "GPT-2 by DP and DDP, 2 TITAN RTX (transformers, 2021)",
    "data_parallel": "DataParallel on 1, 2 and 4 GPUs of three kinds, seven networks (ryujaehun, 2020 and 2021)",
    "mli": "GPT-2 medium by Megatron-LM, 2 RTX 3090 Ti (mli, 2022)",
    "ml-engineering": "Llama 3.2 1B and 3.1 8B, eager, a B200 (ml-engineering, 2026)",
    "fsdp_qlora": "Llama 2 7B, LoRA by FSDP, 2 RTX 3090 (fsdp_qlora, 2024)",
    "zero_bubble": "1F1B over 8 A100, bubble (Zero Bubble, 2023)",
    "torchtitan_pr165": "Llama 2 7B, FSDP2, 8 H100 (torchtitan, March 2024)",
    "torchtitan_pr822": "Llama 3 8B, FSDP2, 8 H100 (torchtitan, February 2025)",
    "torchtitan_2024_12": "Llama 3.1 8B, FSDP2, 8 and 128 H100 (torchtitan, December 2024)",
    "torchtitan_a100": "Llama 3 8B and 70B, FSDP2, 64 A100 (torchtitan, 2024)",
}


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
        if (row.group or row.source) != source:
            source = row.group or row.source
            printed.append(f"\n{source}  {row.url}")
        cells = told(row)
        notes = "".join(f"  {note}" for note in (row.note, reason(row)) if note)
        printed.append(
            f"  {cells[0]:<{widths[0]}}  {cells[1]:>{widths[1]}}  {cells[2]:>{widths[2]}}  {cells[3]}{notes}"
        )
    judged = [row for row in rows if row.met is not None]
    printed.append(f"\n{sum(row.met for row in judged)} of {len(judged)} within their targets; the others say missed")
    return "\n".join([*printed, "", by_kind(rows), "", confusion(rows)])


def kind(row: Row) -> str | None:
    """Its row of the table by kind; None where it has none."""
    if row.note or row.kind in ("count", "cost", "fits"):
        return None
    if row.kind in ("memory", "kernels", "ratio"):
        return KINDS[row.kind]
    return KINDS["one"] if row.gpus == 1 else KINDS["several"]


def reason(row: Row) -> str:
    """Why it is missed, of a row that is."""
    far = row.met is False if row.kind == "fits" else not row.within(FAR)
    return row.missed if far else ""


def alike(rows: list[Row]) -> str:
    """The mean over sources of the share within the widest band: a source with many rows counts once."""
    sources = {}
    for row in rows:
        sources.setdefault(row.group or row.source, []).append(row.within(FAR))
    return f"{100 * mean(mean(inside) for inside in sources.values()):.0f} %"


def statistics(rows: list[Row]) -> list[str]:
    """Number of rows, those within each band in percent, the median of measured over simulated, and the worst, as cells."""
    shares = [f"{100 * sum(row.within(band) for row in rows) / len(rows):.0f} %" for band in BANDS]
    worst = max(rows, key=lambda row: abs(math.log(row.factor)))
    cells = [str(len(rows)), *shares, f"{median(row.factor for row in rows):.2f}"]
    return [
        *cells,
        f"{worst.what}: {figure(worst, worst.published)}, simulated {figure(worst, worst.simulated)} ("
        + "; ".join(filter(None, (f"x {worst.factor:.2f}", reason(worst))))
        + ")",
    ]


def by_kind(rows: list[Row]) -> str:
    """A row for each kind, in Markdown."""
    groups = {name: [row for row in rows if kind(row) == name] for name in KINDS.values()}
    at = 1 + len(BANDS)
    header, cells = ["", *STATISTICS], [[name, *statistics(group)] for name, group in groups.items() if group]
    header.insert(at + 1, f"within {FAR} %, each source once")
    for row in cells:
        row.insert(at + 1, alike(groups[row[0]]))
    return lines(tuple(header), cells)


def by_source(rows: list[Row]) -> str:
    """The same of each source."""
    cells, titles = [], {}
    for row in rows:
        titles.setdefault(row.group or row.source, row.url.split(" ")[0])
    for group, url in titles.items():
        title = TITLES.get(group, group)
        title = f"[{title}]({url})" if url.startswith("https:") else title
        for name in KINDS.values():
            if chosen := [row for row in rows if kind(row) == name and (row.group or row.source) == group]:
                cells.append([title, name, *statistics(chosen)])
                title = ""
    return lines(("source", "kind", *STATISTICS), cells)


def confusion(rows: list[Row]) -> str:
    """Batches that were trained, and that ran out of memory: measured against simulated. Nothing without such rows."""
    pairs = Counter((bool(row.published), bool(row.simulated)) for row in rows if row.kind == "fits")
    if not pairs:
        return ""
    names = {True: "fits", False: "out of memory"}
    cells = [[f"measured: {names[real]}", *(str(pairs[real, here]) for here in names)] for real in names]
    return lines(("batch", *(f"simulated: {name}" for name in names.values())), cells)


def lines(header: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def in_words(rows: list[Row]) -> str:
    """What the figures say, in a sentence for each kind: what the first page has."""
    sentences = []
    for name, bands in BANDS_IN_WORDS.items():
        if group := [row for row in rows if kind(row) == name]:
            shares = [
                f"{100 * sum(row.within(band) for row in group) / len(group):.0f} % within {band} %" for band in bands
            ]
            sentences.append(f"**{name[0].upper()}{name[1:]}**: {', '.join(shares)} (of {len(group)} figures).")
    if fits := [row for row in rows if row.kind == "fits"]:
        sentences.append(f"**Does this batch fit?** {sum(row.met for row in fits)} of {len(fits)} predicted correctly.")
    return " ".join(sentences)


def verdict(rows: list[Row]) -> str:
    judged = [row for row in rows if row.met is not None and row.kind not in ("cost", "fits")]
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
        text = path.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            raise ValueError(f"{name} has no place for the table: put {BEGIN} and {END} into it, once each")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        body = "\n\n".join(filter(None, parts))
        path.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")
