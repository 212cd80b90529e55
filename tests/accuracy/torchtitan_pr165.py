"""torchtitan's pull request 165 (March 2024), which brought FSDP2: the eager rows.

Settings: Llama 2 7B, 8 H100 of 95.04 GiB, local batch 8, sequence 2048, full or selective ("op") checkpointing, bf16 with float32
reductions, AdamW by foreach, gradients clipped; the allocator's default; FSDP2 as it was then. Memory is published in percent of
95.0396 GiB.
"""

from tests.accuracy.before import reduced_on_their_stream
from tests.accuracy.llama import LLAMA2_7B, train
from tests.accuracy.row import Row

URL = "https://github.com/pytorch/torchtitan/pull/165"
GPUS = 8
GIB = 95.0396
# percent active, percent reserved, tokens/s a GPU: the middle of 6100-6300 and of 6600-6800
PUBLISHED = {"full": (23.92, 32.64, 6200), "op": (52.13, 62.51, 6700)}
TOKENS = 8 * 2048


@reduced_on_their_stream()
def rows() -> list[Row]:
    found, speeds = [], {}
    for how, (active, reserved, speed) in PUBLISHED.items():
        told = train(LLAMA2_7B, 8, 2048, 8, how=how)
        what = f"Llama 2 7B, FSDP2, 8 H100, checkpointing {how}"
        speeds[how] = TOKENS / told.seconds
        found += [
            Row(f"{what}: active", "memory", "GiB", GIB * active / 100, told.active, 10),
            Row(f"{what}: reserved", "memory", "GiB", GIB * reserved / 100, told.reserved, 10),
            Row(what, "speed", "tokens/s", speed, speeds[how]),
        ]
    published = PUBLISHED["op"][2] / PUBLISHED["full"][2]
    return [
        *found,
        Row(
            "Llama 2 7B, speed: checkpointing op against full",
            "ratio",
            "",
            published,
            speeds["op"] / speeds["full"],
            10,
        ),
    ]
