"""torchtitan's pull request 822 (February 2025): when FSDP2 gives back the gathered parameters. Its logs have the settings.

Settings: Llama 3 8B, 8 H100 of 95 GiB, local batch 1, sequence 8192, selective checkpointing ("op"), AdamW by foreach, gradients
clipped, expandable segments. "default" keeps the last block's parameters after the forward pass, "never" those of all.
"""

from tests.accuracy.llama import LLAMA3_8B, train
from tests.accuracy.row import Row

URL = "https://github.com/pytorch/torchtitan/pull/822"
GPUS = 8
PUBLISHED = {
    "default": (49.59, 5605),
    "always": (49.41, 5593),
    "never": (62.18, 5763),
}  # GiB reserved, tokens/s a GPU, step 50


def rows() -> list[Row]:
    found, speeds = [], {}
    for reshard, (gib, speed) in PUBLISHED.items():
        told = train(LLAMA3_8B, 1, 8192, 8, reshard=reshard, expandable=True)
        what = f"Llama 3 8B, batch 1, 8 H100, reshard {reshard}"
        speeds[reshard] = 8192 / told.seconds
        found.append(Row(f"{what}: reserved", "memory", "GiB", gib, told.reserved, 1))
        found.append(Row(what, "speed", "tokens/s", speed, speeds[reshard]))
    published = PUBLISHED["never"][1] / PUBLISHED["always"][1]
    return [
        *found,
        Row(
            "Llama 3 8B, speed: reshard never against always",
            "ratio",
            "",
            published,
            speeds["never"] / speeds["always"],
            10,
        ),
    ]
