"""What one kernel takes: beside what others timed, a row each, and beside another kernel of the clock."""

import math
from functools import partial
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu
from tests.accuracy import convolutions as convolved
from tests.accuracy.kernels import multiplied, within
from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing.kernels import Kernels
from virtualgpu.timing.memory_bound import KINDS, ORDINARY

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
FIRST, LAST = torch.contiguous_format, torch.channels_last


def seconds(run, like="A100", clock=None):
    """What the second call takes on the simulated clock."""
    with virtualgpu.dry_run(1, like=like, clock=clock, host="launch"):
        call = run()
        call()
        torch.cuda.synchronize()
        before = virtualgpu.machine().clock.busy[0]
        call()
        return virtualgpu.machine().clock.busy[0] - before


def cuda(*shape, dtype=SINGLE, layout=FIRST):
    return torch.ones(*shape, device="cuda", dtype=dtype).contiguous(memory_format=layout)


def backward(call, *inputs):
    """Of what `call` makes: the gradients of `inputs` alone."""
    for one in inputs:
        one.requires_grad_()
    result = call()
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def product(rows, columns, length, dtype=SINGLE):
    a, b = cuda(rows, length, dtype=dtype), cuda(length, columns, dtype=dtype)
    return lambda: a @ b


def convolution(size, made, kernel, groups=1, padding=0, dtype=SINGLE, layout=FIRST, gradients=False):
    layer = nn.Conv2d(size[1], made, kernel, padding=padding, groups=groups, bias=False, device="cuda", dtype=dtype)
    x, layer = cuda(*size, dtype=dtype, layout=layout), layer.requires_grad_(False).to(memory_format=layout)
    return backward(lambda: layer(x), x, layer.weight) if gradients else lambda: layer(x)


def batch_norm(size, training=True, dtype=SINGLE, weights=SINGLE, layout=FIRST, gradients=False):
    layer = nn.BatchNorm2d(size[1], device="cuda", dtype=weights).requires_grad_(False).train(training)
    x = cuda(*size, dtype=dtype, layout=layout)
    return backward(lambda: layer(x), x, layer.weight, layer.bias) if gradients else lambda: layer(x)


def log_softmax(rows, width):
    return partial(cuda(rows, width).log_softmax, -1)


def loss(rows, words, dtype):
    return partial(F.cross_entropy, cuda(rows, words, dtype=dtype), cuda(rows, dtype=torch.int64))


def embedding(words, width, count):
    return partial(F.embedding, cuda(count, dtype=torch.int64) * 0, cuda(words, width))


def transposed(shape, dims, dtype):
    return cuda(*shape, dtype=dtype).transpose(*dims).contiguous


def attention(*shape):
    return partial(F.scaled_dot_product_attention, *(cuda(*shape, dtype=BRAIN) for _ in range(3)))


def times(dtype, other=(16384, 4096), like=None):
    return partial(torch.mul, cuda(16384, 4096, dtype=dtype), cuda(*other, dtype=like or dtype))


def method(name, *others, parameter=False):
    x = nn.Parameter(cuda(1 << 26), requires_grad=False) if parameter else cuda(1 << 26)
    return partial(getattr(x, name), cuda(1 << 26, dtype=torch.bool if others else SINGLE), *others)


