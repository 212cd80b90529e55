"""Llama as torchtitan published it, and how long a dry run of it takes. The settings are the functions' docstrings; the model is llama.py's."""

import resource
import sys
import time
from collections.abc import Callable

from tests.accuracy.before import reduced_on_their_stream
from tests.accuracy.llama import LLAMA3_8B, as_published, train
from tests.accuracy.published import Published, Row, program, published, ratio


def trained(name: str, what: Callable[[Published], str], tolerance: float, **options) -> tuple[list[Row], list[Row]]:
    """The rows of that program, and of these the speeds. options: of `as_published`."""
    rows, taken = [], {}
    for row in published(name):
        if row.run not in taken:
            taken[row.run] = as_published(row, **options)
        told, figure = taken[row.run], row.options.get("figure", "reserved")
        if row.kind == "memory":
            rows.append(row.beside(f"{what(row)}: {figure}", getattr(told, figure), tolerance))
        else:
            rows.append(row.beside(what(row), row.batch * row.size / told.seconds))
    return rows, [row for row in rows if row.kind == "speed"]


@program("https://github.com/pytorch/torchtitan/pull/165", gpus=8)
@reduced_on_their_stream()
def torchtitan_pr165() -> list[Row]:
    """torchtitan's pull request 165 (March 2024), which brought FSDP2: the eager rows.

    Settings: Llama 2 7B, 8 H100 of 95.04 GiB, local batch 8, sequence 2048, full or selective ("op") checkpointing, bf16 with float32
    reductions, AdamW by foreach, gradients clipped; the allocator's default; FSDP2 as it was then. Memory is published in percent of
    95.0396 GiB.
    """
    what = "Llama 2 7B, FSDP2, 8 H100, checkpointing"
    rows, (full, op) = trained("torchtitan_pr165", lambda row: f"{what} {row.options['checkpointing']}", 10)
    return [*rows, ratio("Llama 2 7B, speed: checkpointing op against full", op, full, 10)]


@program("https://github.com/pytorch/torchtitan/pull/822", gpus=8)
def torchtitan_pr822() -> list[Row]:
    """torchtitan's pull request 822 (February 2025): when FSDP2 gives back the gathered parameters. Its logs have the settings.

    Settings: Llama 3 8B, 8 H100 of 95 GiB, local batch 1, sequence 8192, selective checkpointing ("op"), AdamW by foreach, gradients
    clipped, expandable segments. "default" keeps the last block's parameters after the forward pass, "never" those of all.
    """
    what = "Llama 3 8B, batch 1, 8 H100, reshard"
    rows, speeds = trained("torchtitan_pr822", lambda row: f"{what} {row.options['reshard']}", 1, expandable=True)
    by = {row.what.rpartition(" ")[2]: row for row in speeds}
    return [*rows, ratio("Llama 3 8B, speed: reshard never against always", by["never"], by["always"], 10)]


@program("https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md", gpus=8)
def torchtitan_2024_12() -> list[Row]:
    """torchtitan's benchmark of December 2024, tables 1 and 3, the rows without torch.compile.

    Settings: Llama 3.1 8B, FSDP2, local batch 2, sequence 8192, selective checkpointing ("op"), bf16 with float32 reductions, AdamW by
    foreach, gradients clipped, H100s of 96 GB (HBM2e, 2.4 TB/s), nodes of 8. The page does not say how the allocator was set: at that
    commit (9dec370) the script for several nodes leaves it as it is, the one for one node sets expandable segments. Both rows are judged
    with the allocator as it is; the other setting is shown.
    """
    rows, (few, many) = trained("torchtitan_2024_12", lambda row: f"Llama 3.1 8B, FSDP2, {row.gpus} H100", 1)
    first = published("torchtitan_2024_12")[0]
    other = first.beside("the same on 8, expandable segments: reserved", as_published(first, expandable=True).reserved)
    other.note = "not judged: the page does not say how the allocator was set"
    return [*rows, other, ratio("Llama 3.1 8B, speed: 128 GPUs against 8", many, few, 10)]


@program(
    "https://github.com/pytorch/torchtitan/blob/9515a140b/docs/performance.md and https://github.com/pytorch/torchtitan/pull/355",
    gpus=8,
)
@reduced_on_their_stream()
def torchtitan_a100() -> list[Row]:
    """torchtitan's docs/performance.md of 2024: Llama 3 on 64 A100 of 80 GB, FSDP2; and its pull request 355, 8 of them, AdamW fused or not.

    Settings: local batch 1, sequence 8192, bf16 with float32 reductions, no torch.compile; checkpointing: every second layer, selective
    ("op"), or full; FSDP2 as it was before July 2024. The A100s' network is not published: links of 400 Gb/s a GPU are taken, the engine's
    default.
    """

    def what(row: Published) -> str:
        how, optimizer = row.options.values()
        size = row.model.removeprefix("llama3_").upper()
        return f"Llama 3 {size}, {row.gpus} A100, checkpointing {how}{', foreach' * (optimizer == 'foreach')}"

    rows, speeds = trained("torchtitan_a100", what, 10, float_in_model=True)  # before October 2024
    by, name = {row.what: row for row in speeds}, "Llama 3 {}, {} A100, checkpointing {}".format
    pairs = {
        "8B op against 8B layer 2": (name("8B", 64, "op"), name("8B", 64, "layer 2")),
        "70B full against 8B op": (name("70B", 64, "full"), name("8B", 64, "op")),
        "8B, AdamW fused against foreach": (name("8B", 8, "op"), name("8B", 8, "op, foreach")),
    }
    ratios = [ratio(f"Llama 3, speed: {what}", by[one], by[other], 10) for what, (one, other) in pairs.items()]
    return [*rows, *ratios]


def peak_memory() -> float:
    """The most memory that this process has had, in GiB (Linux counts in KiB, macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


@program("measured here")
def scale() -> list[Row]:
    """How long a dry run of one rank of many takes: Llama 3.1 8B under FSDP2 on 8 and on 512 GPUs, the first step and four more.

    Not a figure that others published: the target is the project's own (20 seconds and 4 GiB on a laptop). Seconds are the processor's,
    measured, so that a busy machine tells the same; the peak of host memory is the whole process's, both runs and PyTorch included.
    """
    found = []
    for world_size in (8, 512):
        begin = time.process_time()
        train(LLAMA3_8B, 2, 8192, world_size, expandable=True, steps=5)
        seconds = time.process_time() - begin
        found.append(Row(f"dry run, 1 of {world_size} ranks, 5 steps: seconds of a core", "cost", "s", 20, seconds))
    return [*found, Row("its host memory", "cost", "GiB", 4, peak_memory())]
