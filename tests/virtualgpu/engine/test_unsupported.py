"""What CUDA's kernels refuse and the CPU's take is refused, with numbers and in a dry run; what they take and the CPU's do not is carried out.

Expected: what an H100 said (PyTorch 2.11.0+cu130, 2026-11-26).
"""

import re

import pytest
import torch
from torch.nn import functional as F

import virtualgpu

HALF, BRAIN, LONG, BYTE = torch.float16, torch.bfloat16, torch.int64, torch.uint8
FLOAT8 = torch.float8_e4m3fn
ABSENT = NotImplementedError


def ones(*shape, dtype=torch.float32, device="cuda"):
    return torch.ones(shape, dtype=dtype, device=device)


def halves(*shape):
    return ones(*shape, dtype=HALF)


def whole(*shape, dtype=LONG):
    return torch.zeros(shape, dtype=dtype, device="cuda")


def missing(kernel, kind):
    return ABSENT, f"\"{kernel}\" not implemented for '{kind}'"


def types(first, second):
    return RuntimeError, f"expected scalar type {first} but found {second}"


REFUSED = {
    "mm int64": (lambda: whole(4, 4) @ whole(4, 4), *missing("addmm_cuda", "Long")),
    "mm bool": (lambda: whole(4, 4, dtype=torch.bool) @ whole(4, 4, dtype=torch.bool), *missing("addmm_cuda", "Bool")),
    "bmm int64": (lambda: torch.bmm(whole(2, 4, 4), whole(2, 4, 4)), *missing("baddbmm_cuda", "Long")),
    "mv int64": (lambda: whole(4, 4) @ whole(4), *missing("addmv_impl_cuda", "Long")),
    "dot int64": (lambda: whole(4) @ whole(4), *missing("dot", "Long")),
    "mm float8": (lambda: ones(16, 16).to(FLOAT8) @ ones(16, 16).to(FLOAT8), *missing("addmm_cuda", "Float8_e4m3fn")),
    "add float8": (lambda: ones(4).to(FLOAT8) + ones(4).to(FLOAT8), *missing("ufunc_add_CUDA", "Float8_e4m3fn")),
    "mm mixed": (
        lambda: ones(4, 4) @ halves(4, 4),
        RuntimeError,
        "expected mat1 and mat2 to have the same dtype, but got: float != c10::Half",
    ),
    "linear mixed": (
        lambda: F.linear(ones(4, 8), halves(8, 8), halves(8)),
        RuntimeError,
        "mat1 and mat2 must have the same dtype, but got Float and Half",
    ),
    "linear bias": (
        lambda: F.linear(halves(4, 8), halves(8, 8), ones(8)),
        RuntimeError,
        "self and mat2 must have the same dtype, but got Float and Half",
    ),
    "layer_norm": (lambda: F.layer_norm(halves(4, 8), (8,), ones(8), ones(8)), *types("Half", "Float")),
    "layer_norm half weight": (lambda: F.layer_norm(ones(4, 8), (8,), halves(8)), *types("Float", "Half")),
    "group_norm": (lambda: F.group_norm(halves(2, 8, 4), 2, ones(8), ones(8)), *types("Half", "Float")),
    "conv int64": (
        lambda: F.conv2d(whole(2, 3, 8, 8), whole(4, 3, 3, 3)),
        RuntimeError,
        "getCudnnDataTypeFromScalarType() not supported for Long",
    ),
    "conv mixed": (
        lambda: F.conv2d(halves(2, 3, 8, 8), ones(4, 3, 3, 3)),
        RuntimeError,
        "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    ),
    "conv on host": (
        lambda: F.conv2d(ones(2, 3, 8, 8, device="cpu"), ones(4, 3, 3, 3)),
        RuntimeError,
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same or input should be a MKLDNN tensor",
    ),
    "max_pool2d": (
        lambda: F.max_pool2d(whole(1, 3, 4, 4, dtype=BYTE), 2),
        *missing("max_pool2d_with_indices_out_cuda_frame", "Byte"),
    ),
    "avg_pool2d": (lambda: F.avg_pool2d(whole(1, 3, 4, 4), 2), *missing("avg_pool2d_out_cuda_frame", "Long")),
    "bilinear": (
        lambda: F.interpolate(whole(1, 3, 4, 4, dtype=BYTE), scale_factor=2, mode="bilinear"),
        *missing("upsample_bilinear2d_out_frame", "Byte"),
    ),
    "embedding_bag": (
        lambda: F.embedding_bag(whole(4), ones(8, 8), whole(1), mode="sum", per_sample_weights=halves(4)),
        *types("Float", "Half"),
    ),
    "cross_entropy int32": (
        lambda: F.cross_entropy(ones(4, 8), whole(4, dtype=torch.int32)),
        *missing("nll_loss_forward_reduce_cuda_kernel_2d_index", "Int"),
    ),
    "cdist": (lambda: torch.cdist(halves(4, 8), halves(4, 8)), *missing("cdist_cuda", "Half")),
    "histc": (lambda: torch.histc(halves(4)), RuntimeError, "HalfTensor is not supported"),
    "rand": (lambda: torch.rand(4, dtype=LONG, device="cuda"), *missing("check_uniform_bounds", "Long")),
    "sort": (lambda: whole(4, dtype=torch.uint16).sort(), *missing("sortKeyValueInplace", "UInt16")),
    "_int_mm": (
        lambda: torch._int_mm(whole(8, 32, dtype=torch.int8), whole(32, 32, dtype=torch.int8)),
        RuntimeError,
        "self.size(0) needs to be greater than 16, but got 8",
    ),
    "masked_select": (
        lambda: ones(4).masked_select(whole(4, dtype=BYTE)),
        RuntimeError,
        "masked_select: expected BoolTensor for mask",
    ),
    "mask": (
        lambda: ones(4, 4)[whole(5, dtype=torch.bool)],
        IndexError,
        "The shape of the mask [5] at index 0 does not match the shape of the indexed tensor [4, 4] at index 0",
    ),
    "allclose": (lambda: torch.allclose(ones(4), halves(4)), RuntimeError, "Float did not match Half"),
    "lstsq": (
        lambda: torch.linalg.lstsq(ones(4, 4), ones(4, 4), driver="gelsd"),
        RuntimeError,
        "torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA",
    ),
    "clamp": (
        lambda: torch.clamp(ones(4), torch.tensor(0.0)),
        RuntimeError,
        "got min is on cpu, different from other tensors on cuda:0 (when checking argument in method wrapper_CUDA_clamp_Tensor)",
    ),
    "index on host": (
        lambda: F.embedding(torch.zeros(4, dtype=LONG), ones(8, 8)),
        RuntimeError,
        "got index is on cpu, different from other tensors on cuda:0 (when checking argument in method wrapper_CUDA__index_select)",
    ),
    "condition on host": (
        lambda: torch.where(torch.ones(4, dtype=torch.bool), ones(4), ones(4)),
        RuntimeError,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    ),
    "host storage": (
        lambda: ones(4).set_(ones(4, device="cpu").untyped_storage()),
        RuntimeError,
        'Attempted to set the storage of a tensor on device "cuda:0" to a storage on different device "cpu".',
    ),
    "gradient on host": (
        lambda: (ones(4).requires_grad_() * 2).backward(ones(4, device="cpu")),
        RuntimeError,
        "invalid gradient at index 0 - expected device cuda:0 but got cpu",
    ),
    "softmax": (lambda: whole(4).softmax(0), *missing("host_softmax", "Long")),
    "gelu": (lambda: F.gelu(whole(4)), *missing("GeluCUDAKernelImpl", "Long")),
    "embedding": (
        lambda: F.embedding(ones(4), ones(8, 8)),
        RuntimeError,
        "one of the following scalar types: Long, Int; but got torch.cuda.FloatTensor instead (while checking arguments for embedding)",
    ),
    "fft": (
        lambda: torch.fft.rfft(halves(7)),
        RuntimeError,
        "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a signal size of[7]",
    ),
    "bounds": (lambda: ones(4).uniform_(3, -1), RuntimeError, "[from, to) range, but found from=3 > to=-1"),
    "deviation": (lambda: ones(4).log_normal_(0, 0), RuntimeError, "log_normal_ expects std > 0.0, but found std=0"),
}
TAKEN = {
    "targets of uint8": lambda: F.cross_entropy(ones(4, 8), whole(4, dtype=BYTE)),
    "a value on the host": lambda: ones(4).masked_fill(whole(4, dtype=torch.bool), torch.tensor(1.0)),
    "a mask of uint8": lambda: torch.where(whole(4, dtype=BYTE), ones(4), ones(4)),
    "abs of bool": lambda: whole(4, dtype=torch.bool).abs(),
    "trace of bool": lambda: ones(4, 4, dtype=torch.bool).trace(),
    "nansum of complex": lambda: ones(4, dtype=torch.complex64).nansum(),
    "avg_pool3d": lambda: F.avg_pool3d(halves(1, 1, 4, 4, 4), 2),
    "multi_margin_loss": lambda: F.multi_margin_loss(halves(4, 8), whole(4)),
    "multilabel_margin_loss": lambda: F.multilabel_margin_loss(halves(4, 8), whole(4, 8)),
    "antialias": lambda: F.interpolate(halves(1, 3, 4, 4), scale_factor=2, mode="bilinear", antialias=True),
    "fft": lambda: torch.fft.fft(halves(8)),
    "ihfft2": lambda: torch.fft.ihfft2(halves(2, 8, 16), s=(4, 8), dim=(1, 2), norm="ortho"),
    "irfft": lambda: torch.fft.irfft(ones(5, dtype=torch.complex32)),
    "an empty product": lambda: whole(0, 4) @ whole(4, 4),
    "a pad": lambda: torch.nn.ReflectionPad2d(1)(halves(1, 3, 4, 4)),
}


@pytest.fixture(params=[virtualgpu.gpus, virtualgpu.dry_run], ids=["numbers", "dry"])
def h100(request):
    with request.param(1, like="H100"):
        yield


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(h100, name):
    call, kind, words = REFUSED[name]
    for _ in range(2):  # also where a dry run remembers a call like it
        with pytest.raises(kind, match=re.escape(words)) as caught:
            call()
        assert caught.type is kind


@pytest.mark.parametrize("name", TAKEN)
def test_what_cuda_takes_is_carried_out(h100, name):
    assert TAKEN[name]().is_cuda


def test_numbers_are_those_of_single_precision():
    """Rounded once."""
    torch.manual_seed(0)
    image, rows = torch.randn(1, 2, 4, 4, 4), torch.randn(4, 8)
    classes = torch.randint(8, (4,))
    with virtualgpu.gpus(1, like="H100"):
        for kind in (HALF, BRAIN):
            for function, *operands in (
                (lambda x: F.avg_pool3d(x, 2), image),
                (lambda x: F.multi_margin_loss(x, classes.to(x.device)), rows),
            ):
                x = operands[0].to(kind).cuda().requires_grad_()
                exact = operands[0].to(kind).float().requires_grad_()
                out, expected = function(x), function(exact)
                out.sum().backward()
                expected.sum().backward()
                assert out.cpu().equal(expected.to(kind))
                assert x.grad.cpu().equal(exact.grad.to(kind))
        x = torch.randn(4, 8).half()
        wave = x.cuda().requires_grad_()
        out = torch.fft.rfft(wave, norm="ortho")
        out.real.float().sum().backward()
        assert out.dtype is torch.complex32
        exact = torch.fft.rfft(x.float(), norm="ortho")
        assert torch.view_as_real(out).cpu().equal(torch.view_as_real(exact).half())
        assert wave.grad.dtype is HALF
        assert ones(3, 3, dtype=torch.bool).trace().item() == 3


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN])
def test_the_gradient_of_a_batch_first_lies_by_time(h100, kind):
    """cuDNN's: `.view` of it fails."""
    net, x = kind(8, 8, batch_first=True, device="cuda"), ones(4, 3, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(net(x)[0].sum(), x)
    assert gradient.stride() == (8, 32, 1)


def test_the_gradient_of_a_frozen_batch_norm_is_contiguous(h100):
    """Its result has channels last."""
    x = ones(2, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    out = torch.nn.BatchNorm2d(4, device="cuda").eval()(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert (out.stride(), gradient.stride()) == ((36, 1, 12, 4), (36, 9, 3, 1))
