"""Two launches, as a notebook makes them."""

import sys
import time

import torch
import torch.distributed as dist

import virtualgpu


def work(steps):
    x = torch.ones(1000, device="cuda")
    for _ in range(steps):
        dist.all_reduce(x)
        x /= dist.get_world_size()
        time.sleep(0.01)
    return float(x.sum())


if __name__ == "__main__":
    nprocs = int((sys.argv[1:] or ["2"])[0])
    virtualgpu.gpus(max(1, nprocs), memory="1 GB")
    for count in (40, 80):
        found = virtualgpu.launch(work, count, nprocs=nprocs, timeout=25)
        assert len(found) == nprocs
        print(found[:2], flush=True)
    print("done")
