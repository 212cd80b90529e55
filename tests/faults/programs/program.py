"""What the runner is given: two GPUs, a loader with a worker, a process of its own, a file at the end."""

import multiprocessing
import sys
import time

import torch
from torch import nn


def other(send):
    send.send(float(torch.ones(10, device="cuda:1").sum()))


if __name__ == "__main__":
    model = nn.Linear(100, 100).to("cuda:0")
    loader = torch.utils.data.DataLoader(torch.ones(400, 100), batch_size=10, num_workers=1)
    for batch in loader:
        model(batch.to("cuda:0")).sum().backward()
        time.sleep(0.02)
    receive, send = multiprocessing.Pipe(False)
    child = multiprocessing.get_context("spawn").Process(target=other, args=(send,))
    child.start()
    send.close()
    try:
        print(receive.recv(), int(model.bias.grad.sum()), flush=True)
    except EOFError:
        child.join()
        sys.exit(f"the other process ended with status {child.exitcode}")
    child.join()
