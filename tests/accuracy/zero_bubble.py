"""Zero Bubble Pipeline Parallelism (Qi and others, 2023), tables 3 and 5: the bubble of 1F1B.

Settings: the 6.2B model: 30 layers of hidden size 4096, 32 heads, sequence 1024, micro-batches of 3, over 8 stages (the first and the
last have 3 layers and the embedding or the head, the others 4), A100s of 80 GB. Bubble: the share of the longest stage's time in which
it does not work, (cost - m (forward + backward)) / cost, as the paper defines it. Model and stages are ours, the schedule is PyTorch's.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import virtualgpu
from tests.accuracy.published import Row, program, published
from virtualgpu.run.ranks import launch

STAGES, HIDDEN, HEADS, VOCABULARY, LENGTH, MICRO = 8, 4096, 32, 50304, 1024, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = (
            part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def stage_of(index: int) -> nn.Module:
    edges = index in (0, STAGES - 1)
    blocks = [Block() for _ in range(3 if edges else 4)]
    if index == 0:
        return nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *blocks)
    return (
        nn.Sequential(*blocks, nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)) if edges else nn.Sequential(*blocks)
    )


def loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def stage(micro_batches: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """By number of micro-batches: seconds of a step here, and those in which this stage worked."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    index = int(os.environ["RANK"])
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    module = stage_of(index).to(device, torch.bfloat16)
    clock, told = virtualgpu.machine().clock, {}
    for count in micro_batches:
        schedule = Schedule1F1B(PipelineStage(module, index, STAGES, device), count, loss_fn=loss)
        for _ in range(2):
            torch.distributed.barrier()  # all begin together, whenever their parameters had come
            torch.cuda.synchronize()
            start, computing = clock.host, clock.computing[index]
            tokens = torch.zeros(count * MICRO, LENGTH, dtype=torch.int64, device=device)
            if index == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=tokens) if index == STAGES - 1 else schedule.step()
            torch.cuda.synchronize()
        told[count] = clock.host - start, clock.computing[index] - computing
        module.zero_grad()
    return told


@program("https://arxiv.org/abs/2401.10241", gpus=8)
def zero_bubble() -> list[Row]:
    """As the module says."""
    table = {int(row.options["micro_batches"]): row for row in published("zero_bubble")}
    with virtualgpu.gpus(STAGES, like="A100-80GB"):
        told = launch(stage, tuple(table), nprocs=STAGES, dry=True, timeout=600)
    found = []
    for count, row in table.items():
        cost, busy = (max(rank[count][at] for rank in told) for at in range(2))
        found.append(row.beside(f"1F1B, 8 stages, {count} micro-batches: bubble", 1 - busy / cost, 10))
    return found
