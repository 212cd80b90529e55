"""Notebook 04's word model as a script, on one GPU or by DDP; notebook 04 asks where its step goes, notebook 07 which batch fits.

python -m virtualgpu --explain --world-size 4 train_words.py
python -m virtualgpu fit --like T4,L4 --vary batch-size=1024..65536 train_words.py
torchrun --standalone --nproc-per-node=4 train_words.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=512, help="words per GPU")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
model = nn.Sequential(nn.Embedding(1000, 512), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 20_000)).cuda()
if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
x, y = (torch.zeros(options.batch_size, dtype=torch.long, device="cuda") for _ in range(2))
for _ in range(options.steps):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
if dist.is_initialized():
    dist.destroy_process_group()
