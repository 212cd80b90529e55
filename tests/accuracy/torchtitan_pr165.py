"""torchtitan's pull request 165 (March 2024), which brought FSDP2: the eager rows.

Settings: Llama 2 7B, 8 H100 of 95.04 GiB, local batch 8, sequence 2048, full or selective ("op") checkpointing, bf16 with float32
reductions, AdamW by foreach, gradients clipped; the allocator's default; FSDP2 as it was then. Memory is published in percent of
95.0396 GiB.
"""

from tests.accuracy.before import reduced_on_their_stream
from tests.accuracy.llama import as_published
from tests.accuracy.published import published
from tests.accuracy.row import Row, ratio

URL = "https://github.com/pytorch/torchtitan/pull/165"
GPUS = 8


@reduced_on_their_stream()
def rows() -> list[Row]:
    found, took = [], {}
    for row in published("torchtitan_pr165"):
        how = row.options["checkpointing"]
        if how not in took:
            took[how] = as_published(row)
        what = f"Llama 2 7B, FSDP2, 8 H100, checkpointing {how}"
        if row.kind == "speed":
            found.append(row.beside(what, row.batch * row.size / took[how].seconds))
        else:
            figure = row.options.get("figure", "reserved")
            found.append(row.beside(f"{what}: {figure}", getattr(took[how], figure), 10))
    full, op = (row for row in found if row.kind == "speed")
    return [*found, ratio("Llama 2 7B, speed: checkpointing op against full", op, full, 10)]
