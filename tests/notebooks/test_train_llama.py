"""Notebook 12's script: in every layout it trains the same model."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor.parallel import loss_parallel

import virtualgpu
from notebooks.scripts import train_llama
from notebooks.scripts.llama import Llama

SIZES = dict(layers=2, dim=64, heads=4, kv_heads=2, hidden=128, words=96)
LENGTH, TEXTS = 16, 4


def trained(layout):
    """The loss before and after two steps, of all four texts; as many ranks work as the launch has."""
    torch.cuda.set_device(dist.get_rank())
    torch.manual_seed(0)
    whole = Llama(**SIZES, length=LENGTH)
    text = torch.randint(96, (TEXTS, LENGTH))
    model = train_llama.build(SIZES, LENGTH, **layout)
    set_model_state_dict(model, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
    model.turns.copy_(whole.turns)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tp = layout.get("tp", 1)
    groups = dist.get_world_size() // tp
    own = text.chunk(groups)[dist.get_rank() // tp].cuda()
    losses = [loss(model, own, tp > 1)]
    for _ in range(2):
        train_llama.train_step(model, optimizer, own, 1, tp > 1)
    return [*losses, loss(model, own, tp > 1)]


def loss(model, own, cut_scores):
    with torch.no_grad(), loss_parallel() if cut_scores else contextlib.nullcontext():
        value = torch.nn.functional.cross_entropy(model(own).flatten(0, 1).float(), own.flatten())
    value = getattr(value, "full_tensor", lambda: value)()
    dist.all_reduce(value, dist.ReduceOp.AVG)
    return value.item()


def test_all_layouts_train_the_same():
    virtualgpu.gpus(4)
    (alone,) = virtualgpu.launch(trained, {}, nprocs=1, timeout=120)
    assert alone[1] < alone[0] - 0.5
    for layout in (
        {"replicas": 2},
        {"tp": 2, "checkpointing": "selective"},
        {"tp": 2, "replicas": 2, "checkpointing": "full"},
    ):
        for losses in virtualgpu.launch(trained, layout, nprocs=4, timeout=120):
            assert losses == pytest.approx(alone, rel=0.01), layout
