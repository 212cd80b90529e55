"""transformers' page on training with several GPUs: GPT-2 by DataParallel and by DDP on two TITAN RTX, with and without NVLink.

Settings: run_clm.py on gpt2 (124M), batch 4 a GPU, 1024 tokens, AdamW, 200 steps, PyTorch 1.8, float32; the two cards joined by NV2,
or NCCL_P2P_DISABLE=1. GPT-2 is ours, with the sizes and dropouts of the published model and attention in plain operations, as
transformers had it then; AdamW step by step over the parameters, as its own was. DataParallel averages in the first GPU.

Missed: without NVLink, 148 ms a step were lost and some 55 are simulated. The way through the host's memory is that of other machines
(hardware/data/links.toml); this one's slots (x16 or x8) are not published.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import nn

import virtualgpu
from tests.accuracy.published import Row, program, published, ratio
from virtualgpu.run.ranks import launch

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH, BATCH, DROPOUT = 768, 12, 12, 50257, 1024, 4, 0.1
CARD = "TITAN RTX NVLink"
HOST = "2021"  # what the clock takes for the processor, by the date


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), persistent=False)

    def attend(self, x):
        q, k, v = (part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(HIDDEN, dim=2))
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        scores = torch.where(self.seen[: x.shape[1], : x.shape[1]], scores, torch.full((), -1e4, device=x.device))
        mixed = F.dropout(F.softmax(scores, dim=-1), DROPOUT) @ v
        return F.dropout(self.out(mixed.transpose(1, 2).contiguous().view(x.shape)), DROPOUT)

    def forward(self, x):
        x = x + self.attend(self.norms[0](x))
        y = self.up(self.norms[1](x))
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3))))
        return x + F.dropout(self.down(y), DROPOUT)


class GPT2(nn.Module):
    """forward gives the loss, as transformers' does."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(LAYERS)]), nn.LayerNorm(HIDDEN)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = F.linear(self.norm(self.blocks(F.dropout(x, DROPOUT))), self.words.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def seconds(parallel: nn.Module, batch: int) -> float:
    """Of the third step."""
    optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)
    clock = virtualgpu.machine().clock
    for _ in range(3):
        torch.cuda.synchronize()
        start = clock.host
        parallel(torch.zeros(batch, LENGTH, dtype=torch.int64).cuda()).mean().backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0, foreach=False)
        optimizer.step()
        parallel.zero_grad(set_to_none=False)  # as PyTorch did then
        torch.cuda.synchronize()
    return clock.host - start


def rank(peer_to_peer: bool) -> float:
    from torch.nn.parallel import DistributedDataParallel

    os.environ["NCCL_P2P_DISABLE"] = str(int(not peer_to_peer))
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    return seconds(DistributedDataParallel(GPT2().cuda(), device_ids=[device]), BATCH)


@program("https://huggingface.co/docs/transformers/v4.20.1/en/perf_train_gpu_many", gpus=2)
def gpt2() -> list[Row]:
    """As the module says."""
    with virtualgpu.gpus(2, like=CARD, host=HOST):
        told = {
            "DDP, NVLink": launch(rank, True, nprocs=2, dry=True, timeout=300)[0],
            "DDP, no NVLink": launch(rank, False, nprocs=2, dry=True, timeout=300)[0],
        }
        with virtualgpu.dry_run():
            told["DP, NVLink"] = seconds(nn.DataParallel(GPT2().cuda()), 2 * BATCH)
    found = {}
    for row in published("gpt2"):
        steps, parallel = int(row.options["steps"]), row.options["parallel"]
        found[parallel] = row.beside(f"GPT-2, 2 TITAN RTX, {steps} steps: {parallel}", steps * told[parallel])
    pairs = ("DDP, NVLink", "DP, NVLink"), ("DDP, no NVLink", "DDP, NVLink")
    ratios = [ratio(f"GPT-2, time: {one} against {other}", found[one], found[other], 10) for one, other in pairs]
    return [*found.values(), *ratios]
