"""Kernels of every kind as a program calls them, by their settings: what *_profiled.csv and *_convolutions.csv have one row of each for.

The times there are those of torch.profiler, added up over the kernels of one call (microseconds; one H100 and one H200, PyTorch 2.11, CUDA 13, cuDNN
9.19, 2026-11-27), in three states of the second-level cache: fresh: what goes in was written just before, as in a forward pass; cold:
256 MB were written in between; warm: the same call ran just before, as in a loop or a replayed graph. Convolutions (padded by
kernel // 2 * dilation) and products of odd rows have fresh alone; of the convolutions, `longest` is which kernel took most of the time.
"""

import contextlib
import csv
import functools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

from virtualgpu.hardware.specs import SPECS

TABLES = Path(__file__).parent
LAST = torch.channels_last
MOST = 1200  # rows of a family that another card is asked for: some four minutes
DEVICE, FLUSH = "cuda", 64 << 20  # numbers that are written between two calls, so that nothing is left in the cache


class Row(NamedTuple):
    """fresh: microseconds."""

    family: str
    settings: dict
    fresh: float


def rows(family: str = "", card: str = "H100") -> list[Row]:
    """Of that family, or all."""
    profiled = table(card, "profiled")
    every = [Row(row["family"], json.loads(row["settings"]), float(row["fresh"])) for row in profiled]
    every += [_of_a_convolution(row) for row in table(card, "convolutions")]
    return [row for row in every if row.family == family or not family]


def in_a_graph(family: str, card: str) -> list[tuple[dict, float]]:
    """Settings and microseconds of the rows of <card>_kernels.csv: captured in a CUDA graph, and replayed. A graph starts what is short
    sooner than a program does."""
    found = [row for row in table(card, "kernels") if row["family"] == family]
    return [(json.loads(row["settings"]), float(row["us"])) for row in found]


def calls_in_a_graph(family: str, card: str) -> list[tuple[Callable[[], Callable], float]]:
    """What makes a call of those of IN_A_GRAPH of more than 10 us, and its microseconds."""
    make, wanted = IN_A_GRAPH[family]
    found = [(settings, us) for settings, us in in_a_graph(family, card) if us > 10 and wanted(settings)]
    return [(functools.partial(make, settings), us) for settings, us in found]


def cards() -> list[str]:
    """Keys into SPECS of the cards that have a file here."""
    return [card for card in SPECS if path(card, "profiled").exists()]


def path(card: str, kind: str) -> Path:
    """Of that card's measured kernels. kind: profiled, convolutions or kernels."""
    return TABLES / f"{card.lower().replace(' ', '_')}_{kind}.csv"


