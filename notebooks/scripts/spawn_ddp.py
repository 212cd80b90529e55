"""DDP started by torch.multiprocessing.spawn, as the source notes do it; notebook 04 runs it beside torchrun's way."""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    n_gpus = torch.cuda.device_count() or 2  # without GPUs: two processes on the CPU
    with socket.socket() as free:  # a port that is free, not one written into the code
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(main_worker, nprocs=n_gpus, args=(n_gpus, port))


def main_worker(gpu, n_gpus, port):
    cuda = torch.cuda.is_available()
    batch_size, num_workers = 512 // n_gpus, 8 // n_gpus  # each process takes its share
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=n_gpus, rank=gpu
    )
    model = nn.Linear(64, 10)
    if cuda:
        torch.cuda.set_device(gpu)
        model = model.cuda(gpu)
    model = DistributedDataParallel(model, device_ids=[gpu] if cuda else None)
    x = torch.full((batch_size, 64), float(gpu), device=model.device)
    model(x).mean().backward()
    if gpu == 0:
        print(f"{n_gpus} processes, {batch_size} samples and {num_workers} workers each, one step done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":  # each process imports this file again, and must not spawn in turn
    main()
