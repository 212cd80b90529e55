"""Programs on several GPUs, other than language models: DDP, DataParallel, ZeRO, a pipeline. The settings are the functions' docstrings."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import virtualgpu
from tests import tutorial as experiment
from tests.accuracy.published import Published, Row, program, published, ratio
from virtualgpu.run.ranks import launch


def seconds_of_ddp(row: Published, steps: int = 3) -> float:
    """Of the last of so many steps: DDP orders its buckets anew after the first."""
    network = row.options.get("network")
    with virtualgpu.dry_run(like=row.card, world_size=row.gpus, gpus_per_node=4, network=network, host=row.host):
        dist.init_process_group("nccl")
        torch.backends.cuda.matmul.allow_tf32 = row.precision == "tf32"
        model = DistributedDataParallel(getattr(torchvision.models, row.model)().cuda())
        optimizer, clock, took = (
            torch.optim.SGD(model.parameters(), lr=1e-4, momentum=float(row.options.get("momentum", 0))),
            virtualgpu.machine().clock,
            0.0,
        )
        for _ in range(steps):
            torch.cuda.synchronize()
            start = clock.host
            if row.options.get("gradients") == "dropped":
                optimizer.zero_grad()
            if row.options.get("data") == "device":
                pictures = torch.empty(row.batch, 3, row.size, row.size, device="cuda")
            else:
                pictures = torch.empty(row.batch, 3, row.size, row.size, pin_memory=True).cuda(non_blocking=True)
            labels = torch.zeros(row.batch, dtype=torch.int64).cuda()
            with torch.autocast("cuda", torch.float16, enabled=row.precision == "AMP"):
                loss = F.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            took = clock.host - start
        dist.destroy_process_group()
        torch.backends.cuda.matmul.allow_tf32 = False
        return took


@program("https://github.com/mvsjober/ml-benchmarks/blob/master/results.md")
def ddp() -> list[Row]:
    """ResNet-50 by DDP on one to eight A100s and V100s, four in a node (mvsjober/ml-benchmarks, 2024 and 2026): images per second in all.

    Settings: a row of published.csv each: 32 random pictures a GPU, SGD without momentum, gradients never set to zero (they add up in place),
    batches copied while the GPU works; AMP or float32 as PyTorch's defaults have it. One rank is played. Of nine runs the last on each card.
    Networks are CSC's: Puhti's nodes (V100) have 200 Gb/s on two rails, Mahti's (A100) HDR InfiniBand, of which 200 Gb/s a node are taken.
    lambdal's script is NVIDIA's, with pictures made on the GPU; its two GPUs of an RTX 3090 and 4090 are from its logs.
    """
    found, firsts = [], {}
    for row in published("ddp"):
        what = f"{row.model}, DDP, {row.precision}, batch {row.batch}, {row.gpus} {row.card}"
        found.append(row.beside(what, row.gpus * row.batch / seconds_of_ddp(row)))
        one = firsts.setdefault(row._replace(gpus=1, settings="", figure=0, missed=""), found[-1])
        if one is not found[-1]:
            found.append(ratio(f"{what} against one", found[-1], one))
    return found


def seconds_of_data_parallel(row: Published) -> float:
    """Of the third step."""
    model = getattr(torchvision.models, row.model)()
    if row.gpus > 1:
        model = nn.DataParallel(model)
    model, images = model.cuda(), torch.randn(row.batch, 3, row.size, row.size)
    labels, clock = torch.zeros(row.batch, dtype=torch.int64, device="cuda"), virtualgpu.machine().clock
    for _ in range(3):
        torch.cuda.synchronize()
        start = clock.host
        model.zero_grad()
        nn.functional.cross_entropy(model(images.cuda()), labels).backward()
        torch.cuda.synchronize()
    return clock.host - start


@program("https://github.com/ryujaehun/pytorch-gpu-benchmark")
def data_parallel() -> list[Row]:
    """Training of torchvision's models by nn.DataParallel on one, two and four GPUs, as ryujaehun/pytorch-gpu-benchmark timed it on three cards.

    Settings: 12 random images a GPU, 1000 classes, cross-entropy, forward and backward without an optimizer, the images' copy to the first GPU in
    it; float32; the median of 50 steps; the first network of each of the source's families. PyTorch 1.4 to 1.8. Cards
    without NVLink, but the A100. What is judged is how much longer a step takes on several GPUs than on one, which is Python's lock, the copies
    of the modules, and the broadcast. The lock's share and the copies' cost (timing/host.py) are from the same source's inference, not
    from these.
    """
    found: dict[tuple, Row] = {}
    for row in published("data_parallel"):
        with virtualgpu.dry_run(row.gpus, like=row.card, host=row.host):
            what = f"{row.model}, DataParallel on {row.gpus}, {row.card}"
            found[row.card, row.model, row.gpus] = row.beside(what, 1000 * seconds_of_data_parallel(row))
    return [
        ratio(f"time on {gpus} against 1: {row.what}", row, found[card, model, 1])
        for (card, model, gpus), row in found.items()
        if gpus > 1
    ]


def zero_peaks(sharded: bool) -> dict[str, float]:
    """Peaks of one rank, in millions of bytes."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

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


@program("https://docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html", gpus=2)
def zero_recipe() -> list[Row]:
    """PyTorch's recipe on ZeroRedundancyOptimizer: memory of DDP with Adam, sharded or not.

    Settings: 2 GPUs, 20 x Linear(2000, 2000), batch 20, Adam; peak allocated in MB of a million bytes, cut off after the point.
    foreach=False, since the recipe is of 2021. The card is not published and changes nothing.
    """
    with virtualgpu.gpus(2, like="V100"):
        told = launch(zero_peaks, True, nprocs=2, dry=True)[0] | launch(zero_peaks, False, nprocs=2, dry=True)[0]
    found = [(row, row.options["when"]) for row in published("zero_recipe")]
    return [row.beside(f"DDP and Adam: {when}", told[when], 3) for row, when in found]


@program(
    "https://web.archive.org/web/2023/https://pytorch.org/tutorials/intermediate/model_parallel_tutorial.html", gpus=2
)
def tutorial() -> list[Row]:
    """PyTorch's model-parallel tutorial: ResNet-50 on two GPUs, in halves and as a pipeline.

    Settings: batch 120 of 128 x 128, SGD, two GPUs that the tutorial does not name: two halves of a K80 here. The experiment is tests/tutorial.py.
    """
    slower, faster = experiment.simulated()
    told = {
        f"split={size}": (f"pipeline, split size {size}: speed against one GPU", 1 + faster[size], 10)
        for size in faster
    }
    told["halves=time"] = "ResNet-50 in halves: time against one GPU", 1 + slower, 10
    told["split=best"] = "best of nine split sizes", max(faster, key=faster.get), 0
    return [row.beside(*told[row.settings]) for row in published("tutorial")]
