"""The simulated clock beside the figures that PyTorch's model-parallel tutorial printed from two real GPUs (nothing fitted to it)."""

from tests.bench.row import Row
from tests.bench.tools import silent
from tests.tutorial import simulated


def rows() -> list[Row]:
    with silent():
        slower, faster = simulated()
    overhead, faster = 100 * slower, {size: 100 * share for size, share in faster.items()}
    best = max(faster, key=faster.get)
    return [
        Row(
            "tutorial: model parallel, slower than one GPU (simulated)", overhead, "%", "7 +- 5 %", 2 <= overhead <= 12
        ),
        Row("tutorial: best of nine split sizes (simulated)", best, "", "12", best == 12),
        Row("tutorial: split size 20, faster (simulated)", faster[20], "%", "49 +- 10 %", 39 <= faster[20] <= 59),
        Row("tutorial: split size 12, faster (simulated)", faster[12], "%", "54 +- 10 %", 44 <= faster[12] <= 64),
    ]
