"""notebooks/scripts/train_pipeline.py: in stages, the training of one device."""

import runpy

import series
import torch
from torch.nn import functional as F

from helpers.data import digits

SCRIPT = series.NOTEBOOKS / "scripts" / "train_pipeline.py"


def one_device(epochs, batch_size):
    model, (images, labels) = runpy.run_path(str(SCRIPT))["make_model"](), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        losses = []
        for batch in torch.randperm(len(images), generator=order).split(batch_size)[:-1]:
            optimizer.zero_grad()
            losses.append(F.cross_entropy(model(images[batch]), labels[batch]))
            losses[-1].backward()
            optimizer.step()
        yield f"epoch {epoch}: loss {torch.stack(losses).mean():.2f}"


def test_two_stages_train_as_one_device_does():
    """What torchrun prints is in notebook 11, and nbval compares it."""
    cells = series.code_cells(series.read(series.NOTEBOOKS / "11_pipelines_of_processes.ipynb"))
    (shown,) = [cell.outputs[0].text for cell in cells if "train_pipeline.py" in cell.source]
    assert shown.splitlines() == list(one_device(2, 64))
