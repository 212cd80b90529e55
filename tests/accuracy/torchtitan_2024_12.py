"""torchtitan's benchmark of December 2024, tables 1 and 3, the rows without torch.compile.

Settings: Llama 3.1 8B, FSDP2, local batch 2, sequence 8192, selective checkpointing ("op"), bf16 with float32 reductions, AdamW by
foreach, gradients clipped, H100s of 96 GB (HBM2e, 2.4 TB/s), nodes of 8. The page does not say how the allocator was set: at that
commit (9dec370) the script for several nodes leaves it as it is, the one for one node sets expandable segments. Both rows are judged
with the allocator as it is; the other setting is shown.
"""

from tests.accuracy.llama import LLAMA3_8B, train
from tests.accuracy.row import Row

URL = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
GPUS = 8  # at least
PUBLISHED = {8: (82.4, 5762), 128: (67.0, 5605)}  # GPUs: GiB reserved, tokens/s a GPU
TOKENS = 2 * 8192


def rows() -> list[Row]:
    found, speeds = [], {}
    for world_size, (gib, speed) in PUBLISHED.items():
        told = train(LLAMA3_8B, 2, 8192, world_size)
        what = f"Llama 3.1 8B, FSDP2, {world_size} H100"
        speeds[world_size] = TOKENS / told.seconds
        found.append(Row(f"{what}: reserved", "memory", "GiB", gib, told.reserved, 1))
        found.append(Row(what, "speed", "tokens/s", speed, speeds[world_size]))
    told = train(LLAMA3_8B, 2, 8192, 8, expandable=True)
    note = "not judged: the page does not say how the allocator was set"
    found.append(
        Row("the same on 8, expandable segments: reserved", "memory", "GiB", PUBLISHED[8][0], told.reserved, note=note)
    )
    published = PUBLISHED[128][1] / PUBLISHED[8][1]
    return [*found, Row("Llama 3.1 8B, speed: 128 GPUs against 8", "ratio", "", published, speeds[128] / speeds[8], 10)]
