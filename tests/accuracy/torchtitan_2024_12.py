"""torchtitan's benchmark of December 2024, tables 1 and 3, the rows without torch.compile.

Settings: Llama 3.1 8B, FSDP2, local batch 2, sequence 8192, selective checkpointing ("op"), bf16 with float32 reductions, AdamW by
foreach, gradients clipped, H100s of 96 GB (HBM2e, 2.4 TB/s), nodes of 8. The page does not say how the allocator was set: at that
commit (9dec370) the script for several nodes leaves it as it is, the one for one node sets expandable segments. Both rows are judged
with the allocator as it is; the other setting is shown.
"""

from tests.accuracy.llama import as_published
from tests.accuracy.published import published
from tests.accuracy.row import Row, ratio

URL = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
GPUS = 8  # at least


def rows() -> list[Row]:
    found, took = [], {}
    for row in published("torchtitan_2024_12"):
        if row.gpus not in took:
            took[row.gpus] = as_published(row)
        what = f"Llama 3.1 8B, FSDP2, {row.gpus} H100"
        if row.kind == "memory":
            found.append(row.beside(f"{what}: reserved", took[row.gpus].reserved, 1))
        else:
            found.append(row.beside(what, row.batch * row.size / took[row.gpus].seconds))
    first = published("torchtitan_2024_12")[0]
    other = first.beside("the same on 8, expandable segments: reserved", as_published(first, expandable=True).reserved)
    other.note = "not judged: the page does not say how the allocator was set"
    few, many = (row for row in found if row.kind == "speed")
    return [*found, other, ratio("Llama 3.1 8B, speed: 128 GPUs against 8", many, few, 10)]
