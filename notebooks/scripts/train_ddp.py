"""Data-parallel training as a script, for torchrun; notebook 08 walks through it.

    torchrun --standalone --nproc-per-node=2 train_ddp.py --checkpoint build/ddp.pt

Each rank trains on its share of the digits, on a GPU of its own. Rank 0 saves after every epoch; a script that is started again,
by hand or by torchrun after a crash, goes on from there. On a machine without GPUs: python -m virtualgpu --gpus 2 -m
torch.distributed.run, and the same options.
"""

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where helpers/ is
from helpers.data import digits


def save(state: dict, path: Path) -> None:
    """Whole or not at all: a file has its name only when all of it is written (lesson 01)."""
    part = path.with_name(f"{path.name}.part")
    torch.save(state, part)
    os.replace(part, path)


def load(path: Path, device: torch.device) -> dict:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        why = str(error).strip().splitlines()[0]
        sys.exit(
            f"{path.name} is truncated, or no checkpoint ({why}). Load an earlier checkpoint, or delete it to begin anew."
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])  # torchrun sets them
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=2), device_id=device)
    world_size = dist.get_world_size()

    data = TensorDataset(*digits())
    sampler = DistributedSampler(data)  # knows rank and world size from the group
    loader = DataLoader(data, batch_size=64 // world_size, sampler=sampler, pin_memory=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    ddp = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    first = 0
    if options.checkpoint.exists():  # every rank loads what rank 0 saved
        state = load(options.checkpoint, device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same after a restart
        total = torch.zeros(2, device="cuda")
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            optimizer.zero_grad()
            scores = ddp(x)
            loss = nn.functional.cross_entropy(scores, y)
            loss.backward()  # gradients are averaged over the ranks in here
            optimizer.step()
            total += torch.stack([loss.detach() * len(y), (scores.argmax(1) == y).sum()])
        dist.all_reduce(total)  # sums of all ranks
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            save(state, options.checkpoint)
            loss, correct = (total / len(sampler) / world_size).tolist()
            print(f"epoch {epoch}: loss {loss:.2f}, {correct:.0%} right", flush=True)
        dist.barrier()  # nobody goes on before the checkpoint is there
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
