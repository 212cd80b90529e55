"""torchtitan's pull request 822 (February 2025): when FSDP2 gives back the gathered parameters. Its logs have the settings.

Settings: Llama 3 8B, 8 H100 of 95 GiB, local batch 1, sequence 8192, selective checkpointing ("op"), AdamW by foreach, gradients
clipped, expandable segments. "default" keeps the last block's parameters after the forward pass, "never" those of all.
"""

from tests.accuracy.llama import as_published
from tests.accuracy.published import published
from tests.accuracy.row import Row, ratio

URL = "https://github.com/pytorch/torchtitan/pull/822"
GPUS = 8


def rows() -> list[Row]:
    found, took, speeds = [], {}, {}
    for row in published("torchtitan_pr822"):
        reshard = row.options["reshard"]
        if reshard not in took:
            took[reshard] = as_published(row, expandable=True)
        what = f"Llama 3 8B, batch 1, 8 H100, reshard {reshard}"
        if row.kind == "memory":
            found.append(row.beside(f"{what}: reserved", took[reshard].reserved, 1))
        else:
            speeds[reshard] = row.beside(what, row.batch * row.size / took[reshard].seconds)
            found.append(speeds[reshard])
    return [*found, ratio("Llama 3 8B, speed: reshard never against always", speeds["never"], speeds["always"], 10)]
