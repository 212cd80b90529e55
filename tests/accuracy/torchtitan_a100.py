"""torchtitan's docs/performance.md of 2024: Llama 3 on 64 A100 of 80 GB, FSDP2; and its pull request 355, 8 of them, AdamW fused or not.

Settings: local batch 1, sequence 8192, bf16 with float32 reductions, no torch.compile; checkpointing: every second layer, selective
("op"), or full; FSDP2 as it was before July 2024. The A100s' network is not published: links of 400 Gb/s a GPU are taken, the engine's
default.
"""

from tests.accuracy.before import reduced_on_their_stream
from tests.accuracy.llama import LLAMA3_8B, LLAMA3_70B, Llama, train
from tests.accuracy.row import Row

URL = "https://github.com/pytorch/torchtitan/blob/9515a140b/docs/performance.md and https://github.com/pytorch/torchtitan/pull/355"
GPUS = 8  # at least
PUBLISHED = {("8B", "layer 2"): 2904, ("8B", "op"): 2973, ("70B", "full"): 331}  # tokens/s a GPU
FUSED = {False: 2627, True: 2718}  # tokens/s a GPU at step 990 and nearby
RESERVED = 59.48  # GiB of 79.15, both


def before_october(sizes: Llama) -> Llama:
    return Llama(**{**vars(sizes), "float_in_model": True})


@reduced_on_their_stream()
def rows() -> list[Row]:
    found, speeds = [], {}
    for (name, how), speed in PUBLISHED.items():
        sizes = before_october(LLAMA3_8B if name == "8B" else LLAMA3_70B)
        speeds[name, how] = 8192 / train(sizes, 1, 8192, 64, like="A100-80GB", how=how, fused=True).seconds
        found.append(
            Row(f"Llama 3 {name}, 64 A100, checkpointing {how}", "speed", "tokens/s", speed, speeds[name, how])
        )
    for one, other in ((("8B", "op"), ("8B", "layer 2")), (("70B", "full"), ("8B", "op"))):
        published = PUBLISHED[one] / PUBLISHED[other]
        what = f"Llama 3, speed: {' '.join(one)} against {' '.join(other)}"
        found.append(Row(what, "ratio", "", published, speeds[one] / speeds[other], 10))
    told = {fused: train(before_october(LLAMA3_8B), 1, 8192, 8, like="A100-80GB", fused=fused) for fused in FUSED}
    found.append(Row("Llama 3 8B, 8 A100: reserved", "memory", "GiB", RESERVED, told[True].reserved, 10))
    ratio = told[False].seconds / told[True].seconds
    return [
        *found,
        Row("Llama 3 8B, speed: AdamW fused against foreach", "ratio", "", FUSED[True] / FUSED[False], ratio, 10),
    ]
