"""How the cost of virtual GPUs grows: with operations, GPUs, micro-batches and model size. Drawn into build/bench.png."""

import statistics

import torch
import torchvision
from accelerate import init_empty_weights
from matplotlib.figure import Figure
from torch import nn

import virtualgpu
from tests.bench.row import Row
from tests.bench.tools import BUILD, silent, timed, train

MODELS = ["resnet18", "resnet50", "resnet152", "vit_b_16", "vit_l_16"]


def rows() -> list[Row]:
    with silent():
        operations = {n: real(n, 2) for n in (50, 100, 200, 400, 800)}
        gpus = {n: real(200, n) for n in (1, 2, 4, 8)}
        pieces = {n: dry(lambda: deep(200, 2), n) for n in (1, 2, 4, 8, 16)}
        models = {name: model_step(name) for name in MODELS}
        shapes = [(made_empty(), made_dry()) for _ in range(5)]  # in turn
    accelerate, ours = (statistics.median(times) for times in zip(*shapes, strict=True))
    draw(operations, gpus, pieces, models)
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


def draw(operations, gpus, pieces, models) -> None:
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    panels = figure.subplots(1, 4)
    named = [("layers, on 2 GPUs", operations), ("GPUs, 200 layers", gpus), ("micro-batches, dry, 200 layers", pieces)]
    for axes, (name, times) in zip(panels, named, strict=False):
        axes.plot(list(times), [1e3 * seconds for seconds in times.values()], "o-")
        axes.set(xlabel=name, ylabel="forward and backward (ms)", xlim=(0, None))
        axes.set_ylim(0, 1.1e3 * max(times.values()))
    panels[3].barh(list(models), [1e3 * seconds for seconds in models.values()])
    panels[3].set(xlabel="dry training step (ms)")
    panels[3].invert_yaxis()
    figure.suptitle("What virtual GPUs cost on this machine (measured)", weight="bold")
    BUILD.mkdir(exist_ok=True)
    figure.savefig(BUILD / "bench.png", dpi=110)
