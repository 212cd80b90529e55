"""Two launches, as a notebook makes them."""

import time

import torch
import torch.distributed as dist

import helpers


def work(steps):
    x = torch.ones(1000, device="cuda")
    for _ in range(steps):
        dist.all_reduce(x)
        x /= 2
        time.sleep(0.01)
    return float(x.sum())


if __name__ == "__main__":
    helpers.gpus(2, memory="1 GB")
    for count in (40, 80):
        print(helpers.launch(work, count, nprocs=2, timeout=25), flush=True)
    print("done")
