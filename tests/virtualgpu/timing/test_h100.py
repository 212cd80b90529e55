"""Kernels of every kind beside what one H100 took (tests/gpu/h100_kernels.csv: PyTorch 2.11, CUDA 13, cuDNN 9.19, November 2026).

Each was captured in a CUDA graph, replayed; a row is a family, its settings as JSON, and microseconds a call. Products and convolutions of
the same visit stand in tests/accuracy. Kernels of less than 10 us are left out: a graph starts them sooner than a program does.
"""

import math
from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch.nn import functional as F

from tests.accuracy.kernels import within
from tests.gpu import kernels_of_a_card
from tests.virtualgpu.timing.test_kernels import seconds


def rows(family: str, card: str) -> list[tuple[dict, float]]:
    return [(settings, us) for settings, us in kernels_of_a_card.in_a_graph(family, card) if us > 10]


def tensor(settings: dict, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda", dtype=getattr(torch, settings["dtype"]))


def unary(settings: dict) -> Callable:
    x = tensor(settings, settings["numel"])
    calls = {"relu": torch.relu, "gelu": F.gelu, "exp": torch.exp, "tanh": torch.tanh, "neg": torch.neg}
    call = calls[settings["op"]]
    return lambda: call(x)


def binary(settings: dict) -> Callable:
    x, y = tensor(settings, settings["numel"]), tensor(settings, settings["numel"])
    call = {"add": torch.add, "mul": torch.mul, "div": torch.div}[settings["op"]]
    return lambda: call(x, y)


def row_norm(settings: dict) -> Callable:
    width = settings["columns"]
    x, weight = tensor(settings, settings["rows"], width), tensor(settings, width)
    calls = {
        "layer_norm": lambda: F.layer_norm(x, (width,), weight, weight),
        "softmax": lambda: F.softmax(x, -1),
        "log_softmax": lambda: F.log_softmax(x, -1),
    }
    return calls[settings["op"]]


def embedding(settings: dict) -> Callable:
    words = tensor(settings, settings["rows"], settings["width"])
    indices = torch.zeros(settings["count"], dtype=torch.int64, device="cuda")
    return lambda: F.embedding(indices, words)


def indexing(settings: dict) -> Callable:
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


def attention(settings: dict) -> Callable:
    query, key, value = (tensor(settings, *settings["shape"]) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=settings["causal"])


FAMILIES = {
    "unary": (unary, lambda s: s["op"] in ("relu", "gelu", "exp", "tanh", "neg")),
    "binary": (binary, lambda s: s["op"] in ("add", "mul", "div")),
    "row_norm": (row_norm, lambda s: s["pas"] == "forward" and s["op"] != "rms_norm" and s["columns"] <= 4096),
    "embedding": (embedding, lambda s: s["pas"] == "forward"),
    "indexing": (indexing, lambda s: True),
    "attention": (attention, lambda s: s["pas"] == "forward" and s["way"] == "default" and s["shape"][2] >= 512),
}


def logs_of(family: str, card: str) -> list[float]:
    """Of measured over simulated."""
    make, wanted = FAMILIES[family]
    return [
        math.log(us / 1e6 / seconds(lambda settings=settings: make(settings), card))
        for settings, us in rows(family, card.lower())
        if wanted(settings)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_takes_what_the_h100_took(family):
    logs = logs_of(family, "H100")
    off = {"row_norm": 1.18, "indexing": 1.15}.get(
        family, 1.12
    )  # softmax of 16 bits, scans and narrow rows that are sorted
    assert len(logs) >= 8 and abs(median(logs)) < math.log(off) and within(logs, 30) > 0.7, sorted(map(math.exp, logs))


@pytest.mark.parametrize("family", ["unary", "binary", "row_norm", "attention"])
def test_a_kernel_takes_what_the_h200_took(family):
    """Of which the clock knows its data sheet, and what an H100 reaches (tests/gpu/h200_kernels.csv, of a later visit, 2026-11)."""
    logs = logs_of(family, "H200")
    assert len(logs) >= 8 and abs(median(logs)) < math.log(1.12) and within(logs, 30) > 0.6, sorted(map(math.exp, logs))


def test_a_depthwise_convolution_in_bfloat16_is_no_faster():
    """PyTorch leaves it to cuDNN in float16 alone (use_cudnn_depthwise), which converts; 276 us in bfloat16 there, and 275 in float32."""
    size = 64, 144, 56, 56
    assert depthwise(torch.bfloat16, size) == pytest.approx(depthwise(torch.float32, size), rel=0.02)
    assert depthwise(torch.bfloat16, size) == pytest.approx(276e-6, rel=0.1)
    assert depthwise(torch.float16, size) < 0.7 * depthwise(torch.bfloat16, size)
    assert depthwise(torch.bfloat16, size, layout=torch.channels_last) < 100e-6


def test_a_depthwise_convolution_of_stride_2_is_pytorchs_own():
    """Of 96 channels; cuDNN's from 256 on. 393 us there in float16, and 398 in bfloat16."""
    size = 128, 96, 112, 112
    assert depthwise(torch.float16, size, stride=2) == pytest.approx(393e-6, rel=0.1)
    assert depthwise(torch.float16, size, stride=2) == pytest.approx(
        depthwise(torch.bfloat16, size, stride=2), rel=0.02
    )
    assert depthwise(torch.float16, size) < depthwise(torch.bfloat16, size)


@pytest.mark.parametrize("size, forward, both", [((64, 96, 56, 56), 369, 5469), ((64, 384, 14, 14), 102, 1784)])
def test_a_large_depthwise_convolution_in_single_precision_wants_its_channels_first(size, forward, both):
    """Microseconds of 7x7, channels last; with both gradients, of which the weight's takes 4710 and 1575."""
    settings = {"kernel": 7, "layout": torch.channels_last}
    assert depthwise(torch.float32, size, **settings) == pytest.approx(forward * 1e-6, rel=0.2)
    assert depthwise(torch.float32, size, backward=True, **settings) == pytest.approx(both * 1e-6, rel=0.25)
    assert depthwise(torch.bfloat16, size, backward=True, **settings) < both * 1e-6 / 5


def depthwise(dtype, size, stride=1, kernel=3, layout=torch.contiguous_format, backward=False) -> float:
    """Seconds on an H100."""

    def convolution():
        channels = size[1]
        layer = torch.nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False)
        layer = layer.to("cuda", dtype)
        x = torch.ones(size, device="cuda", dtype=dtype).contiguous(memory_format=layout).requires_grad_(backward)

        def call():
            result = layer(x)
            if backward:
                result.backward(result.detach())

        return call

    return seconds(convolution, "H100")
