"""DDP started by torch.multiprocessing.spawn, as the source notes do it; notebook 04 runs it beside torchrun's way."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where helpers/ is
from helpers.data import digits


def main_worker(gpu, n_gpus, address, path):
    """One step on this process's share of 512 images. Process 0 saves the averaged gradient to path."""
    cuda = torch.cuda.device_count() >= n_gpus
    dist.init_process_group("nccl" if cuda else "gloo", init_method=address, world_size=n_gpus, rank=gpu)

    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    if cuda:
        torch.cuda.set_device(gpu)
        model = model.cuda(gpu)
    model = DistributedDataParallel(model, device_ids=[gpu] if cuda else None)

    data = TensorDataset(*digits())
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=512 // n_gpus, sampler=sampler)  # each process takes its share
    images, labels = next(iter(loader))
    scores = model(images.flatten(1).to(model.device))
    nn.functional.cross_entropy(scores, labels.to(model.device)).backward()
    if gpu == 0:
        torch.save(model.module.weight.grad.cpu(), path)
    dist.destroy_process_group()
