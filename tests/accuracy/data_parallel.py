"""Training of torchvision's models by nn.DataParallel on one, two and four GPUs, as ryujaehun/pytorch-gpu-benchmark timed it on three cards.

Settings: 12 random images a GPU, 1000 classes, cross-entropy, forward and backward without an optimizer, the images' copy to the first GPU in
it; float32; the median of 50 steps; the first network of each of the source's families. PyTorch 1.4 to 1.8. Cards
without NVLink, but the A100. What is judged is how much longer a step takes on several GPUs than on one, which is Python's lock, the copies
of the modules, and the broadcast. The lock's share and the copies' cost (timing/host.py) are from the same source's inference, not
from these.
"""

import torch
import torchvision
from torch import nn

import virtualgpu
from tests.accuracy.published import Published, published
from tests.accuracy.row import Row, ratio

URL = "https://github.com/ryujaehun/pytorch-gpu-benchmark"


def seconds(row: Published) -> float:
    """Of the third step."""
    model = getattr(torchvision.models, row.model)()
    if row.gpus > 1:
        model = nn.DataParallel(model)
    model, images = model.cuda(), torch.randn(row.batch, 3, row.size, row.size)
    labels, clock = torch.zeros(row.batch, dtype=torch.int64, device="cuda"), virtualgpu.machine().clock
    for _ in range(3):
        torch.cuda.synchronize()
        start = clock.host
        model.zero_grad()
        nn.functional.cross_entropy(model(images.cuda()), labels).backward()
        torch.cuda.synchronize()
    return clock.host - start


def rows() -> list[Row]:
    found: dict[tuple, Row] = {}
    for row in published("data_parallel"):
        with virtualgpu.dry_run(row.gpus, like=row.card, host=row.host):
            what = f"{row.model}, DataParallel on {row.gpus}, {row.card}"
            found[row.card, row.model, row.gpus] = row.beside(what, 1000 * seconds(row))
    return [
        ratio(f"time on {gpus} against 1: {row.what}", row, found[card, model, 1])
        for (card, model, gpus), row in found.items()
        if gpus > 1
    ]
