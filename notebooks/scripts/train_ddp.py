"""Data-parallel training as a script, for torchrun; notebook 09 walks through it.

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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where helpers/ is
from helpers.data import digits


def start():
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])  # torchrun sets them
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=2), device_id=device)

    group, gpus = os.environ["GROUP_RANK"], torch.cuda.device_count()
    place = f"RANK {rank}  LOCAL_RANK {local_rank}  GROUP_RANK {group}  {device} of {gpus}"
    places = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(place, places)  # rank 0 gets everyone's
    if rank == 0:
        print(*places, sep="\n", flush=True)
    return rank, device


def train(path, epochs):
    rank, device = start()
    data = TensorDataset(*digits())
    sampler = DistributedSampler(data)  # knows rank and world size from the group
    loader = DataLoader(data, 64 // dist.get_world_size(), sampler=sampler, pin_memory=True)

    torch.manual_seed(0)  # the same model on every rank
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    model = nn.Sequential(nn.Flatten(), *layers).to(device)
    ddp = DDP(model, device_ids=[device.index])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + rank)  # but dropouts of its own

    for epoch in range(resume(path, model, optimizer), epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same after a restart
        total = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            scores = ddp(x)
            loss = nn.functional.cross_entropy(scores, y)
            loss.backward()  # gradients are averaged over the ranks in here
            optimizer.step()
            total += torch.stack([loss.detach() * len(y), (scores.argmax(1) == y).sum()])
        dist.all_reduce(total)  # sums of all ranks
        checkpoint(path, model, optimizer, epoch)
        if rank == 0:
            loss, correct = (total / sampler.total_size).tolist()
            print(f"epoch {epoch}: loss {loss:.2f}, {correct:.0%} right", flush=True)
    dist.destroy_process_group()


def checkpoint(path, model, optimizer, epoch):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}
    generators = [None] * world_size if rank == 0 else None
    dist.gather_object(own, generators)
    if rank == 0:
        weights, momentum = model.state_dict(), optimizer.state_dict()
        save({"model": weights, "optimizer": momentum, "epoch": epoch, "generators": generators}, path)
    dist.barrier()  # nobody goes on before the checkpoint is there


def save(state, path):
    """Whole or not at all: a file has its name only when all of it is written (lesson 01)."""
    part = path.with_name(f"{path.name}.part")
    torch.save(state, part)
    os.replace(part, path)


def resume(path, model, optimizer):
    """The epoch to begin with."""
    if not path.exists():
        return 0
    state = load(path)  # every rank reads what rank 0 saved
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    generators = state["generators"]
    if len(generators) == dist.get_world_size():  # with fewer ranks, or more, they start anew
        own = generators[dist.get_rank()]
        torch.set_rng_state(own["cpu"])
        torch.cuda.set_rng_state(own["cuda"])
    return state["epoch"] + 1


def load(path):
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        why = str(error).strip().splitlines()[0]
        sys.exit(
            f"{path.name} is truncated, or no checkpoint ({why}). Load an earlier checkpoint, or delete it to begin anew."
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    train(options.checkpoint, options.epochs)
