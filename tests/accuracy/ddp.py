"""ResNet-50 by DDP on one to eight A100s and V100s, four in a node (mvsjober/ml-benchmarks, 2024 and 2026): images per second in all.

Settings: a row of published.csv each: 32 random pictures a GPU, SGD without momentum, gradients never set to zero (they add up in place),
batches copied while the GPU works; AMP or float32 as PyTorch's defaults have it. One rank is played. Of nine runs the last on each card.
Networks are CSC's: Puhti's nodes (V100) have 200 Gb/s on two rails, Mahti's (A100) HDR InfiniBand, of which 200 Gb/s a node are taken.
lambdal's script is NVIDIA's, with pictures made on the GPU; its two GPUs of an RTX 3090 and 4090 are from its logs.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel

import virtualgpu
from tests.accuracy.published import Published, published
from tests.accuracy.row import Row, ratio

URL = "https://github.com/mvsjober/ml-benchmarks/blob/master/results.md"


def seconds(row: Published, steps: int = 3) -> float:
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


def rows() -> list[Row]:
    found, firsts = [], {}
    for row in published("ddp"):
        what = f"{row.model}, DDP, {row.precision}, batch {row.batch}, {row.gpus} {row.card}"
        found.append(row.beside(what, row.gpus * row.batch / seconds(row)))
        one = firsts.setdefault(row._replace(gpus=1, settings="", figure=0, missed=""), found[-1])
        if one is not found[-1]:
            found.append(ratio(f"{what} against one", found[-1], one))
    return found
