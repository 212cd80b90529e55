"""GPT-2 medium by Megatron-LM on one and two RTX 3090 Ti (mli/transformers-benchmarks, 2022): with NVLink, without, and tensor parallel.

Settings: a row of published.csv each, all that the notebook prints without gradients accumulated: sequences of 1024, bfloat16 with float32
gradients in one buffer, summed after the backward pass; vocabulary filled up to a multiple of 128; AdamW fused, over float32 copies of the
parameters. The model is ours, as Megatron-LM had it in 2022: one softmax for scale, mask and softmax, dropout .1, bias and GELU by
operations of PyTorch. The card is an RTX 3090 with the data sheet of a 3090 Ti (84 processors, 40 TFLOPS, 1008 GB/s). One rank is played.
"""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import virtualgpu
from tests.accuracy.published import Published, Row, program, published, ratio
from virtualgpu.hardware.specs import find_spec

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH, DROPOUT = 1024, 16, 24, 50304, 1024, 0.1
TI = {"processors": 84, "bandwidth": 1008e9}
FASTER = 40.0 / 35.6  # a 3090 Ti against a 3090, by the data sheets


class Copy(torch.autograd.Function):
    """Every rank has the input; its gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dist.all_reduce(dx)
        return dx


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dx):
        return dx


class CrossEntropy(torch.autograd.Function):
    """Of logits that ranks have columns of; in place, as Megatron-LM's."""

    @staticmethod
    def forward(ctx, logits, labels, parts):
        highest, wanted = logits.max(dim=-1)[0], labels % logits.shape[1]
        if parts > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX)
        logits -= highest[:, None]
        chosen = logits.gather(1, wanted[:, None])[:, 0]
        total = logits.exp_().sum(dim=-1)
        if parts > 1:
            dist.all_reduce(chosen)
            dist.all_reduce(total)
        ctx.save_for_backward(logits.div_(total[:, None]), wanted)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, dloss):
        probabilities, wanted = ctx.saved_tensors
        rows = torch.arange(len(wanted), device=wanted.device)
        probabilities[rows, wanted] -= 1
        return probabilities.mul_(dloss / len(wanted)), None, None


class Block(nn.Module):
    def __init__(self, parts: int):
        super().__init__()
        self.parts, self.heads = parts, HEADS // parts
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.up = nn.Linear(HIDDEN, 3 * HIDDEN // parts), nn.Linear(HIDDEN, 4 * HIDDEN // parts)
        self.out, self.down = nn.Linear(HIDDEN // parts, HIDDEN), nn.Linear(4 * HIDDEN // parts, HIDDEN)

    def attend(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        mixed = F.dropout(F.softmax(q @ k.transpose(-1, -2), dim=-1), DROPOUT) @ v
        return self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))

    def forward(self, x):
        into, whole = (Copy.apply, Sum.apply) if self.parts > 1 else (lambda x: x, lambda x: x)
        x = x + F.dropout(whole(self.attend(into(self.norms[0](x)))), DROPOUT)
        return x + F.dropout(whole(self.down(F.gelu(self.up(into(self.norms[1](x))), approximate="tanh"))), DROPOUT)


class GPT2(nn.Module):
    """forward gives the loss."""

    def __init__(self, parts: int):
        super().__init__()
        self.parts = parts
        self.words, self.places = nn.Embedding(VOCABULARY // parts, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks, self.norm = nn.Sequential(*[Block(parts) for _ in range(LAYERS)]), nn.LayerNorm(HIDDEN)

    def forward(self, tokens):
        x = self.words(tokens % (VOCABULARY // self.parts))
        x = Sum.apply(x) if self.parts > 1 else x
        x = F.dropout(x + self.places(torch.arange(LENGTH, device=tokens.device)), DROPOUT)
        x = self.norm(self.blocks(x))
        logits = F.linear(Copy.apply(x) if self.parts > 1 else x, self.words.weight)
        return CrossEntropy.apply(logits.flatten(0, 1).float(), tokens.flatten(), self.parts)


def seconds(row: Published, steps: int = 2) -> float:
    """Of the last step."""
    parallel = row.options["parallel"]
    card = find_spec(f"{row.card} NVLink")
    card = replace(card, rates={dtype: FASTER * rate for dtype, rate in card.rates.items()}, **TI)
    os.environ["NCCL_P2P_DISABLE"] = str(int("no NVLink" in parallel))
    with virtualgpu.dry_run(like=card, world_size=row.gpus, host=row.host):
        dist.init_process_group("nccl")
        model = GPT2(2 if parallel == "tensor" else 1).cuda().bfloat16()
        parameters = list(model.parameters())
        copies = [parameter.detach().float() for parameter in parameters]
        gradients = torch.zeros(sum(parameter.numel() for parameter in parameters), device="cuda")
        for parameter, copy, part in zip(
            parameters, copies, gradients.split([parameter.numel() for parameter in parameters]), strict=True
        ):
            copy.grad = part.view_as(copy)

            def add(parameter, total=copy.grad):
                total += parameter.grad
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(add)
        optimizer, clock = torch.optim.AdamW(copies, fused=True), virtualgpu.machine().clock
        for _ in range(steps):
            torch.cuda.synchronize()
            start = clock.host
            gradients.zero_()
            model(torch.zeros(row.batch, LENGTH, dtype=torch.int64).cuda()).backward()
            if parallel.startswith("DDP"):
                dist.all_reduce(gradients.div_(row.gpus))
            nn.utils.clip_grad_norm_(copies, 1.0)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, copies)
            torch.cuda.synchronize()
            took = clock.host - start
        dist.destroy_process_group()
    os.environ.pop("NCCL_P2P_DISABLE")
    return took


@program("https://github.com/mli/transformers-benchmarks")
def megatron() -> list[Row]:
    """As the module says."""
    found = {}
    for row in published("megatron"):
        parallel = row.options["parallel"]
        samples = row.batch * (row.gpus if parallel.startswith("DDP") else 1)
        found[parallel] = row.beside(f"GPT-2 medium, Megatron-LM, RTX 3090 Ti: {parallel}", samples / seconds(row))
    one, *others = found
    ratios = [ratio(f"GPT-2 medium, speed: {other} against one GPU", found[other], found[one]) for other in others]
    return [*found.values(), *ratios]