SQUARE, KERNELBENCH, IMAGES = (4096,) * 3, (16, 64, 256, 256), (64, 256, 56, 56)
GROUPS = partial(convolution, (256, 64, 64, 64), 64, 3, 8, 1, HALF, LAST)
REPLK = 68 * 1.545 / (72 * 1.77) * 1e6 / 24  # a TITAN RTX's us of seconds of 24 layers on a 2080 Ti, by their cycles
DEPTHWISE = partial(convolution, (64, 144, 56, 56), 144, 3, 144, 1)
MEASURED = [  # kernels, card, microseconds, tolerance
    # T4s: 4.3 TFLOPS in float32, 42 in float16, 2.0 to 2.5 in bfloat16
    (partial(product, *SQUARE, SINGLE), "T4", 2 * 4096**3 / 4.3e6, 0.1),
    (partial(product, *SQUARE, HALF), "T4", 2 * 4096**3 / 42e6, 0.1),
    (partial(product, *SQUARE, BRAIN), "T4", 2 * 4096**3 / 2.3e6, 0.15),
    # KernelBench's BatchNorm, 2025 (MIT), forward in training
    (partial(batch_norm, KERNELBENCH), "T4", 4060, 0.2),
    (partial(batch_norm, KERNELBENCH), "A100", 1330, 0.3),
    (partial(batch_norm, KERNELBENCH), "L4", 3520, 0.1),
    (partial(batch_norm, KERNELBENCH), "RTX A6000", 1240, 0.1),
    (partial(batch_norm, KERNELBENCH), "H100", 580, 0.2),
    (partial(batch_norm, KERNELBENCH), "B200", 740, 0.1),
    # PyProf, 2019: 930 us for the statistics, 380 for the result
    (partial(batch_norm, (64, 64, 112, 112), dtype=HALF, weights=HALF), "V100", 930 + 380, 0.25),
    # An H100, PyTorch 2.11: PyTorch's own kernels for bfloat16, cuDNN's for float16
    (partial(batch_norm, IMAGES, dtype=BRAIN, layout=LAST), "H100", 249.3, 0.35),
    (partial(batch_norm, IMAGES, dtype=BRAIN, layout=LAST, gradients=True), "H100", 220.8, 0.2),
    (partial(batch_norm, IMAGES, dtype=HALF, layout=LAST), "H100", 140.9, 0.35),
    (partial(batch_norm, IMAGES, dtype=HALF, layout=LAST, gradients=True), "H100", 175.5, 0.2),
    # Liger-Kernel: 820 to 830 GB/s of what goes in and out
    (partial(log_softmax, 16384, 65536), "A100-80GB", 2 * 16384 * 65536 * 4 / 825e3, 0.15),
    # An H100, PyTorch 2.11
    (partial(embedding, 50257, 768, 16384), "H100", 36.5, 0.15),
    (partial(embedding, 32000, 4096, 8192), "H100", 93.6, 0.15),
    (partial(embedding, 10**6, 64, 65536), "H100", 40.8, 0.15),
    (partial(loss, 16384, 50304, SINGLE), "H100", 4325, 0.2),
    (partial(loss, 4096, 32000, SINGLE), "H100", 665.5, 0.2),
    (partial(loss, 8192, 50257, BRAIN), "H100", 739.3, 0.2),
    (partial(transposed, (16384, 4096), (0, 1), SINGLE), "H100", 546.4, 0.1),
    (partial(transposed, (16384, 4096), (0, 1), BRAIN), "H100", 500.6, 0.1),
    (partial(transposed, (4, 2048, 32, 128), (1, 2), SINGLE), "H100", 116.6, 0.25),
    (partial(transposed, (4, 2048, 32, 128), (1, 2), BRAIN), "H100", 94.9, 0.25),
    # The same, cuDNN 9.19: [batch, heads, keys, head]
    (partial(attention, 1, 32, 8192, 128), "H100", 1630, 0.25),
    (partial(attention, 8, 16, 2048, 64), "H100", 295.6, 0.25),
    (partial(attention, 32, 16, 512, 128), "H100", 131.3, 0.25),
    # RepLKNet's table 1: 21.9 and 54.8 ms for 24 layers on a 2080 Ti
    (partial(convolution, (64, 384, 32, 32), 384, 3, 384, 1), "TITAN RTX", 21.9e-3 * REPLK, 0.1),
    (partial(convolution, (64, 384, 32, 32), 384, 7, 384, 3), "TITAN RTX", 54.8e-3 * REPLK, 0.1),
    # An H100, PyTorch 2.11: the images' gradient and the weight's are PyTorch's own kernels in float32, cuDNN's in 16 bits
    (DEPTHWISE, "H100", 274, 0.1),
    (partial(DEPTHWISE, gradients=True), "H100", 546 + 412, 0.1),
    (partial(DEPTHWISE, dtype=HALF), "H100", 61, 0.1),
    (partial(DEPTHWISE, dtype=HALF, gradients=True), "H100", 93 + 74, 0.1),
    # spio, 2024: 255 and 500 GB/s of what goes in and out
    (GROUPS, "RTX 3090", 1050, 0.1),
    (GROUPS, "RTX 4090", 537, 0.15),
]

