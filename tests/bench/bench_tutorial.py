"""The simulated clock beside the figures that PyTorch's model-parallel tutorial printed from two real GPUs (nothing fitted to it)."""

import torch
from torch import nn
from torchvision.models import resnet50

from helpers import virtual
from tests.bench.row import Row
from tests.bench.tools import silent
from tests.programs import PipelinedResNet, SplitResNet

PLACES = ("cuda:0", "cuda:1", (3, 4, 6, 3), 1000)
SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)


def rows() -> list[Row]:
    with silent():
        single = seconds(lambda: resnet50().to("cuda:0"))
        overhead = 100 * (seconds(lambda: SplitResNet(*PLACES)) / single - 1)
        faster = {n: 100 * (single / seconds(lambda n=n: PipelinedResNet(*PLACES, split_size=n)) - 1) for n in SPLITS}
    best = max(faster, key=faster.get)
    return [
        Row(
            "tutorial: model parallel, slower than one GPU (simulated)", overhead, "%", "7 +- 5 %", 2 <= overhead <= 12
        ),
        Row("tutorial: best of nine split sizes (simulated)", best, "", "12", best == 12),
        Row("tutorial: split size 20, faster (simulated)", faster[20], "%", "49 +- 10 %", 39 <= faster[20] <= 59),
        Row("tutorial: split size 12, faster (simulated)", faster[12], "%", "54 +- 10 %", 44 <= faster[12] <= 64),
    ]


def seconds(make) -> float:
    """Simulated seconds of the second training step on two T4s."""
    with virtual.gpus(2, like="T4"), virtual.dry_run():
        model, clock = make(), virtual.machine().clock
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for _ in range(2):
            start = clock.host
            optimizer.zero_grad()
            out = model(torch.randn(120, 3, 128, 128).to("cuda:0"))
            nn.functional.mse_loss(out, torch.zeros(120, 1000).to(out.device)).backward()
            optimizer.step()
            clock.wait()
        return clock.host - start
