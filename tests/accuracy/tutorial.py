"""PyTorch's model-parallel tutorial: ResNet-50 on two GPUs, in halves and as a pipeline.

Settings: batch 120 of 128 x 128, SGD, two GPUs that the tutorial does not name: two T4s here. The experiment is tests/tutorial.py.
"""

from tests.accuracy.row import Row
from tests.tutorial import simulated

URL = "https://web.archive.org/web/2023/https://pytorch.org/tutorials/intermediate/model_parallel_tutorial.html"
GPUS = 2
SLOWER, FASTER = 0.07, {20: 0.49, 12: 0.54}  # against one GPU; by split size


def rows() -> list[Row]:
    slower, faster = simulated()
    best = max(faster, key=faster.get)
    return [
        Row("ResNet-50 in halves: time against one GPU", "ratio", "", 1 + SLOWER, 1 + slower, 10),
        *(
            Row(f"pipeline, split size {size}: speed against one GPU", "ratio", "", 1 + share, 1 + faster[size], 10)
            for size, share in FASTER.items()
        ),
        Row("best of nine split sizes", "count", "", 12, best, 0),
    ]