NORM, LONG = partial(batch_norm, IMAGES), partial(batch_norm, (64, 64, 112, 112))
PLAIN, MIXED, ROWS = partial(times, SINGLE), partial(times, BRAIN, like=SINGLE), partial(log_softmax, 16384)
POINTWISE, FILL, COPY = partial(convolution, IMAGES, 64, 1), partial(method, "masked_fill"), partial(method, "copy_")
FEW, WINOGRAD = partial(embedding, 1024, 64, 65536), partial(convolution, (64, 256, 28, 28), 256, 3)
RATIOS = [  # kernels, others that they are compared with, card, the least and the most
    # DeepBench, KernelBench: a pointwise convolution takes images as they are
    (partial(POINTWISE, dtype=HALF), partial(POINTWISE, dtype=HALF, layout=LAST), "A100", 0.999, 1.001),
    (POINTWISE, partial(POINTWISE, layout=LAST), "A100", 0.999, 1.001),
    # Winograd's squares of 4 x 4 take a quarter of the multiplications, and are turned there and back
    (WINOGRAD, partial(convolution, (64, 9 * 256, 28, 28), 256, 1), "V100", 1 / 4, 1 / 2),
    # tests/gpu/h100_profiled.csv: it reads twice when it trains, 1.5 by its bytes, and waits for each of its numbers
    (NORM, partial(NORM, training=False), "A100", 1.5, 2),
    # One block a channel where they come first: as many bytes in 64 channels take longer than in 256
    (LONG, NORM, "H100", 1.5, 3),
    (partial(LONG, layout=LAST), NORM, "H100", 0.95, 1.05),
    # Rows of a vocabulary are read more than once
    (partial(ROWS, 32768), partial(ROWS, 12288), "A100", 4.2, 5.2),
    # Liger-Kernel: 16 bits are read one by one where layouts differ, for 2 of 3 times the bytes, or types, 1.7 for 10 of 12
    (partial(times, BRAIN, (4096,)), partial(times, BRAIN), "A100-80GB", 0.95 * 2 * 2 / 3, 1.05 * 2 * 2 / 3),
    (MIXED, PLAIN, "A100-80GB", 0.97 * 1.7 * 10 / 12, 1.03 * 1.7 * 10 / 12),
    (MIXED, PLAIN, "RTX 4090", 0.97 * 10 / 12, 1.03 * 10 / 12),  # whose memory is slower than its processors
    # tests/gpu/h100_kernels.csv, broadcast: 1.24 to 1.28 times its bytes in float32
    (partial(times, SINGLE, (4096,)), PLAIN, "H100", 0.95 * 1.26 * 2 / 3, 1.05 * 1.26 * 2 / 3),
    # A copy does not read what it writes; masked_fill copies first; an embedding reads its rows alone
    (partial(COPY, parameter=True), COPY, "A100", 0.999, 1.001),
    (partial(method, "add_"), COPY, "A100", 1.47, 1.53),
    (partial(FILL, 0), partial(method, "masked_fill_", 0), "A100", 1.96, 2.04),
    (partial(embedding, 10**6, 64, 65536), FEW, "H100", 0.999, 1.001),
]


@pytest.mark.parametrize(("kernels", "card", "us", "tolerance"), MEASURED)
def test_kernels_take_what_was_measured(kernels, card, us, tolerance):
    assert 1e6 * seconds(kernels, card) == pytest.approx(us, rel=tolerance)


