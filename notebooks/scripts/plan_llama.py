"""What a training run of Llama would take on GPUs that are not there: notebook 12 searches with it, data/make_layouts.py tabulates it.

A run is a dict: model, card, gpus, network, texts (in a step, of all GPUs together), length (tokens of a text), and
norm where it is not nn.RMSNorm. A layout is a dict: tp, replicas, checkpointing, micro_batch; what is left of the GPUs shards the parameters.
"""

import contextlib
import csv
import itertools
import logging
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import virtualgpu
from notebooks.scripts.train_llama import CHECKPOINTING, MODELS, build, train_step

GIB = 2**30
FILE = Path(__file__).parents[2] / "data" / "layouts.csv"
LAYOUT = ("tp", "replicas", "checkpointing", "micro_batch")
NODE = 8  # GPUs
ROOM = "2000 GB"  # of a made-up card of the same speed, so that a layout that does not fit has its bytes, too


RUNS = {  # whose layouts are in data/layouts.csv
    "8B on 8 A100-80GB, one node": dict(model="8B", card="A100-80GB", gpus=8, network=None, texts=16, length=8192),
    "8B on 32 H100, Ethernet 100": dict(
        model="8B", card="H100", gpus=32, network="Ethernet 100", texts=64, length=8192
    ),
    "3B on 16 A100, Ethernet 100": dict(
        model="3B", card="A100", gpus=16, network="Ethernet 100", texts=16, length=4096
    ),
    "14B on 32 A100-80GB, InfiniBand HDR": dict(
        model="14B", card="A100-80GB", gpus=32, network="HDR", texts=32, length=4096
    ),
}


def possible(run, tp, replicas, checkpointing, micro_batch):
    """Whether GPUs and texts can be divided so."""
    groups = run["gpus"] // tp
    if (
        run["gpus"] % tp
        or tp > NODE
        or groups % replicas
        or run["texts"] % groups
        or checkpointing not in CHECKPOINTING
    ):
        return False
    return micro_batch <= run["texts"] // groups and run["texts"] // groups % micro_batch == 0


def layouts(run):
    """All layouts of a run that are possible, with all GPUs in one group, with replicas of a node each, and of two."""
    replicas = sorted({1, max(1, run["gpus"] // (2 * NODE)), run["gpus"] // NODE})
    for tp, copies, how, texts in itertools.product((1, 2, 4, 8), replicas, CHECKPOINTING, (1, 2, 4)):
        if possible(run, tp, copies, how, texts):
            yield {"tp": tp, "replicas": copies, "checkpointing": how, "micro_batch": texts}


def room(run):
    """GiB that a plan may take: lesson 10's measure, a fifth of the card stays free."""
    return 0.8 * virtualgpu.SPECS[run["card"]].memory / GIB


def table(name):
    """Layouts of a run of RUNS with seconds and GiB, from data/layouts.csv: [(layout, seconds, GiB), ...]."""
    found = []
    with FILE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["run"] == name:
                numbers = {key: int(row[key]) for key in ("tp", "replicas", "micro_batch")}
                layout = numbers | {"checkpointing": row["checkpointing"]}
                found.append(({key: layout[key] for key in LAYOUT}, float(row["seconds"]), float(row["gib"])))
    return found


def one_rank(run, layout, blocks, rounds):
    """Of the second step of one rank of all, with so many blocks and micro-batches: its seconds, those of its last micro-batch (from one
    backward of the first block to the next; 0 where there is one micro-batch), and the peak in GiB before and after that block's last backward.
    The allocator is set as torchtitan sets it (expandable segments)."""
    cluster = dict(world_size=run["gpus"], gpus_per_node=min(NODE, run["gpus"]), network=run["network"])
    with settings(), virtualgpu.dry_run(like=run["card"], memory=ROOM, **cluster):
        dist.init_process_group("nccl")
        split = {name: layout[name] for name in ("tp", "replicas", "checkpointing")}
        model = build(
            MODELS[run["model"]] | {"layers": blocks}, run["length"], **split, norm=run.get("norm", nn.RMSNorm)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        before, moments = [], []

        def first_block(*_):
            before.append(peak())
            moments.append(torch.cuda.Event(enable_timing=True))
            moments[-1].record()

        model.blocks[0].register_full_backward_pre_hook(first_block)
        for some in (1, rounds):  # the first step makes AdamW's averages
            texts = torch.zeros(some * layout["micro_batch"], run["length"], dtype=torch.long, device="cuda")
            before.clear()
            with virtualgpu.Timeline() as timeline:
                train_step(model, optimizer, texts, layout["micro_batch"], layout["tp"] > 1)
            after = peak()
        again = moments[-2].elapsed_time(moments[-1]) / 1e3 if rounds > 1 else 0.0
        return timeline.seconds, again, max(before), after


def peak():
    """GiB at the peak since it was last asked."""
    highest = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    return highest


def trial(run, layout):
    """Seconds of a step and GiB at its peak, of the whole model. All blocks are alike, and so are all micro-batches after the first: small
    runs of 2 and 4 blocks, with two micro-batches, give the lines on which the whole model lies."""
    rounds = run["texts"] * layout["tp"] // run["gpus"] // layout["micro_batch"]
    few, many = (one_rank(run, layout, blocks, min(rounds, 2)) for blocks in (2, 4))
    whole = [line(2, low, 4, high, MODELS[run["model"]]["layers"]) for low, high in zip(few, many, strict=True)]
    seconds, again, before, after = whole
    return seconds + max(rounds - 2, 0) * again, max(before, after)


def line(x0, y0, x1, y1, x):
    """y at x, on the line through two points."""
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@contextlib.contextmanager
def settings():
    """Expandable segments for virtual GPUs that begin inside; and without DTensor's advice to flatten a mesh."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with mock.patch.dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"):
            yield
    finally:
        logger.setLevel(level)
