"""PyTorch's model-parallel tutorial: ResNet-50 on two GPUs, in halves and as a pipeline.

Settings: batch 120 of 128 x 128, SGD, two GPUs that the tutorial does not name: two halves of a K80 here. The experiment is tests/tutorial.py.
"""

from tests.accuracy.published import published
from tests.accuracy.row import Row
from tests.tutorial import simulated

URL = "https://web.archive.org/web/2023/https://pytorch.org/tutorials/intermediate/model_parallel_tutorial.html"
GPUS = 2


def rows() -> list[Row]:
    slower, faster = simulated()
    told = {
        f"split={size}": (f"pipeline, split size {size}: speed against one GPU", 1 + faster[size], 10)
        for size in faster
    }
    told["halves=time"] = "ResNet-50 in halves: time against one GPU", 1 + slower, 10
    told["split=best"] = "best of nine split sizes", max(faster, key=faster.get), 0
    return [row.beside(*told[row.settings]) for row in published("tutorial")]