@pytest.mark.parametrize(("kernels", "others", "card", "least", "most"), RATIOS)
def test_kernels_beside_others(kernels, others, card, least, most):
    assert least < seconds(kernels, card) / seconds(others, card) < most


def test_convolutions_take_what_others_measured():
    """1,778 of seven sources and ours, on 16 cards, forward and backward: `python -m tests.accuracy.convolutions` has the table.

    In 16 bits without dlperf's, whose T4 gets hot and whose 1x1 take up to four times as long as DeepBench's by the same cuDNN."""
    found = convolved.convolutions()
    logs = [one.log for one in found]
    assert len(logs) > 1700 and abs(median(logs)) < math.log(1.1) and within(logs, 30) > 0.55
    found = [one for one in found if one.source != "rai-project/dlperf"]
    forward = [one.log for one in found if one.direction == "forward" and one.dtype == "float16"]
    assert len(forward) > 30 and abs(median(forward)) < math.log(1.15) and within(forward, 30) > 0.6


@pytest.mark.parametrize(("width", "loaded"), [(50257, 1), (50258, 2), (50260, 4), (50304, 0)])
def test_an_operation_finds_how_its_rows_lie(width, loaded):
    alone = multiplied(Kernels(SPECS["A100"]), 1, 4096, width, 768, "float16", 2, loaded)
    assert seconds(partial(product, 4096, width, 768, HALF)) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(("card", "dtype", "back"), [("A100", HALF, 1), ("A100", SINGLE, 0), ("V100", HALF, 0)])
def test_images_with_channels_first_are_converted_for_tensor_cores(card, dtype, back):
    """Back as well in half precision, but not for Volta's, Turing's and TF32's kernels (..._nhwckrsc_nchw), which write channels first."""
    first, last = (seconds(partial(convolution, IMAGES, 64, 3, dtype=dtype, layout=at), card) for at in (FIRST, LAST))
    read, made = 64 * 256 * 56 * 56, 64 * 64 * 54 * 54
    card = Kernels(SPECS[card])  # reads and writes them as its memory does, or takes half a cycle for each number
    converted = [max(2 * dtype.itemsize * n / card.bandwidth["memory"], n / 2 / card.cycles) for n in (read, made)]
    assert first - last == pytest.approx(sum(converted[: 1 + back]), rel=0.1)


def test_what_fits_into_the_cache_is_read_from_it():
    a100 = Kernels(SPECS["A100"])
    small, large = a100.moving(10 << 20, ORDINARY) - 2e-6, a100.moving(100 << 20, ORDINARY) - 2e-6
    assert 0.5 < 10 * small / large < 0.75


def test_kinds_name_operations_that_there_are():
    assert all(hasattr(torch.ops.aten, name) for name in KINDS)


def texts():
    return partial(nn.LSTM(1024, 1024, device="cuda"), cuda(16, 256, 1024))


MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
SETTINGS = [  # where PyTorch keeps it, its name, without and with TF32, what it is for, and how many times as fast that is
    (MATMUL, "allow_tf32", False, True, partial(product, *SQUARE), 4, 8),
    (MATMUL, "fp32_precision", "ieee", "tf32", partial(product, *SQUARE), 4, 8),
    (CUDNN.conv, "fp32_precision", "ieee", "tf32", partial(convolution, (64, 256, 32, 32), 256, 3), 1.5, 8),
    (CUDNN.rnn, "fp32_precision", "ieee", "tf32", texts, 1.5, 8),
]


@pytest.mark.parametrize(("where", "name", "without", "allowed", "kernels", "least", "most"), SETTINGS)
def test_tf32_is_used_where_pytorch_allows_it(where, name, without, allowed, kernels, least, most):
    """It is no error that the settings before PyTorch 2.9, asked after fp32_precision, would say something else."""
    before, taken = getattr(where, name), []
    try:
        for value in (without, allowed):
            setattr(where, name, value)
            taken.append(seconds(kernels))
    finally:
        setattr(where, name, before)
    assert least < taken[0] / taken[1] < most