def table(card: str, kind: str) -> list[dict[str, str]]:
    """The rows of that file; none where there is none."""
    if not path(card, kind).exists():
        return []
    with open(path(card, kind), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _of_a_convolution(row: dict[str, str]) -> Row:
    """One number for the size, the kernel or the stride stands for all dimensions: two, if the size is one."""
    size = [int(side) for side in row["size"].split("x")]
    size = size * 2 if len(size) == 1 else size
    settings: dict[str, object] = {name: int(row[name]) for name in ("made", "dilation", "groups", "transposed")}
    settings |= {"dtype": row["dtype"], "pas": row["pas"], "last": row["layout"] == "last"}
    for name in ("kernel", "stride"):
        sides = [int(side) for side in row[name].split("x")]
        settings[name] = sides * len(size) if len(sides) == 1 else sides
    shape = [int(row["batch"]), int(row["channels"]), *size]
    return Row("convolution", settings | {"shape": shape}, float(row["us"]))


class Call(NamedTuple):
    """One to time: what is written just before it where it is to be fresh, and the call."""

    fresh: list[torch.Tensor]
    run: Callable[[], object]


def call(family: str, settings: dict) -> Call:
    """On the current GPU. Call it, and run it, in `precision(settings)`."""
    return MAKERS[family](settings)


@contextlib.contextmanager
def precision(settings: dict) -> Iterator[None]:
    """TF32 in products where the settings say so; convolutions have it anyway, unless they say float32."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, settings["dtype"] == "tf32"
    try:
        tf32 = settings["dtype"] != "float32" or "kernel" not in settings
        # PyTorch's own test utilities, once imported, allow no other way to set cuDNN's
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            yield
    finally:
        matmul.allow_tf32 = before


def _random(settings: dict, *shape: int, grad: bool = False) -> torch.Tensor:
    name = settings["dtype"]
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(grad)


def _one_pass(settings: dict, function: Callable[[], torch.Tensor], image: torch.Tensor, inputs) -> Call:
    """Forward, or the gradients of `inputs`."""
    if settings["pas"] == "forward":
        return Call([image.detach()], function)
    result = function()
    gradient = torch.randn_like(result)
    return Call([gradient], lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True))


def in_layout(settings: dict, image: torch.Tensor) -> torch.Tensor:
    """An image of 2 or 3 dimensions, its channels last where the settings say so."""
    order = torch.channels_last_3d if image.dim() == 5 else LAST
    return image.contiguous(memory_format=order) if settings.get("last") else image


def _batch_norm(settings: dict) -> Call:
    channels = settings["shape"][1]
    x = in_layout(settings, _random(settings, *settings["shape"])).requires_grad_()
    weight, bias = (torch.ones(channels, device="cuda", requires_grad=True) for _ in range(2))
    mean, variance = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
    return _one_pass(settings, lambda: F.batch_norm(x, mean, variance, weight, bias, True), x, [x, weight, bias])


def _sum(settings: dict) -> Call:
    x = in_layout(settings, _random(settings, *settings["shape"]))
    return Call([x], lambda: x.sum(settings["dim"]))


def _attention(settings: dict) -> Call:
    """mask, where there is one: "bool", "float" or "gradient" (numbers that are learned). over: of its shape."""
    batch, heads, queries, head = settings["shape"]
    keys = settings.get("keys", queries)
    inputs = [_random(settings, batch, heads, length, head, grad=True) for length in (queries, keys, keys)]
    query, key, value = inputs
    options = {"is_causal": settings.get("causal", False), "dropout_p": settings.get("dropout", 0.0)}
    if "mask" in settings:
        options["attn_mask"] = torch.rand(settings["over"], device="cuda") < 0.9
        if settings["mask"] != "bool":
            options["attn_mask"] = _random(settings, *settings["over"], grad=settings["mask"] == "gradient")
        inputs += [options["attn_mask"]] if settings["mask"] == "gradient" else []
    one = _one_pass(settings, lambda: F.scaled_dot_product_attention(query, key, value, **options), query, inputs)
    return one if settings["pas"] == "backward" else Call([query.detach(), key.detach(), value.detach()], one.run)


def _product(settings: dict) -> Call:
    rows, length, columns = settings["rows"], settings["length"], settings["columns"]
    x, weight = _random(settings, rows, length), _random(settings, columns, length)
    bias, gradient = _random(settings, columns), _random(settings, rows, columns)
    calls = {
        "linear": lambda: F.linear(x, weight, bias),
        "linear no bias": lambda: F.linear(x, weight),
        "input": lambda: gradient @ weight,
        "weight": lambda: gradient.t() @ x,
    }
    return Call([x, gradient], calls[settings["way"]])


def _interpolate(settings: dict) -> Call:
    x = _random(settings, *settings["shape"], grad=True)
    how = {"scale_factor": settings["scale"]} if "scale" in settings else {"size": (settings["to"],) * 2}
    return _one_pass(settings, lambda: F.interpolate(x, mode=settings["mode"], **how), x, [x])


def convolution(settings: dict, make: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """The image, the weight, and what else torch.convolution is told after the bias. make: called with the settings and a shape."""
    shape, groups, dilation = (settings[name] for name in ("shape", "groups", "dilation"))
    kernel, stride = (_each(settings[name], len(shape) - 2) for name in ("kernel", "stride"))
    transposed = bool(settings.get("transposed"))
    x = in_layout(settings, make(settings, *shape))
    channels = (shape[1], settings["made"] // groups) if transposed else (settings["made"], shape[1] // groups)
    weight = in_layout(settings, make(settings, *channels, *kernel))
    padding = [size // 2 * dilation for size in kernel]
    if transposed:
        padding = [max(0, (size - step) // 2) for size, step in zip(kernel, stride, strict=True)]
    return x, weight, (stride, padding, [dilation] * len(kernel), transposed, [0] * len(kernel), groups)


def _convolution(settings: dict) -> Call:
    x, weight, options = convolution(settings, _random)
    wanted = {"forward": [], "image": [x], "weight": [weight]}[settings["pas"]]
    for tensor in wanted:
        tensor.requires_grad_()
    return _one_pass(settings, lambda: torch.convolution(x, weight, None, *options), x, wanted)


def _each(value: int | list[int], dimensions: int) -> list[int]:
    return [value] * dimensions if isinstance(value, int) else value


def _pool(settings: dict) -> Call:
    x = _random(settings, *settings["shape"], grad=True)
    kind, size = settings["op"].split()
    calls = {
        "adaptive": lambda: F.adaptive_avg_pool2d(x, int(size)),
        "avg": lambda: F.avg_pool2d(x, int(size)),
        "max": lambda: F.max_pool2d(x, int(size), 2),
        "avg3d": lambda: F.avg_pool3d(x, int(size)),
        "max3d": lambda: F.max_pool3d(x, int(size)),
    }
    return _one_pass(settings, calls[kind], x, [x])


def _elementwise(settings: dict) -> Call:
    shape = settings["shape"]
    batch, channels, height, width = shape
    x, y = _random(settings, *shape), _random(settings, *shape)
    gate, channel = _random(settings, batch, channels, 1, 1), _random(settings, 1, channels, 1, 1)
    x_last, y_last = x.contiguous(memory_format=LAST), y.contiguous(memory_format=LAST)
    expanded = gate.expand(shape)
    other = torch.float32 if x.dtype == torch.bfloat16 else torch.bfloat16
    calls = {
        "add": lambda: x + y,
        "relu": lambda: torch.relu(x),
        "add expanded": lambda: x + expanded,
        "add expanded last": lambda: x_last + expanded,
        "mul gate": lambda: x * gate,
        "mul gate last": lambda: x_last * gate,
        "add last first": lambda: x_last + y,
        "add last": lambda: x_last + y_last,
        "add channel": lambda: x + channel,
        "mean backward": lambda: expanded / (height * width),
        "copy last": lambda: x.contiguous(memory_format=LAST),
        "gelu": lambda: F.gelu(x),
        "cast": lambda: x.to(other),
        "silu": lambda: F.silu(x),
        "dropout": lambda: F.dropout(x, 0.1),
    }
    return Call([x_last, x, y, gate], calls[settings["op"]])


def _viewed(settings: dict) -> torch.Tensor:
    """What lies in memory in another order than it is used: of `shape` as it lies, a stretch of the last dimension ("of": from, to), the
    dimensions in another order ("dims"), and at one place a dimension of so many alike ("expand": place, number)."""
    x = _random(settings, *settings["shape"])
    if "of" in settings:
        x = x[..., slice(*settings["of"])]
    if "dims" in settings:
        x = x.permute(settings["dims"])
    if "expand" in settings:
        place, number = settings["expand"]
        x = x.unsqueeze(place).expand(*x.shape[:place], number, *x.shape[place:])
    return x


def _copy(settings: dict) -> Call:
    x = _viewed(settings)
    dtype = getattr(torch, settings.get("to", settings["dtype"]))
    order = torch.preserve_format if settings.get("keep") else torch.contiguous_format
    fresh = x.select(settings["expand"][0], 0) if "expand" in settings else x
    return Call([fresh], lambda: x.to(dtype, copy=True, memory_format=order))


def _cat(settings: dict) -> Call:
    parts = [_viewed({"dtype": settings["dtype"], **part}) for part in settings["parts"]]
    return Call(parts, lambda: torch.cat(parts, settings["dim"]))


def _row_norm(settings: dict) -> Call:
    width = settings["columns"]
    x = _random(settings, settings["rows"], width, grad=True)
    weight, bias = (_random(settings, width, grad=True) for _ in range(2))
    function, inputs = {
        "layer_norm": (lambda: F.layer_norm(x, (width,), weight, bias), [x, weight, bias]),
        "softmax": (lambda: F.softmax(x, -1), [x]),
        "rms_norm": (lambda: F.rms_norm(x, (width,), weight), [x, weight]),
    }[settings["op"]]
    return _one_pass(settings, function, x, inputs)


def _group_norm(settings: dict) -> Call:
    x = _random(settings, *settings["shape"], grad=True)
    weight, bias = (_random(settings, settings["shape"][1], grad=True) for _ in range(2))
    return _one_pass(settings, lambda: F.group_norm(x, settings["groups"], weight, bias), x, [x, weight, bias])


MAKERS: dict[str, Callable[[dict], Call]] = {
    "batch_norm": _batch_norm,
    "sum": _sum,
    "attention": _attention,
    "product": _product,
    "interpolate": _interpolate,
    "convolution": _convolution,
    "pool": _pool,
    "elementwise": _elementwise,
    "row_norm": _row_norm,
    "copy": _copy,
    "cat": _cat,
    "masked_attention": _attention,
    "group_norm": _group_norm,
}


def _ones(settings: dict, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda", dtype=getattr(torch, settings["dtype"]))


def _unary(settings: dict) -> Callable:
    x = _ones(settings, settings["numel"])
    calls = {"relu": torch.relu, "gelu": F.gelu, "exp": torch.exp, "tanh": torch.tanh, "neg": torch.neg}
    call = calls[settings["op"]]
    return lambda: call(x)


def _binary(settings: dict) -> Callable:
    x, y = _ones(settings, settings["numel"]), _ones(settings, settings["numel"])
    call = {"add": torch.add, "mul": torch.mul, "div": torch.div}[settings["op"]]
    return lambda: call(x, y)


def _embedding(settings: dict) -> Callable:
    words = _ones(settings, settings["rows"], settings["width"])
    indices = torch.zeros(settings["count"], dtype=torch.int64, device="cuda")
    return lambda: F.embedding(indices, words)


def _indexing(settings: dict) -> Callable:
    rows, width = settings["rows"], settings["columns"]
    x = torch.ones(rows, width, device="cuda")
    i = torch.zeros(rows, dtype=torch.int64, device="cuda")
    j, mask = torch.zeros(rows, width, dtype=torch.int64, device="cuda"), x > 0
    calls = {
        "index_select": lambda: x.index_select(0, i),
        "gather": lambda: x.gather(1, j),
        "scatter_add": lambda: torch.zeros_like(x).scatter_add_(1, j, x),
        "index_add": lambda: torch.zeros_like(x).index_add_(0, i, x),
        "index_put_acc": lambda: torch.zeros_like(x).index_put_((i,), x, accumulate=True),
        "index_copy": lambda: x.index_copy(0, i, x),
        "sort": lambda: x.sort(1),
        "argsort": lambda: x.argsort(1),
        "topk": lambda: x.topk(8, 1),
        "masked_fill": lambda: x.masked_fill(mask, 0.0),
        "cumsum0": lambda: x.cumsum(0),
        "cat": lambda: torch.cat([x, x], 1),
        "stack": lambda: torch.stack([x, x, x, x]),
        "roll": lambda: x.roll(1, 0),
        "flip": lambda: x.flip(0),
        "tril": lambda: x.tril(),
        "pad": lambda: F.pad(x, (1, 1)),
    }
    return calls[settings["op"]]


# Of <card>_kernels.csv: those with no family above, and which of their rows
IN_A_GRAPH: dict[str, tuple[Callable[[dict], Callable], Callable[[dict], bool]]] = {
    "unary": (_unary, lambda s: s["op"] in ("relu", "gelu", "exp", "tanh", "neg")),
    "binary": (_binary, lambda s: s["op"] in ("add", "mul", "div")),
    "embedding": (_embedding, lambda s: s["pas"] == "forward"),
    "indexing": (_indexing, lambda s: True),
}


def profiled(one: Call, flush: torch.Tensor) -> float:
    """Microseconds of its kernels where what goes in is fresh: the median of three calls after two that are not looked at."""
    from torch.profiler import ProfilerActivity, profile

    one.run(), one.run()
    taken = []
    for _ in range(3):
        flush.zero_()
        with torch.no_grad():
            for tensor in one.fresh:
                tensor.mul_(1)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            one.run()
            torch.cuda.synchronize()
        kernels = [event for event in profiler.events() if not event.name.startswith("Activity Buffer")]
        taken.append(sum(event.self_device_time_total for event in kernels))
    return sorted(taken)[1]


def sample(families: Sequence[str]) -> list[tuple[str, dict]]:
    """Families and settings to measure on another card, MOST of each, in an order in which any first part of them has some of all."""
    chosen, found = random.Random(0), []
    for family in families:
        every = [(row.family, row.settings) for row in rows(family, "H100")]
        found += chosen.sample(every, min(MOST, len(every)))
    return chosen.sample(found, len(found))


def measure(card: str, families: Sequence[str], minutes: float = 4.5) -> Path:
    """Writes <card>_profiled.csv of what it takes on the current GPU, as many of the sample as there is time for. Returns its path: under
    build/ where there is one of that card here already."""
    file = path(card, "profiled")
    file = Path("build") / file.name if file.exists() else file
    file.parent.mkdir(exist_ok=True)
    asked, taken, begun = sample(families), [], time.monotonic()
    flush = torch.empty(FLUSH, device=DEVICE)
    for number, (family, settings) in enumerate(asked):
        passed = (time.monotonic() - begun) / (60 * minutes)
        if passed >= 1:
            break
        done = int(40 * max(passed, number / len(asked)))
        if number % 20 == 0:
            print(f"\r[{'#' * done:<40}] {number:5} kernels of {card}", end="", file=sys.stderr, flush=True)
        try:
            with precision(settings):
                us = profiled(call(family, settings), flush)
        except RuntimeError:  # too large for this card, or of no type that it has
            continue
        taken.append([family, json.dumps(settings), f"{us:.2f}", "", "", versions()])
    print(file=sys.stderr)
    with open(file, "w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(["family", "settings", "fresh", "cold", "warm", "versions"])
        writer.writerows(sorted(taken))
    return file


def versions() -> str:
    """Of what runs here, and the month."""
    return f"PyTorch {torch.__version__}; CUDA {torch.version.cuda}; cuDNN {torch.backends.cudnn.version()}; {time.strftime('%Y-%m')}"
