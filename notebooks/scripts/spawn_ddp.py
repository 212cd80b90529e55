"""DDP started by torch.multiprocessing.spawn, as older code does it; notebook 09 runs it beside torchrun's way.

    python spawn_ddp.py tcp://127.0.0.1:2568 build/gradient.pt

One step of 512 images, shared by as many processes as there are GPUs.
"""

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
    batch_size, num_workers = 512 // n_gpus, max(1, 2 // n_gpus)  # each process takes its share
    dist.init_process_group("nccl", init_method=address, world_size=n_gpus, rank=gpu)

    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    torch.cuda.set_device(gpu)
    model = model.cuda(gpu)
    model = DistributedDataParallel(model, device_ids=[gpu])

    data = TensorDataset(*digits())
    sampler = DistributedSampler(data, shuffle=False)
    # a spawned process would spawn its workers, too, and each would import PyTorch once more
    workers = {"num_workers": num_workers, "multiprocessing_context": "fork"}
    loader = DataLoader(data, batch_size, sampler=sampler, pin_memory=True, **workers)
    images, labels = next(iter(loader))
    scores = model(images.flatten(1).cuda(gpu, non_blocking=True))
    nn.functional.cross_entropy(scores, labels.cuda(gpu, non_blocking=True)).backward()
    if gpu == 0:
        torch.save(model.module.weight.grad.cpu(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    n_gpus = torch.cuda.device_count()
    torch.multiprocessing.spawn(main_worker, nprocs=n_gpus, args=(n_gpus, sys.argv[1], sys.argv[2]))
