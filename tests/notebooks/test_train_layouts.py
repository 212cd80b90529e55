"""Notebook 12's script trains the same model in every layout, and notebook 11's in stages as on one device."""

import contextlib
import runpy

import pytest
import series
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor.parallel import loss_parallel

import virtualgpu
from helpers.data import digits
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


SCRIPT = series.NOTEBOOKS / "scripts" / "train_pipeline.py"


def one_device(epochs, batch_size):
    model, (images, labels) = runpy.run_path(str(SCRIPT))["make_model"](), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        losses = []
        for batch in torch.randperm(len(images), generator=order).split(batch_size)[:-1]:
            optimizer.zero_grad()
            losses.append(torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]))
            losses[-1].backward()
            optimizer.step()
        yield f"epoch {epoch}: loss {torch.stack(losses).mean():.2f}"


def test_two_stages_train_as_one_device_does():
    """What torchrun prints is in notebook 11, and nbval compares it."""
    cells = series.code_cells(series.read(series.NOTEBOOKS / "11_pipelines_of_processes.ipynb"))
    (shown,) = [cell.outputs[0].text for cell in cells if "train_pipeline.py" in cell.source]
    assert shown.splitlines() == list(one_device(2, 64))
