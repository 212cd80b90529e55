"""torchtitan's docs/performance.md of 2024: Llama 3 on 64 A100 of 80 GB, FSDP2; and its pull request 355, 8 of them, AdamW fused or not.

Settings: local batch 1, sequence 8192, bf16 with float32 reductions, no torch.compile; checkpointing: every second layer, selective
("op"), or full; FSDP2 as it was before July 2024. The A100s' network is not published: links of 400 Gb/s a GPU are taken, the engine's
default.
"""

from tests.accuracy.before import reduced_on_their_stream
from tests.accuracy.llama import as_published
from tests.accuracy.published import published
from tests.accuracy.row import Row, ratio

URL = "https://github.com/pytorch/torchtitan/blob/9515a140b/docs/performance.md and https://github.com/pytorch/torchtitan/pull/355"
GPUS = 8  # at least


@reduced_on_their_stream()
def rows() -> list[Row]:
    found, speeds, took = [], {}, {}
    for row in published("torchtitan_a100"):
        size, how, optimizer = row.model.removeprefix("llama3_").upper(), *row.options.values()
        if row.run not in took:
            took[row.run] = as_published(row, float_in_model=True)  # before October 2024
        what = f"Llama 3 {size}, {row.gpus} A100, checkpointing {how}{', foreach' * (optimizer == 'foreach')}"
        if row.kind == "memory":
            found.append(row.beside(f"{what}: reserved", took[row.run].reserved, 10))
        else:
            speeds[size, how, row.gpus, optimizer] = row.beside(what, row.batch * row.size / took[row.run].seconds)
            found.append(speeds[size, how, row.gpus, optimizer])
    pairs = {
        "8B op against 8B layer 2": (("8B", "op", 64, "fused"), ("8B", "layer 2", 64, "fused")),
        "70B full against 8B op": (("70B", "full", 64, "fused"), ("8B", "op", 64, "fused")),
        "8B, AdamW fused against foreach": (("8B", "op", 8, "fused"), ("8B", "op", 8, "foreach")),
    }
    return [
        *found,
        *(ratio(f"Llama 3, speed: {what}", speeds[one], speeds[other], 10) for what, (one, other) in pairs.items()),
    ]
