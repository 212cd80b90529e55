"""Models of torchvision on one GPU, as timm, NVIDIA and others timed them: a step of training, or of inference.

Settings: a row of published.csv each; random pictures, 1000 classes, SGD with momentum, no data loading. timm's models are torchvision's
own here, but for the attention of a ViT. Ratios are of two rows of one source which differ in one thing: AMP against float32, channels last against first, one card
against another.
"""

import contextlib
import types

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import virtualgpu
from tests.accuracy.published import Published, published
from tests.accuracy.row import Row

URL = "https://github.com/huggingface/pytorch-image-models/tree/main/results"
NARROW = {"half": torch.float16, "bfloat16": torch.bfloat16}
FUSED = "2023-03"  # PyTorch 2.0: until then attention was a product, a softmax and a product


def attend(self: nn.MultiheadAttention, x, *args, **kwargs):
    """As timm's vision transformer does it: batch first throughout, and nothing is copied before the kernel."""
    qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).reshape(*x.shape[:2], 3, self.num_heads, -1)
    mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
    return self.out_proj(mixed.transpose(1, 2).reshape(x.shape)), None


def prepare(row: Published, **options):
    """The model and one step of it, a function. Inside a dry run."""
    dtype, last = NARROW.get(row.precision, torch.float32), row.layout == "last"
    torch.backends.cuda.matmul.allow_tf32 = row.precision == "tf32"
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
        with plain, torch.autocast("cuda", torch.float16, enabled=row.precision == "AMP"):
            yield

    if row.mode == "infer":
        model.eval()

        def step():
            with torch.no_grad(), mixed():
                model(pictures)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step():
            optimizer.zero_grad(set_to_none=True)
            with mixed():
                loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()

    return model, step


def seconds(row: Published, steps: int = 2) -> float:
    """Of the last of so many steps: the first has the allocator's and the optimizer's beginnings."""
    with virtualgpu.dry_run(1, like=row.card, host=row.host):
        try:
            _, step = prepare(row)
            clock = virtualgpu.machine().clock
            for _ in range(steps):
                torch.cuda.synchronize()
                start = clock.host
                step()
                torch.cuda.synchronize()
            return clock.host - start
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False


def name(row: Published) -> str:
    return f"{row.model}, {row.mode}, {row.precision}{' channels last' * (row.layout == 'last')}, batch {row.batch}, {row.card} ({row.what} {row.date})"


def as_ratio(one: tuple[Published, float], other: tuple[Published, float]) -> tuple[float, float]:
    """Speed of one against the other, published and simulated, each a row and its simulated seconds. Rows of a pair have one batch."""
    published = [1 / row.figure if row.kind == "time" else row.figure for row, _ in (one, other)]
    return published[0] / published[1], other[1] / one[1]


def pairs(rows: list[Published]) -> list[tuple[str, int, int]]:
    """What two rows differ in, and their places: rows of one source that are the same but for that."""

    def alike(row: Published, **changed) -> tuple:
        plain = row._replace(figure=0, precision="float32" if row.precision == "tf32" else row.precision)
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


def rows() -> list[Row]:
    table, found, took = published("vision"), [], {}
    for row in table:
        if row.settings not in took:
            took[row.settings] = seconds(row)
        simulated = took[row.settings]
        simulated = 1000 * simulated if row.kind == "time" else row.batch / simulated
        found.append(Row(name(row), row.kind, row.unit, row.figure, simulated, url=row.source, group=row.what))
    for what, at, other in pairs(table):
        one, base = table[at], table[other]
        published_ratio, simulated = as_ratio((one, took[one.settings]), (base, took[base.settings]))
        found.append(
            Row(f"{what}: {name(one)}", "ratio", "", published_ratio, simulated, url=one.source, group=one.what)
        )
    return found
