"""A pipeline as a script, for torchrun: each rank holds one stage of the model; notebook 11 walks through it.

    torchrun --standalone --nproc-per-node=2 train_pipeline.py

Eight layers learn the digits, by 1F1B in as many stages as there are ranks (1, 2, 4 or 8). Only the first rank reads the images, only
the last one the labels. On a machine without GPUs: python -m virtualgpu --gpus 2 -m torch.distributed.run, and the same options.
"""

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where helpers/ is
from helpers.data import digits


def make_model():
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(nn.Flatten(), *middle, nn.Linear(64, 10))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # torchrun sets them
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=2), device_id=device)

    layers = 8 // world_size
    part = make_model()[rank * layers : (rank + 1) * layers].to(device)
    stage = PipelineStage(part, rank, world_size, device)
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)  # each rank updates its own layers

    images, labels = digits()
    order = torch.Generator().manual_seed(0)  # of the samples, the same on all ranks
    for epoch in range(options.epochs):
        total = 0.0
        batches = torch.randperm(len(images), generator=order).split(options.batch_size)[:-1]  # the last one is smaller
        for batch in batches:
            inputs = [images[batch].to(device)] if rank == 0 else []
            losses = []
            targets = {"target": labels[batch].to(device), "losses": losses} if rank == world_size - 1 else {}
            optimizer.zero_grad()
            schedule.step(*inputs, **targets)
            optimizer.step()
            total += sum(loss.item() for loss in losses) / options.micro_batches
        if rank == world_size - 1:
            print(f"epoch {epoch}: loss {total / len(batches):.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
