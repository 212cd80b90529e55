"""PyTorch's recipe on ZeroRedundancyOptimizer: memory of DDP with Adam, sharded or not.

Settings: 2 GPUs, 20 x Linear(2000, 2000), batch 20, Adam; peak allocated in MB of a million bytes, cut off after the point.
foreach=False, since the recipe is of 2021. The card is not published and changes nothing.
"""

import os

import torch
from torch import nn

import virtualgpu
from tests.accuracy.published import published
from tests.accuracy.row import Row
from virtualgpu.run.ranks import launch

URL = "https://docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html"
GPUS = 2


def train(sharded: bool) -> dict[str, float]:
    """Peaks of one rank, in millions of bytes."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["LOCAL_RANK"])
    told = {}

    def note(when: str) -> None:
        told[when] = torch.cuda.max_memory_allocated(rank) / 1e6

    torch.cuda.set_device(rank)
    model = nn.Sequential(*[nn.Linear(2000, 2000).to(rank) for _ in range(20)])
    note("model")
    model = DistributedDataParallel(model, device_ids=[rank])
    note("after DDP")
    if sharded:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, foreach=False
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    outputs = model(torch.randn(20, 2000).to(rank))
    nn.functional.mse_loss(outputs, torch.randn(20, 2000).to(rank)).backward()
    note("before the step")
    optimizer.step()
    note("after the step, ZeRO" if sharded else "after the step")
    return told


def rows() -> list[Row]:
    with virtualgpu.gpus(2, like="V100"):
        told = launch(train, True, nprocs=2, dry=True)[0] | launch(train, False, nprocs=2, dry=True)[0]
    found = [(row, row.options["when"]) for row in published("zero_recipe")]
    return [row.beside(f"DDP and Adam: {when}", told[when], 3) for row, when in found]
