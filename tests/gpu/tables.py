"""The clock's tables, virtualgpu/timing/data/*.csv, of what kernels took on cards.

    python -m tests.gpu.tables               writes all of them: convolutions.csv and attention.csv, from tests/gpu/<card>_profiled.csv,
                                             <card>_convolutions.csv, <card>_kernels.csv and tests/accuracy/convolutions.csv; host_table's, memory_table's
    python -m tests.gpu.tables --measure     the GPU of this machine before (`make gpu`), five minutes of convolutions and attention: a new card's into
                                             tests/gpu/<card>_profiled.csv, so that the tables have it; of a card that has that file into build/, and
                                             how long they take here over what stands in the file is printed: copy it over to have the newer ones

Each row names the card, the versions, and the file. Nothing of the cards in JUDGED is an input: they are asked how well the others' tables do.

A convolution's factor is the median of measured over the clock's rule, of at least LEAST kernels: of a card that was not measured here, of half of
the shapes that others published (PUBLISHED; `python -m tests.accuracy.convolutions` judges by the other half). Attention has two numbers: seconds
before the first tile, and a factor over the peak, those of a grid with the least sum of |log(measured / roofline)|, each no more than OFF; and what
dropout and a mask take over that, medians.
"""

import csv
import functools
import io
import json
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch

from tests.accuracy import convolutions as published
from tests.gpu import host_table, kernels_of_a_card, memory_table
from virtualgpu.hardware.datasheet import TF32, Spec
from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing import attention, convolutions, kernels
from virtualgpu.timing.convolutions import ANY, KIND, Pass
from virtualgpu.timing.kernels import Kernels

JUDGED = ("H200",)
VERSIONS = "PyTorch 2.11; CUDA 13; cuDNN 9.19; 2026-11"  # of files that say none
LEAST, OFF = 8, 0.7
SECONDS = torch.logspace(-6, -4.2, 30).double()
FACTORS = torch.logspace(-0.1, 1.2, 140).double()
# Of cards of which no kernel was measured here. The first of a compute capability stands for the others. Of dlperf's three the TITAN RTX alone: its T4
# gets hot, and its V100's 1x1 in float16 are chosen among algorithms that PyTorch does not have
PUBLISHED = {
    "P100": ("baidu-research/DeepBench", "sitar-lab/NeuSight"),
    "V100": ("baidu-research/DeepBench", "sitar-lab/NeuSight", "pytorch/kineto"),
    "TITAN RTX": ("rai-project/dlperf",),
    "T4": ("baidu-research/DeepBench", "sitar-lab/NeuSight", "ScalingIntelligence/KernelBench"),
    "A100": ("sitar-lab/NeuSight", "ScalingIntelligence/KernelBench", "facebookresearch/HolisticTraceAnalysis"),
}
WHOSE = ["card", "capability"]
SOURCE = ["kernels", "versions", "source"]


def main(arguments: Sequence[str] = ()) -> None:
    """Raises SystemExit for a GPU that hardware/data/cards.toml does not have."""
    if "--measure" in arguments and not measure():
        return
    kernels.DATA.mkdir(exist_ok=True)
    for name, text in texts().items():
        (kernels.DATA / f"{name}.csv").write_text(text, encoding="utf-8")
        print(kernels.DATA / f"{name}.csv", text.count("\n") - 1, "rows")
    if "--measure" not in arguments:
        host_table.main()
        memory_table.main()


def measure() -> bool:
    """Measures the kernels of this machine's GPU. Returns whether there is one."""
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return False
    name = torch.cuda.get_device_name()
    card = next((key for key, spec in SPECS.items() if spec.name == name), None)
    if card is None:
        raise SystemExit(f"{name} is not in virtualgpu/hardware/data/cards.toml: add it, then measure its kernels")
    before = kernels_of_a_card.rows(card=card)
    file = kernels_of_a_card.measure(card, ("convolution", "attention", "masked_attention"))
    print(file)
    if before:
        print(compared(file, before))
    return True


def compared(file: Path, before: Sequence[kernels_of_a_card.Row]) -> str:
    """A line for each family: its kernels in both, and what they take in `file` over what they took."""
    took = {(row.family, json.dumps(row.settings, sort_keys=True)): row.fresh for row in before}
    ratios = defaultdict(list)
    with open(file, encoding="utf-8", newline="") as opened:
        for row in csv.DictReader(opened):
            key = row["family"], json.dumps(json.loads(row["settings"]), sort_keys=True)
            if key in took:
                ratios[key[0]].append(float(row["fresh"]) / took[key])
    return "\n".join(f"{family}: {len(found)} kernels, {median(found):.3f} times" for family, found in ratios.items())


