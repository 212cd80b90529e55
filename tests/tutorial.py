"""The experiment of PyTorch's model-parallel tutorial, in a dry run: for the test that holds the clock to it, and the bench.

The tutorial (2019) names neither cards nor host. Its own times (3.75 s for three batches on one GPU) are those of a slow card: taken here
are two halves of a Tesla K80, by its data sheet (NVIDIA, 2015: 4.37 TFLOPS with its highest clock, 240 GB/s), and a host of 36 us an operation.
"""

import pytest
import torch
from torch import nn

import virtualgpu
from tests.virtualgpu.programs import PipelinedResNet, SplitResNet
from virtualgpu.hardware.datasheet import PCIE3, Link

resnet50 = pytest.importorskip("torchvision").models.resnet50
PLACES = ("cuda:0", "cuda:1", (3, 4, 6, 3), 1000)
# The halves share a switch of PCI Express: with peer access it gives 0.66 of its line (three RTX 4090: tinygrad/open-gpu-kernel-modules#6) to 0.90
PEER = Link(0.66 * PCIE3.bandwidth, PCIE3.latency)
CARD, HOST = (
    virtualgpu.Spec("Tesla K80", 11441 << 20, (6, 0), 13, {torch.float32: 4.37e12}, 240e9, PEER, PCIE3),
    "2023",
)
SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)


def simulated(splits: tuple[int, ...] = SPLITS, like=CARD, host: str = HOST) -> tuple[float, dict[int, float]]:
    """Model parallel over one GPU in time, less 1 (0.07: 7 % slower); {split size: how much faster a pipeline is than one GPU}."""
    single = seconds(lambda: resnet50().to("cuda:0"), like, host)
    pipelines = {size: seconds(lambda s=size: PipelinedResNet(*PLACES, split_size=s), like, host) for size in splits}
    slower = seconds(lambda: SplitResNet(*PLACES), like, host) / single - 1
    return slower, {size: single / time - 1 for size, time in pipelines.items()}


def seconds(make, like=CARD, host: str = HOST) -> float:
    """Simulated seconds of the second training step on two such cards."""
    with virtualgpu.gpus(2, like=like, host=host), virtualgpu.dry_run():
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
