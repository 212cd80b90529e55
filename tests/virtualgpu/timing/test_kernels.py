"""What one kernel takes: beside what others timed, a row each, and beside another kernel of the clock.

tests/virtualgpu/timing/test_profiled_kernels.py has those of an H100 and an H200, tests/accuracy/kernels.csv and convolutions.csv those of other cards.
"""

import math
from functools import partial
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu
from tests.accuracy import batch_sweeps
from tests.accuracy import convolutions as convolved
from tests.accuracy import kernels as measured
from tests.accuracy.kernels import within
from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing.memory_bound import KINDS

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


def convolution(
    size, made, kernel, groups=1, padding=0, dtype=SINGLE, layout=FIRST, gradients=False, stride=1, bias=False
):
    layer = nn.Conv2d(size[1], made, kernel, stride, padding, groups=groups, bias=bias, device="cuda", dtype=dtype)
    x, layer = cuda(*size, dtype=dtype, layout=layout), layer.requires_grad_(False).to(memory_format=layout)
    return backward(lambda: layer(x), x, *layer.parameters()) if gradients else lambda: layer(x)


def transposed_convolution(made, dtype=SINGLE, stride=1):
    x, weight = cuda(16, 256, 28, 28, dtype=dtype), cuda(256, made, 4, 4, dtype=dtype)
    return partial(F.conv_transpose2d, x, weight, None, stride, 1)


def gradient_of_an_image(made, dtype=SINGLE, stride=1):
    """Of the convolution that the one above transposes."""
    weight = cuda(256, made, 4, 4, dtype=dtype)
    size = 31 if stride == 1 else 56
    image = cuda(16, made, size - 2 * (stride == 1), size - 2 * (stride == 1), dtype=dtype)
    return backward(lambda: F.conv2d(image, weight, None, stride, 1), image)


def batch_norm(size, training=True, dtype=SINGLE, weights=SINGLE, layout=FIRST, gradients=False):
    layer = nn.BatchNorm2d(size[1], device="cuda", dtype=weights).requires_grad_(False).train(training)
    x = cuda(*size, dtype=dtype, layout=layout)
    return backward(lambda: layer(x), x, layer.weight, layer.bias) if gradients else lambda: layer(x)


def log_softmax(rows, width):
    return partial(cuda(rows, width).log_softmax, -1)


def loss(rows, words, dtype):
    return partial(F.cross_entropy, cuda(rows, words, dtype=dtype), cuda(rows, dtype=torch.int64))


def gradient_of_a_table(rows):
    table = cuda(10_000, 64).requires_grad_()
    found = F.embedding(torch.zeros(rows, dtype=torch.int64, device="cuda"), table)
    return partial(torch.autograd.grad, found, table, torch.ones_like(found), retain_graph=True)


def embedding(words, width, count):
    return partial(F.embedding, cuda(count, dtype=torch.int64) * 0, cuda(words, width))


def times(dtype, other=(16384, 4096), like=None):
    return partial(torch.mul, cuda(16384, 4096, dtype=dtype), cuda(*other, dtype=like or dtype))


def method(name, *others):
    return partial(getattr(cuda(1 << 26), name), cuda(1 << 26, dtype=torch.bool if others else SINGLE), *others)


