"""Models of torchvision on one GPU: a step of training, or of inference; and whether a batch fits. The settings are the functions' docstrings.

python -m virtualgpu fit` searches the largest (tests/judges/fit.py).     trains one of
timm's with a batch of one's own (tests/judges/fit.py)
"""

import argparse
import contextlib
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import virtualgpu
from tests.accuracy.published import Published, Row, program, published, ratio

URL = "https://github.com/huggingface/pytorch-image-models/tree/main/results"
NARROW = {"half": torch.float16, "bfloat16": torch.bfloat16}
Step = Callable[[], object]
FUSED = "2023-03"  # PyTorch 2.0: until then attention was a product, a softmax and a product


def attend(self: nn.MultiheadAttention, x, *args, **kwargs):
    """As timm's vision transformer does it: batch first throughout, and nothing is copied before the kernel."""
    qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).reshape(*x.shape[:2], 3, self.num_heads, -1)
    mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
    return self.out_proj(mixed.transpose(1, 2).reshape(x.shape)), None


def autocast(row: Published) -> torch.autocast:
    """To the 16 bits that the row's precision names; off where it is not AMP."""
    narrow = torch.bfloat16 if row.precision == "AMP bfloat16" else torch.float16
    return torch.autocast("cuda", narrow, enabled=row.precision.startswith("AMP"))


def training(parameters, loss: Callable, row: Published, kind=torch.optim.Adam, **options) -> Step:
    """A step: gradients away, loss, backward, optimizer; autocast where the row says so."""
    optimizer = kind(parameters, **options)

    def step():
        optimizer.zero_grad()
        with autocast(row):
            value = loss()
        value.backward()
        optimizer.step()

    return step


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
                loss = nn.functional.cross_entropy(model(pictures), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return model, step


def measure(row: Published, steps: int = 2) -> tuple[float, int]:
    """Seconds of the last of so many steps (the first has the allocator's and the optimizer's beginnings), and most bytes allocated."""
    with virtualgpu.dry_run(1, like=row.card, host=row.host):
        try:
            _, step = prepare(row)
            clock = virtualgpu.machine().clock
            for _ in range(steps):
                torch.cuda.synchronize()
                start = clock.host
                step()
                torch.cuda.synchronize()
            return clock.host - start, torch.cuda.max_memory_allocated()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False


def name(row: Published) -> str:
    return f"{row.model}, {row.mode}, {row.precision}{' channels last' * (row.layout == 'last')}, batch {row.batch}, {row.card} ({row.what} {row.date})"


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


@program(URL)
def vision() -> list[Row]:
    """Models of torchvision on one GPU, as timm, NVIDIA and others timed them: a step of training, or of inference.

    Settings: a row of published.csv each; random pictures, 1000 classes, SGD with momentum unless the settings say otherwise, no data loading.
    timm's models are torchvision's own here, but for the attention of a ViT. Of NVIDIA's and milabench's batches every third is taken, from the
    first on, and of milabench's H200 the smallest. XHMY's script times 100 steps from the first on: cuDNN's search and the loading of libraries
    are in its figures. flashoptim's precision is not in what is public of its script: autocast to bfloat16, since float32 would take half as much
    again of memory. Ratios are of two rows of one source which differ in one thing: AMP against float32, channels last against first, one card
    against another.
    """
    table, found, took = published("vision"), [], {}
    for row in table:
        if row.run not in took:
            took[row.run] = measure(row)
        seconds, most = took[row.run]
        if row.kind == "memory":
            found.append(row.beside(f"{name(row)}: most allocated", most / 2**20))
        else:
            found.append(row.beside(name(row), 1000 * seconds if row.kind == "time" else row.batch / seconds))
    for what, at, other in pairs(table):
        pair = (found[at], found[other]) if table[at].kind == "speed" else (found[other], found[at])
        found.append(ratio(f"{what}: {name(table[at])}", *pair))  # of speeds
    return found


def is_trained(row: Published) -> bool:
    """Whether two steps are taken: the optimizer's own memory comes with the first."""
    with virtualgpu.dry_run(1, like=row.card, host=row.host):
        try:
            _, step = prepare(row)
            step()
            step()
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            return False
    return True


@program(URL)
def fits() -> list[Row]:
    """Whether a batch is trained or runs out of memory, on an RTX 3090 of 24 GB: timm's table of training.

    Settings: those of published.csv's rows of this program. timm's benchmark begins with a batch of 512 (1024 for some) and takes less until
    one fits, so that the table says a batch that fits and, one step above, one that does not.
    """
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