def texts(cards: Iterable[str] | None = None) -> dict[str, str]:
    """Of convolutions and attention, by name. cards: keys into SPECS; all that were measured and are not JUDGED."""
    found = [card for card in cards or kernels_of_a_card.cards() if card not in JUDGED]
    others = [card for card in PUBLISHED if card not in found]
    kinds = ["by", "pass", "bits", "seconds", "factor", "dropped", "biased"]
    return {
        "convolutions": _text([*KIND, "factor"], (row for card in [*others, *found] for row in convolution_rows(card))),
        "attention": _text(kinds, (row for card in found for row in attention_rows(card))),
    }


def _text(columns: list[str], rows: Iterable[list]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*WHOSE, *columns, *SOURCE])
    writer.writerows(rows)
    return file.getvalue()


def convolution_rows(card: str, dtype: str = "") -> Iterator[list]:
    """For each kind of each class of size, and for all classes together. dtype: of that type alone."""
    kernels, logs = Kernels(SPECS[card]), defaultdict(list)
    here = bool(kernels_of_a_card.table(card, "profiled"))
    sources = {"measured here"} if here else PUBLISHED[card]
    for one, seconds in [*_profiled(card, kernels, dtype), *_published(card, kernels, sources, dtype)]:
        log = math.log(seconds / convolutions.by_the_rule(kernels, one))
        logs[one.kind].append(log)
        logs[(*one.kind[:-1], ANY)].append(log)
    for kind, found in sorted(logs.items()):
        if len(found) >= LEAST:
            factor = f"{math.exp(median(found)):.3f}"
            versions = _versions(card) if here else "of each source"
            source = _source(card, "convolutions") if here else "; ".join(_licences(sources))
            yield [*_whose(card), *kind, factor, len(found), versions, source]


def _profiled(card: str, kernels: Kernels, dtype: str) -> Iterator[tuple[Pass, float]]:
    for row in kernels_of_a_card.rows("convolution", card):
        if dtype in ("", row.settings["dtype"]):
            yield convolution_pass(row.settings, kernels), row.fresh * 1e-6


def _published(card: str, kernels: Kernels, sources: Collection[str], dtype: str) -> Iterator[tuple[Pass, float]]:
    """Of tests/accuracy/convolutions.csv. Measured here: depthwise ones, and others of an earlier visit (PyTorch 2.11, cuDNN 9.19 as well). Of
    others, those of all variants of a card, half of the shapes."""
    for row in _accuracy():
        here = row["source"] == "measured here"
        whose = row["card"] == card if here else row["card"].split("-")[0] == card and published.fitted(row)
        if whose and row["source"] in sources and dtype in ("", row["dtype"]):
            image, weight, result, (stride, _, dilation, transposed, _, groups) = published._tensors(row)
            settings = image, result, weight, stride, dilation, transposed, groups, row["dtype"]
            yield convolutions.plain_pass(kernels, row["direction"], *settings), float(row["us"]) * 1e-6


