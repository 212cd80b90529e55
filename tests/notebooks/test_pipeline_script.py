"""notebooks/scripts/train_pipeline.py under torchrun, on virtual GPUs: in stages, the training of one device."""

import runpy
import subprocess
import sys

import torch
from series import NOTEBOOKS
from torch.nn import functional as F

from helpers.data import digits

SCRIPT = NOTEBOOKS / "scripts" / "train_pipeline.py"


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
    torchrun = "-m virtualgpu --gpus 2 --quiet -m torch.distributed.run --standalone --nproc-per-node=2"
    command = [sys.executable, *torchrun.split(), str(SCRIPT), "--epochs", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == list(one_device(2, 64))