SQUARE, KERNELBENCH, IMAGES = (4096,) * 3, (16, 64, 256, 256), (64, 256, 56, 56)
GROUPS = partial(convolution, (256, 64, 64, 64), 64, 3, 8, 1, HALF, LAST)
REPLK = 68 * 1.545 / (72 * 1.77) * 1e6 / 24  # a TITAN RTX's us of seconds of 24 layers on a 2080 Ti, by their cycles
DEPTHWISE, STRIDED = (
    partial(convolution, (64, 144, 56, 56), 144, 3, 144, 1),
    partial(convolution, (128, 96, 112, 112), 96, 3, 96, 1, stride=2),
)
GROUPED = partial(convolution, (64, 96, 56, 56), 96, 3, 4, 1, layout=LAST, gradients=True)
LARGE = partial(convolution, (64, 96, 56, 56), 96, 7, 96, 3, layout=LAST)
MEASURED = [  # kernels, card, microseconds, tolerance
    # T4s: 4.3 TFLOPS in float32, 42 in float16, 2.0 to 2.5 in bfloat16
    (partial(product, *SQUARE, SINGLE), "T4", 2 * 4096**3 / 4.3e6, 0.1),
    (partial(product, *SQUARE, HALF), "T4", 2 * 4096**3 / 42e6, 0.1),
    (partial(product, *SQUARE, BRAIN), "T4", 2 * 4096**3 / 2.3e6, 0.15),
    # KernelBench's BatchNorm, 2025 (MIT), forward in training
    (partial(batch_norm, KERNELBENCH), "T4", 4060, 0.2),
    (partial(batch_norm, KERNELBENCH), "A100", 1330, 0.3),
    (partial(batch_norm, KERNELBENCH), "RTX A6000", 1240, 0.1),
    (partial(batch_norm, KERNELBENCH), "B200", 740, 0.1),
    # PyProf, 2019: 930 us for the statistics, 380 for the result
    (partial(batch_norm, (64, 64, 112, 112), dtype=HALF, weights=HALF), "V100", 930 + 380, 0.25),
    # An H100, PyTorch 2.11: PyTorch's own kernels for bfloat16, cuDNN's for float16
    (partial(batch_norm, IMAGES, dtype=HALF, layout=LAST), "H100", 140.9, 0.35),
    (partial(batch_norm, IMAGES, dtype=HALF, layout=LAST, gradients=True), "H100", 175.5, 0.2),
    (partial(loss, 16384, 50304, SINGLE), "H100", 4325, 0.2),
    (partial(loss, 8192, 50257, BRAIN), "H100", 739.3, 0.2),
    # Liger-Kernel: 820 to 830 GB/s of what goes in and out
    (partial(log_softmax, 16384, 65536), "A100-80GB", 2 * 16384 * 65536 * 4 / 825e3, 0.15),
    # RepLKNet's table 1: 21.9 and 54.8 ms for 24 layers on a 2080 Ti
    (partial(convolution, (64, 384, 32, 32), 384, 3, 384, 1), "TITAN RTX", 21.9e-3 * REPLK, 0.1),
    (partial(convolution, (64, 384, 32, 32), 384, 7, 384, 3), "TITAN RTX", 54.8e-3 * REPLK, 0.1),
    # An H100, PyTorch 2.11: PyTorch leaves depthwise ones to cuDNN in float16 alone (use_cudnn_depthwise), and not of stride 2 below 256 channels
    (DEPTHWISE, "H100", 274, 0.1),
    (partial(DEPTHWISE, gradients=True), "H100", 546 + 412, 0.1),
    (partial(DEPTHWISE, dtype=HALF), "H100", 61, 0.1),
    (partial(DEPTHWISE, dtype=HALF, gradients=True), "H100", 93 + 74, 0.1),
    (partial(STRIDED, dtype=HALF), "H100", 393, 0.1),
    # and in single precision, channels last, large ones take long: the weight's gradient 4710 of these
    (LARGE, "H100", 369, 0.2),
    (partial(LARGE, gradients=True), "H100", 5469 - 369, 0.25),
    # spio, 2024: 255 and 500 GB/s of what goes in and out
    (GROUPS, "RTX 3090", 1050, 0.1),
    (GROUPS, "RTX 4090", 537, 0.15),
]

