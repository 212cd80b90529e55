"""A small training, for fit and --explain: its steps take a while."""

import sys
import time

import torch
from torch import nn

if __name__ == "__main__":
    batch_size = next((int(word.partition("=")[2]) for word in sys.argv if word.startswith("--batch-size")), 8)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3000):  # it is ended before; where nobody does, it runs for minutes
        optimizer.zero_grad()
        model(torch.ones(batch_size, 256, device="cuda")).sum().backward()
        optimizer.step()
        time.sleep(0.1)
