"""Models of torchvision on one GPU: a step of training, or of inference; and whether a batch fits. The settings are the functions' docstrings.

python -m tests.accuracy.vision MODEL first|last --batch-size N     trains one of timm's with a batch of one's own: what
                                                                    `python -m virtualgpu fit` searches the largest of (tests/judges/fit.py)
"""

import argparse
import contextlib
import types

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.accuracy.published import Published, Row, published, ratio
from tests.accuracy.runner import NARROW, Measured, autocast, beside, dry_run, measured, name

FUSED = "2023-03"  # PyTorch 2.0: until then attention was a product, a softmax and a product


def attend(self: nn.MultiheadAttention, x, *args, **kwargs):
    """As timm's vision transformer does it: batch first throughout, and nothing is copied before the kernel."""
    qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).reshape(*x.shape[:2], 3, self.num_heads, -1)
    mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
    return self.out_proj(mixed.transpose(1, 2).reshape(x.shape)), None


def prepare(row: Published, **options):
    """The model and one step of it."""
    dtype, last = NARROW.get(row.precision, torch.float32), row.layout == "last"
    model = getattr(torchvision.models, row.model)(**options).cuda().to(dtype)
    pictures = torch.randn(row.batch, 3, row.size, row.size, device="cuda", dtype=dtype)
    labels = torch.zeros(row.batch, dtype=torch.int64, device="cuda")
    for layer in model.modules() if row.what == "timm" else ():
        if isinstance(layer, nn.MultiheadAttention):
            layer.forward = types.MethodType(attend, layer)
    if last:
        model = model.to(memory_format=torch.channels_last)
        pictures = pictures.contiguous(memory_format=torch.channels_last)

    @contextlib.contextmanager
    def mixed():
        plain = sdpa_kernel(SDPBackend.MATH) if row.date < FUSED else contextlib.nullcontext()
        with plain, autocast(row):
            yield

    if row.mode == "infer":
        model.eval()

        def step():
            with torch.no_grad(), mixed():
                model(pictures)
    else:
        if row.options.get("optimizer") == "AdamW":
            optimizer = torch.optim.AdamW(model.parameters())
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=float(row.options.get("momentum", 0.9)))
        scaler = torch.amp.GradScaler("cuda", enabled="scaler" in row.options)

        def step():
            optimizer.zero_grad(set_to_none=True)
            with mixed():
                loss = F.cross_entropy(model(pictures), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return model, step


def measure(row: Published) -> Measured:
    with dry_run(row):
        return measured(prepare(row)[1])


def pairs(rows: list[Published]) -> list[tuple[str, int, int]]:
    """What two rows differ in, and their places: rows of one source that are the same but for that."""

    def alike(row: Published, **changed) -> tuple:
        plain = row._replace(figure=0, missed="", precision="float32" if row.precision == "tf32" else row.precision)
        return plain._replace(**changed)

    found = []
    first = {alike(row): at for at, row in reversed(list(enumerate(rows)))}
    cards = {}
    for at, row in enumerate(rows):
        if row.precision in ("AMP", "half"):
            found.append((f"{row.precision} against float32", at, first.get(alike(row, precision="float32"))))
        if row.layout == "last":
            found.append(("channels last against first", at, first.get(alike(row, layout="first"))))
        family = alike(row, card="", host="", date="")
        if (other := cards.setdefault(family, at)) != at and rows[other].card != row.card:
            found.append((f"{row.card} against {rows[other].card}", at, other))
    return [(what, at, other) for what, at, other in found if other is not None]


def vision() -> list[Row]:
    table = published("vision")
    found = beside("vision", measure, lambda row: name(row) + ": most allocated" * (row.kind == "memory"))
    for what, at, other in pairs(table):
        pair = (found[at], found[other]) if table[at].kind == "speed" else (found[other], found[at])
        found.append(ratio(f"{what}: {name(table[at])}", *pair))  # of speeds
    return found


def is_trained(row: Published) -> bool:
    """Whether two steps are taken: the optimizer's own memory comes with the first."""
    with dry_run(row):
        try:
            measured(prepare(row)[1])
        except torch.cuda.OutOfMemoryError:
            return False
    return True


def fits() -> list[Row]:
    return [row.beside(name(row), float(is_trained(row))) for row in published("fits")]


def one_batch() -> None:
    """Four steps of a model of timm's table with a batch of one's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("layout", choices=["first", "last"])
    parser.add_argument("--batch-size", type=int, required=True)
    options = parser.parse_args()
    row = next(row for row in published("fits") if (row.model, row.layout) == (options.model, options.layout))
    _, step = prepare(row._replace(batch=options.batch_size))
    for _ in range(4):
        step()


if __name__ == "__main__":
    one_batch()