@functools.cache
def _accuracy() -> list[dict[str, str]]:
    with open(published.TABLE, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _licences(sources: Collection[str]) -> list[str]:
    """The sources with licence and year."""
    return sorted(
        {f"{row['source']} ({row['licence']}, {row['date']})" for row in _accuracy() if row["source"] in sources}
    )


def convolution_pass(settings: dict, kernels: Kernels) -> Pass:
    """By the settings of a row, of tensors without memory."""
    image, weight, options = kernels_of_a_card.convolution(settings, _empty)
    stride, _, dilation, transposed, _, groups = options
    result = torch.ops.aten.convolution(image, weight, None, *options)
    tensors = image, kernels_of_a_card.in_layout(settings, result), weight
    return convolutions.plain_pass(
        kernels, settings["pas"], *tensors, stride, dilation, transposed, groups, settings["dtype"]
    )


def _empty(settings: dict, *shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=_dtype(settings))


def _dtype(settings: dict) -> torch.dtype:
    return torch.float32 if settings["dtype"] == TF32 else getattr(torch, settings["dtype"])


def attention_rows(card: str) -> Iterator[list]:
    """For each of the kernels, its passes and sizes of numbers."""
    kernels, calls = Kernels(SPECS[card]), defaultdict(list)
    for settings, seconds in _attentions(card):
        by = settings["way"]
        if by in ("flash", "efficient", "cudnn"):
            calls[(by, settings["pas"], 8 * _dtype(settings).itemsize)].append((settings, seconds))
    for (by, which, bits), found in sorted(calls.items()):
        plain = [(settings, took) for settings, took in found if not _more(settings)]
        if len(plain) < LEAST:
            continue
        seconds, factor = _fitted(kernels, by, which, plain)
        more = [
            _over(kernels, by, which, seconds, factor, [call for call in found if _more(call[0]) == what])
            for what in ("dropped", "biased")
        ]
        figures = f"{seconds:.2e}", f"{factor:.3g}", *more
        yield [*_whose(card), by, which, bits, *figures, len(found), _versions(card), _source(card, "kernels")]


def _attentions(card: str) -> Iterator[tuple[dict, float]]:
    """Settings, whose "way" is the kernel that was taken, and seconds."""
    spec = SPECS[card]
    for row in kernels_of_a_card.rows("attention", card) + kernels_of_a_card.rows("masked_attention", card):
        yield {**row.settings, "way": _way(row.settings, spec)}, row.fresh * 1e-6
    for settings, us in kernels_of_a_card.in_a_graph("attention", card):
        way = settings["way"]
        yield {**settings, "way": _way(settings, spec) if way == "default" else way}, us * 1e-6


def _way(settings: dict, spec: Spec) -> str:
    """What PyTorch takes, unless it is told (engine.sdpa_backends)."""
    if settings["dtype"] in ("float32", TF32) or settings.get("mask") == "gradient":
        return "efficient"
    if spec.capability[0] in (9, 10):
        return "cudnn"
    return "efficient" if "mask" in settings else "flash"


def _more(settings: dict) -> str:
    return "biased" if "mask" in settings else "dropped" if settings.get("dropout") else ""


def _asked(settings: dict, which: str) -> tuple[torch.Tensor, float, int, str]:
    """Query, FLOPs, bytes and type, as `attention.roofline` asks for them."""
    query = _empty(settings, *settings["shape"])
    batch, heads, queries, head = query.shape
    key = _empty(settings, batch, heads, settings.get("keys", queries), head)
    flops = attention.fused if which == "forward" else attention.fused_backward
    moved = query.nbytes + key.nbytes  # each of two, read or written: query, key, value and result, and their gradients
    moved *= 2 if which == "forward" else 4
    counted = flops(query, key, key, settings.get("causal", False)) * attention.in_whole_tiles(queries, key.shape[2])
    return query, counted, moved, settings["dtype"]


def _fitted(kernels: Kernels, by: str, which: str, calls) -> tuple[float, float]:
    took = torch.tensor([seconds for _, seconds in calls]).double()
    asked = [_asked(settings, which) for settings, _ in calls]
    best = (math.inf, 0.0, 0.0)
    for factor in FACTORS.tolist():
        roofs = torch.tensor([attention.roofline(kernels, which, by, *one, factor) for one in asked]).double()
        off = (took.log() - (SECONDS[:, None] + roofs).log()).abs().clamp(max=OFF).sum(1)
        best = min(best, (off.min().item(), SECONDS[off.argmin()].item(), factor))
    return best[1:]


def _over(kernels: Kernels, by: str, which: str, seconds: float, factor: float, calls) -> str:
    """What these take over it; nothing where there are few."""
    times = [
        took / (seconds + attention.roofline(kernels, which, by, *_asked(settings, which), factor))
        for settings, took in calls
    ]
    return f"{median(times):.3g}" if len(times) >= LEAST // 2 else ""


def _whose(card: str) -> list:
    return [SPECS[card].name, ".".join(map(str, SPECS[card].capability))]


def _versions(card: str) -> str:
    return next((row["versions"] for row in kernels_of_a_card.table(card, "profiled") if "versions" in row), VERSIONS)


def _source(card: str, more: str) -> str:
    names = [kernels_of_a_card.path(card, kind) for kind in ("profiled", more)]
    return "; ".join(str(Path("tests/gpu") / name.name) for name in names if name.exists())


if __name__ == "__main__":
    main(sys.argv[1:])
