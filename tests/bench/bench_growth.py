"""How the cost of virtual GPUs grows: with operations, GPUs, micro-batches and model size."""

import statistics

import torch
import torchvision
from accelerate import init_empty_weights
from torch import nn

import virtualgpu
from tests.bench.tools import Row, silent, timed, train

MODELS = ["resnet18", "vit_l_16"]


def rows() -> list[Row]:
    with silent():
        operations = {n: real(n, 2) for n in (100, 800)}
        gpus = {n: real(200, n) for n in (2, 8)}
        pieces = {n: dry(lambda: deep(200, 2), n) for n in (2, 16)}
        models = {name: model_step(name) for name in MODELS}
        shapes = [(made_empty(), made_dry()) for _ in range(5)]  # in turn
    accelerate, ours = (statistics.median(times) for times in zip(*shapes, strict=True))
    per_operation = operations[800] / operations[100] / 8
    per_gpu = gpus[8] / gpus[2]
    per_piece = pieces[16] / pieces[2] / 8
    return [
        Row("growth: 8 times the operations, cost of each", per_operation, "x", "< 1.3 x", per_operation < 1.3),
        Row("growth: the same work on 8 GPUs over 2", per_gpu, "x", "< 1.3 x", per_gpu < 1.3),
        Row("growth: 8 times the micro-batches, cost of each", per_piece, "x", "< 1.3 x", per_piece < 1.3),
        Row("growth: dry step of ResNet-18", 1e3 * models["resnet18"], "ms", "", True),
        Row("growth: dry step of ViT-L/16", 1e3 * models["vit_l_16"], "ms", "", True),
        Row("ViT-L made on shapes: accelerate over ours", accelerate / ours, "x", "", True),
    ]


def deep(layers: int, gpus: int) -> nn.ModuleList:
    """Layers dealt out to the GPUs in equal runs."""
    return nn.ModuleList(nn.Linear(8, 8).to(f"cuda:{at * gpus // layers}") for at in range(layers))


def through(stages: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in stages:
        x = layer(x.to(layer.weight.device))
    return x


def real(layers: int, gpus: int) -> float:
    """Seconds of forward and backward through so many layers on so many virtual GPUs, with numbers."""
    with virtualgpu.gpus(gpus):
        model, x = deep(layers, gpus), torch.ones(2, 8, device="cuda:0")
        return min(timed(lambda: through(model, x).sum().backward()) for _ in range(3))


def dry(make, pieces: int) -> float:
    """The same in a dry run, the batch cut into micro-batches."""
    with virtualgpu.gpus(2), virtualgpu.dry_run():
        model, x = make(), torch.ones(16, 8, device="cuda:0")
        return min(timed(lambda: [through(model, p).sum().backward() for p in x.chunk(pieces)]) for _ in range(3))


def model_step(name: str) -> float:
    with virtualgpu.dry_run(1, like="H100"):
        model = getattr(torchvision.models, name)().to("cuda:0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
        x, y = torch.empty(8, 3, 224, 224, device="cuda:0"), torch.zeros(8, dtype=torch.long, device="cuda:0")
        return timed(lambda: train(model, optimizer, nn.functional.cross_entropy, x, y))


def made_empty() -> float:
    def make():
        with init_empty_weights(include_buffers=True):
            torchvision.models.vit_l_16()

    return timed(make)


def made_dry() -> float:
    with virtualgpu.dry_run(1), torch.device("cuda:0"):
        return timed(torchvision.models.vit_l_16)
