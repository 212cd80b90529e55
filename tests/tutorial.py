"""The experiment of PyTorch's model-parallel tutorial, in a dry run on two T4s: for the test that holds the clock to it, and the bench."""

import pytest
import torch
from torch import nn

import virtualgpu
from tests.virtualgpu.programs import PipelinedResNet, SplitResNet

resnet50 = pytest.importorskip("torchvision").models.resnet50
PLACES = ("cuda:0", "cuda:1", (3, 4, 6, 3), 1000)
SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)


def simulated(splits: tuple[int, ...] = SPLITS) -> tuple[float, dict[int, float]]:
    """Model parallel over one GPU in time, less 1 (0.07: 7 % slower); {split size: how much faster a pipeline is than one GPU}."""
    single = seconds(lambda: resnet50().to("cuda:0"))
    pipelines = {size: seconds(lambda s=size: PipelinedResNet(*PLACES, split_size=s)) for size in splits}
    slower = seconds(lambda: SplitResNet(*PLACES)) / single - 1
    return slower, {size: single / time - 1 for size, time in pipelines.items()}


def seconds(make) -> float:
    """Simulated seconds of the second training step on two T4s."""
    with virtualgpu.gpus(2, like="T4"), virtualgpu.dry_run():
        model, clock = make(), virtualgpu.machine().clock
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for _ in range(2):
            start = clock.host
            optimizer.zero_grad()
            out = model(torch.randn(120, 3, 128, 128).to("cuda:0"))
            nn.functional.mse_loss(out, torch.zeros(120, 1000).to(out.device)).backward()
            optimizer.step()
            clock.wait()
        return clock.host - start