NORM, LONG = partial(batch_norm, IMAGES), partial(batch_norm, (64, 64, 112, 112))
ROWS, FILL, COPY = partial(log_softmax, 16384), partial(method, "masked_fill"), partial(method, "copy_")
SQUARES, IMAGE, UP = partial(convolution, IMAGES, 64, 3), gradient_of_an_image, transposed_convolution
VOCABULARY = partial(product, 4096, 50304, 768, HALF)
RATIOS = [  # kernels, others that they are compared with, card, the least and the most
    # Grouped ones of float16 were not measured on an H100: they take what bfloat16's do (the gradient of the weight 9 times its rule)
    (partial(GROUPED, dtype=HALF), partial(GROUPED, dtype=BRAIN), "H100", 0.99, 1.01),
    # A product of complex numbers is four of real ones
    (partial(product, *SQUARE, torch.complex64), partial(product, *SQUARE), "T4", 3.9, 4.1),
    # Rows that are no multiple of 16 bytes cost where loads are slower than the tensor cores; DeepBench's are as fast on V100 and T4
    (partial(product, 4096, 50257, 768, HALF), VOCABULARY, "A100", 2, 3),
    (partial(product, 4096, 50260, 768, HALF), VOCABULARY, "A100", 1.3, 2),
    (partial(product, 4096, 50258, 768, HALF), VOCABULARY, "H100", 1.5, 3),  # no wgmma for these
    (partial(product, 4096, 50258, 768, HALF), VOCABULARY, "V100", 0.98, 1.02),
    # A tile more than the processors is a wave more: 96 boards on 48 of them 1.04 ms, 97 1.48 (tests/accuracy/batch_sweeps.csv)
    (partial(product, 64 * 109 + 128, 512, 4096, HALF), partial(product, 64 * 108, 512, 4096, HALF), "A100", 1.2, 1.7),
    # Channels first are converted for tensor cores, and back in half precision, but not by Volta's (..._nhwckrsc_nchw)
    (partial(SQUARES, dtype=HALF), partial(SQUARES, dtype=HALF, layout=LAST), "A100", 1.6, 1.75),
    (partial(SQUARES, dtype=HALF), partial(SQUARES, dtype=HALF, layout=LAST), "V100", 1.3, 1.35),
    # A transposed one makes few channels as quickly as it takes few, and is what the gradient of an image is
    (partial(UP, 512), partial(UP, 128), "A100", 2.5, 5),
    (partial(UP, 128, BRAIN, 2), partial(IMAGE, 128, BRAIN, 2), "H100", 0.999, 1.001),
    # One block a channel where they come first: as many bytes in 64 channels take longer than in 256
    (LONG, NORM, "H100", 1.5, 3),
    # Rows of a vocabulary are read more than once
    (partial(ROWS, 32768), partial(ROWS, 12288), "A100", 4.2, 5.2),
    # Liger-Kernel: 16 bits are read one by one where layouts differ: 2 for 2 of 3 times the bytes
    (partial(times, BRAIN, (4096,)), partial(times, BRAIN), "A100-80GB", 0.95 * 2 * 2 / 3, 1.05 * 2 * 2 / 3),
    # A copy does not read what it writes; masked_fill copies first; an embedding reads its rows alone
    (partial(method, "add_"), COPY, "A100", 1.47, 1.53),
    (partial(FILL, 0), partial(method, "masked_fill_", 0), "A100", 1.96, 2.04),
    (partial(embedding, 10**6, 64, 65536), partial(embedding, 1024, 64, 65536), "H100", 0.999, 1.001),
    # Few rows of a lookup need no sorting for their gradient
    (partial(gradient_of_a_table, 3073), partial(gradient_of_a_table, 3072), "H100", 4, 8),
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


def test_products_take_what_others_measured():
    """928 of eight sources on 13 cards, float32 to bfloat16, 60 us to seconds: `python -m tests.accuracy.kernels` has the table."""
    found = measured.products()
    logs = [product.log for product in found]
    assert len(logs) > 400 and abs(median(logs)) < math.log(1.05)
    assert within(logs, 15) > 0.6 and within(logs, 30) > 0.8
    rest = [
        log for left in measured.left_out(found).values() for log in left
    ]  # a card's share from the other sources alone
    assert len(rest) > 200 and abs(median(rest)) < math.log(1.1) and within(rest, 30) > 0.7


@pytest.mark.parametrize(
    ("card", "program", "batches"),
    [("RTX 2080 Super", "tower 10x128", (95, 96, 97)), ("V100", "resnet50", (48, 52, 56))],
)
def test_a_wave_more_is_a_step_where_cards_have_one(card, program, batches):
    """tests/accuracy/batch_sweeps.csv: an image takes 41 and 15 % longer with the last of these, and no longer with the one before."""
    before, after = batch_sweeps.steps(batch_sweeps.simulated(card, program, "float16", batches)).values()
    assert before < 0.01 and after > 0.04


# Operations that C++ makes of several kernels, by their launches on an H100 (PyTorch 2.11, torch.profiler, 2026-11-27)
SEVERAL = {
    "logsumexp": (lambda x: x.logsumexp(1), 9),
    "multinomial": (lambda x: x.multinomial(1), 14),
    "randperm": (lambda x: torch.randperm(64, device="cuda"), 12),
    "mse_loss": (lambda x: F.mse_loss(x, x), 2),
    "empty": (lambda x: torch.empty(1 << 24, device="cuda"), 0),
    "empty_permuted": (lambda x: torch.empty_permuted((1 << 24,), (0,), device="cuda"), 0),
    "empty_like": (lambda x: torch.empty_like(torch.empty(1 << 24), device="cuda"), 0),
    "new_empty_strided": (lambda x: x.new_empty_strided((1 << 24,), (1,)), 0),
}


@pytest.mark.parametrize(("function", "launches"), SEVERAL.values(), ids=SEVERAL)
def test_operations_of_several_kernels_or_of_none(function, launches):
    with virtualgpu.dry_run(1, like="H100"):
        clock, x = virtualgpu.machine().clock, torch.rand(8, 4, device="cuda")

        def taken(function):
            function(x)
            kernels, host = clock.computing[0], clock.host
            function(x)
            return clock.computing[0] - kernels, clock.host - host

        kernels, host = taken(function)
        assert kernels == pytest.approx(launches * SPECS["H100"].kernel, rel=0.1)
        assert not launches or host > taken(torch.exp)[1] * (1 + 0.15 * (launches - 1))


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
