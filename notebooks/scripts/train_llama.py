"""Llama as a script whose layout is given by options; notebook 12 plans a run with it, one rank of many in a dry run.

torchrun --nnodes=4 --nproc-per-node=8 train_llama.py --tp 2 --checkpointing selective
python -m virtualgpu --dry --like H100 --world-size 32 --gpus-per-node 8 train_llama.py --tp 2
python -m virtualgpu fit --like H100 --world-size 32 --vary tp=1,2,4 train_llama.py --layers 4

Gathers and computing are in bfloat16; shards, sums of gradients and AdamW's averages in float32, as torchtitan has them.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

try:
    from notebooks.scripts.llama import Block, Full, Llama, Selective, tensor_parallel
except ImportError:  # as a script, beside llama.py
    from llama import Block, Full, Llama, Selective, tensor_parallel

MODELS = {  # the sizes of Llama 3.2 3B (with a last layer of its own), Llama 3.1 8B and Qwen 2.5 14B
    "3B": dict(layers=28, dim=3072, heads=24, kv_heads=8, hidden=8192, words=128256),
    "8B": dict(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, words=128256),
    "14B": dict(layers=48, dim=5120, heads=40, kv_heads=8, hidden=13824, words=152064),
}
CHECKPOINTING = {"none": Block, "selective": Selective, "full": Full}


def build(sizes, length, tp=1, replicas=1, checkpointing="none", **options):
    """A Llama over all ranks: layers cut over tp of them; parameters sharded over the rest (FSDP), or in each of `replicas` groups (HSDP)."""
    shards = dist.get_world_size() // (tp * replicas)
    mesh = dist.init_device_mesh("cuda", (replicas, shards, tp), mesh_dim_names=("replicas", "shards", "tp"))
    with torch.device("meta"):  # shapes only: the whole need not fit
        model = Llama(**sizes, length=length, block=CHECKPOINTING[checkpointing], **options)
    if tp > 1:
        tensor_parallel(model, mesh["tp"])
    data = mesh["replicas", "shards"] if replicas > 1 else mesh["shards"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=block is not model.blocks[-1])
    return fully_shard(model, mesh=data, mp_policy=policy).to_empty(device="cuda")


def train_step(model, optimizer, texts, micro_batch, cut_scores):
    """One optimizer step with this rank's texts (int64, [texts, tokens]), so many at a time. cut_scores: the scores are cut by words (tp)."""
    optimizer.zero_grad()
    parts = texts.split(micro_batch)
    for number, part in enumerate(parts, 1):
        model.set_requires_all_reduce(number == len(parts))  # between HSDP's replicas: once a step
        with loss_parallel() if cut_scores else contextlib.nullcontext():
            scores = model(part).flatten(0, 1)
            loss = F.cross_entropy(scores.float(), part.flatten()) / len(parts)
            del scores
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--layers", type=int, help="fewer blocks than the model has, for a quick look")
    parser.add_argument("--texts", type=int, default=64, help="in a step, of all ranks together")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a text")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, default="none")
    parser.add_argument("--micro-batch", type=int, default=1, help="texts at a time")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl")
    sizes = MODELS[options.model] | ({"layers": options.layers} if options.layers else {})
    model = build(sizes, options.length, options.tp, options.replicas, options.checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    texts = torch.zeros(
        options.texts * options.tp // dist.get_world_size(), options.length, dtype=torch.long, device="cuda"
    )
    for _ in range(options.steps):
        train_step(model, optimizer, texts, options.micro_batch, options.tp > 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
