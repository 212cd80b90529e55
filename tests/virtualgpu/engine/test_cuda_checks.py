# ruff: noqa: F403, F405
"""What CUDA refuses is refused, with numbers and in a dry run, in its words; what it takes and the CPU's kernels do not is carried out.

Expected: what an H100 said (PyTorch 2.11.0+cu130, 2026-11-26).
"""

import re
import warnings

import pytest

from tests.virtualgpu.engine.tools import *

FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
ABSENT, HOST = NotImplementedError, {"device": "cpu"}

REFUSED = table("""
    # a type that the kernel does not take: its name, and that of the type
    whole(4, 4) @ whole(4, 4) | addmm_cuda | Long
    whole(4, 4, dtype=BOOL) @ whole(4, 4, dtype=BOOL) | addmm_cuda | Bool
    torch.bmm(whole(2, 4, 4), whole(2, 4, 4)) | baddbmm_cuda | Long
    whole(4, 4) @ whole(4) | addmv_impl_cuda | Long
    whole(4) @ whole(4) | dot | Long
    ones(16, 16).to(FLOAT8) @ ones(16, 16).to(FLOAT8) | addmm_cuda | Float8_e4m3fn
    ones(4).to(FLOAT8) + ones(4).to(FLOAT8) | ufunc_add_CUDA | Float8_e4m3fn
    F.max_pool2d(whole(1, 3, 4, 4, dtype=BYTE), 2) | max_pool2d_with_indices_out_cuda_frame | Byte
    F.avg_pool2d(whole(1, 3, 4, 4), 2) | avg_pool2d_out_cuda_frame | Long
    F.interpolate(whole(1, 3, 4, 4, dtype=BYTE), scale_factor=2, mode="bilinear") | upsample_bilinear2d_out_frame | Byte
    F.cross_entropy(ones(4, 8), whole(4, dtype=INT)) | nll_loss_forward_reduce_cuda_kernel_2d_index | Int
    torch.cdist(halves(4, 8), halves(4, 8)) | cdist_cuda | Half
    torch.rand(4, dtype=LONG, device="cuda") | check_uniform_bounds | Long
    whole(4, dtype=torch.uint16).sort() | sortKeyValueInplace | UInt16
    whole(4).softmax(0) | host_softmax | Long
    F.gelu(whole(4)) | GeluCUDAKernelImpl | Long
    # tensors of two types
    F.layer_norm(halves(4, 8), (8,), ones(8), ones(8)) | expected scalar type Half but found Float
    F.layer_norm(ones(4, 8), (8,), halves(8)) | expected scalar type Float but found Half
    F.group_norm(halves(2, 8, 4), 2, ones(8), ones(8)) | expected scalar type Half but found Float
    F.embedding_bag(whole(4), ones(8, 8), whole(1), mode="sum", per_sample_weights=halves(4)) | expected scalar type Float but found Half
    ones(4, 4) @ halves(4, 4) | expected mat1 and mat2 to have the same dtype, but got: float != c10::Half
    F.linear(ones(4, 8), halves(8, 8), halves(8)) | mat1 and mat2 must have the same dtype, but got Float and Half
    F.linear(halves(4, 8), halves(8, 8), ones(8)) | self and mat2 must have the same dtype, but got Float and Half
    F.conv2d(halves(2, 3, 8, 8), ones(4, 3, 3, 3)) | Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be
    torch.allclose(ones(4), halves(4)) | Float did not match Half
    # types, sizes and options
    F.conv2d(whole(2, 3, 8, 8), whole(4, 3, 3, 3)) | getCudnnDataTypeFromScalarType() not supported for Long
    torch.histc(halves(4)) | HalfTensor is not supported
    torch._int_mm(whole(8, 32, dtype=INT8), whole(32, 32, dtype=INT8)) | self.size(0) needs to be greater than 16, but got 8
    ones(4).masked_select(whole(4, dtype=BYTE)) | masked_select: expected BoolTensor for mask
    ones(4, 4)[whole(5, dtype=BOOL)] | The shape of the mask [5] at index 0 does not match the shape of the indexed tensor [4, 4] at index 0
    torch.linalg.lstsq(ones(4, 4), ones(4, 4), driver="gelsd") | `driver` other than `gels` is not supported on CUDA
    F.embedding(ones(4), ones(8, 8)) | types: Long, Int; but got torch.cuda.FloatTensor instead (while checking arguments for embedding)
    torch.fft.rfft(halves(7)) | sizes are powers of two when computing in half precision, but got a signal size of[7]
    ones(4).uniform_(3, -1) | [from, to) range, but found from=3 > to=-1
    ones(4).log_normal_(0, 0) | log_normal_ expects std > 0.0, but found std=0
    scaled_product(transposed=False) | col
    # places
    F.conv2d(ones(2, 3, 8, 8, **HOST), ones(4, 3, 3, 3)) | Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same or input should be a MKLDNN tensor
    torch.clamp(ones(4), torch.tensor(0.0)) | got min is on cpu, different from other tensors on cuda:0 (when checking argument in method wrapper_CUDA_clamp_Tensor)
    F.embedding(whole(4, **HOST), ones(8, 8)) | got index is on cpu, different from other tensors on cuda:0 (when checking argument in method wrapper_CUDA__index_select)
    torch.where(whole(4, dtype=BOOL, **HOST), ones(4), ones(4)) | found at least two devices, cuda:0 and cpu!
    ones(4).set_(ones(4, **HOST).untyped_storage()) | storage of a tensor on device "cuda:0" to a storage on different device "cpu".
    (ones(4, learns=True) * 2).backward(ones(4, **HOST)) | invalid gradient at index 0 - expected device cuda:0 but got cpu
""")
TAKEN = table("""
    F.cross_entropy(ones(4, 8), whole(4, dtype=BYTE))
    ones(4).masked_fill(whole(4, dtype=BOOL), torch.tensor(1.0))
    torch.where(whole(4, dtype=BYTE), ones(4), ones(4))
    whole(4, dtype=BOOL).abs()
    ones(4, 4, dtype=BOOL).trace()
    ones(4, dtype=torch.complex64).nansum()
    F.avg_pool3d(halves(1, 1, 4, 4, 4), 2)
    F.multi_margin_loss(halves(4, 8), whole(4))
    F.multilabel_margin_loss(halves(4, 8), whole(4, 8))
    F.interpolate(halves(1, 3, 4, 4), scale_factor=2, mode="bilinear", antialias=True)
    torch.fft.fft(halves(8))
    torch.fft.ihfft2(halves(2, 8, 16), s=(4, 8), dim=(1, 2), norm="ortho")
    torch.fft.irfft(ones(5, dtype=torch.complex32))
    whole(0, 4) @ whole(4, 4)
    nn.ReflectionPad2d(1)(halves(1, 3, 4, 4))
    scaled_product(transposed=True)
    # of which a dry run might think otherwise
    F.cross_entropy(halves(300, 300), whole(300), halves(300))
    F.embedding(whole(300), ones(300, 64))
    torch.where(ones(90, 90) > 0, ones(90, 90), halves(90, 90))
    torch.linalg.solve(torch.eye(3, device="cuda"), ones(3, 1))
    torch.lu_unpack(*torch.linalg.lu_factor(torch.eye(3, device="cuda")))[0]
    torch.linalg.det(ones(3, 3, learns=True))
    ones(8, 8)[torch.tensor([7, 7])]
    torch.histc(whole(9))
    torch.multinomial(ones(9), 3)
    whole(9) // ones(9, dtype=LONG)
""")


def scaled_product(transposed):
    """Of float8: rows by columns, as cuBLASLt takes them."""
    left, right, one = ones(32, 32).to(FLOAT8), ones(32, 32).to(FLOAT8), ones()
    out = torch._scaled_mm(left, right.t() if transposed else right, one, one, out_dtype=BRAIN)
    assert virtualgpu.machine().dry or out.unique().tolist() == [32]
    return out


@pytest.fixture(params=MODES, ids=["numbers", "dry"])
def h100(request):
    with request.param(1, like="H100"):
        yield


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0])
def test_what_cuda_refuses_is_refused(h100, row):
    call, *words = row
    kind = ABSENT if len(words) == 2 else IndexError if "mask [5]" in row[1] else RuntimeError
    message = words[0] if len(words) == 1 else f"\"{words[0]}\" not implemented for '{words[1]}'"
    for _ in range(2):  # also where a dry run remembers a call like it
        with pytest.raises(kind, match=re.escape(message)) as caught:
            eval(call)
        assert caught.type is kind


@pytest.mark.parametrize("call", TAKEN)
def test_what_cuda_takes_is_carried_out(h100, call):
    assert eval(call).is_cuda


def test_numbers_of_what_the_cpu_has_no_half_kernel_of_are_rounded_once():
    torch.manual_seed(0)
    image, rows, classes = torch.randn(1, 2, 4, 4, 4), torch.randn(4, 8), torch.randint(8, (4,))
    functions = (lambda x: F.avg_pool3d(x, 2), image), (lambda x: F.multi_margin_loss(x, classes.to(x.device)), rows)
    with virtualgpu.gpus(1, like="H100"):
        for kind in (HALF, BRAIN):
            for function, operand in functions:
                x = operand.to(kind)
                found, exact = gradients(function, x, device="cuda"), gradients(function, x.float())
                assert all(one.equal(other.to(kind)) for one, other in zip(found, exact, strict=True))
        x = rows.half()
        wave = x.cuda().requires_grad_()
        out = torch.fft.rfft(wave, norm="ortho")
        out.real.float().sum().backward()
        exact = torch.fft.rfft(x.float(), norm="ortho")
        assert torch.view_as_real(out).cpu().equal(torch.view_as_real(exact).half()) and wave.grad.dtype is HALF
        assert ones(3, 3, dtype=torch.bool).trace().item() == 3


# What the CPU's kernel refuses of such operands, by their size n: a dry run asks it
TYPES = table("""
    ones(n, n) @ halves(n, n)
    ones(2, n, n) @ halves(n, n)
    F.linear(ones(n, n), ones(n, n), halves(n))
    torch.mv(ones(n, n), ones(n, dtype=DOUBLE))
    F.conv2d(ones(1, 3, n, n), halves(4, 3, 3, 3))
    F.cross_entropy(ones(n, n), ones(n, dtype=INT))
    F.cross_entropy(halves(n, n), ones(n, dtype=LONG), ones(n))
    F.binary_cross_entropy(ones(n, n), halves(n, n))
    F.mse_loss(whole(n, n), whole(n, n))
    F.layer_norm(ones(n, n), (n,), halves(n), halves(n))
    F.batch_norm(ones(n, 4, n), ones(4), ones(4), halves(4), halves(4), True)
    ones(n, n).index_add(0, ones(n, dtype=LONG), halves(n, n))
    ones(n, n).index_put((ones(n, dtype=LONG),), halves(n, n))
    ones(n, n).index_select(0, ones(n))
    F.grid_sample(ones(1, 1, n, n), halves(1, n, n, 2))
    ones(n, n) & ones(n, n)
    ones(n, n, dtype=torch.complex64).max()
    torch.linalg.cholesky(halves(n, n))
    whole(n, n).mean()
    nn.MultiheadAttention(8, 2, device="cuda")(*[halves(n, 2, 8)] * 3)
    # shapes, and memory that is written twice
    ones(n, n) @ ones(n + 1, n)
    ones(n, n) + ones(n, n + 1)
    F.conv2d(ones(1, 3, n, n), ones(4, 2, 3, 3))
    F.conv_transpose2d(ones(1, 3, n, n), ones(4, 3, 3, 3))
    F.conv1d(ones(3, n), ones(4, 3, 3, 3))
    F.conv2d(ones(1, 3, n, n), ones(4, 3, 3, 3), ones(5))
    F.softmax(ones(n, n), 3)
    ones(n, n).index_put((ones(n, dtype=LONG),), ones(3, n))
    torch.cat([ones(n, n), ones(n, n + 1)])
    ones(1, n).expand(n, n).add_(1)
    ones(1, n).expand(n, n).copy_(ones(n, n))
    (lambda memory: memory[1:].add_(memory[:-1]))(ones(2000))
    (lambda memory: memory[1:].copy_(memory[:-1]))(ones(2000))
""")


@pytest.mark.parametrize("n", [4, 150])
@pytest.mark.parametrize("call", TYPES)
def test_a_dry_run_refuses_what_a_run_with_numbers_does(gpus, call, n):
    found = []
    for run in MODES:
        with run(2), pytest.raises((RuntimeError, IndexError)) as caught:
            eval(call, globals(), {"n": n})
        found.append((caught.type, str(caught.value)))
    assert found[0] == found[1]


def test_asking_the_cpus_kernel_takes_no_memory_and_draws_no_numbers(gpus):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with virtualgpu.dry_run():
        torch.multinomial(ones(7), 3)
        F.dropout(ones(7, 9))
        ones(5, 3).normal_()
        assert ones(1, 300).expand(300, 300).fill_(1).is_cuda
        far = torch.ones(1).expand(1 << 40)  # a billion numbers at one place: the CPU would go through them all
        assert torch.empty_like(far, device="meta").shape == (far + far).shape == far.shape
    assert torch.equal(torch.rand(3), expected)


# -- torch.use_deterministic_algorithms(True): what CUDA has no deterministic kernel of is refused, and nothing else


def learn(function, *sizes):
    """A case: the function of tensors of these sizes, and its backward pass."""

    def run(device):
        function(*[torch.rand(*size, device=device, requires_grad=True) for size in sizes]).sum().backward()

    return run


def resized(kernel, dims):
    kernel = getattr(torch.ops.aten, kernel).default
    return learn(lambda x: kernel(x, [4] * dims, False), (1, 1, *[2] * dims))


def grid(dims):
    sizes = (1, 1, *[3] * dims), (1, *[2] * dims, dims)
    return learn(lambda x, at: F.grid_sample(x, at, align_corners=False), *sizes)


def bags(mode):
    return learn(lambda table: F.embedding_bag(torch.tensor([[0, 1]], device=table.device), table, mode=mode), (3, 2))


def counted(weighted):
    def count(device):
        return whole(3, device=device).bincount(torch.rand(3, device=device) if weighted else None)

    return count


def scattered(**options):
    """Into one place."""
    return lambda device: ones(3, device=device).scatter(0, whole(2, device=device), ones(2, device=device), **options)


SQUARE, CUBE = (1, 1, 4, 4), (1, 1, 4, 4, 4)
ALERTS = {
    "avg_pool3d_backward_cuda": learn(lambda x: F.avg_pool3d(x, 2), CUBE),
    "adaptive_avg_pool2d_backward_cuda": learn(lambda x: F.adaptive_avg_pool2d(x, 2), SQUARE),
    "adaptive_avg_pool3d_backward_cuda": learn(lambda x: F.adaptive_avg_pool3d(x, 2), CUBE),
    "adaptive_max_pool2d_backward_cuda": learn(lambda x: F.adaptive_max_pool2d(x, 2), SQUARE),
    "fractional_max_pool2d_backward_cuda": learn(lambda x: F.fractional_max_pool2d(x, 2, output_size=2), SQUARE),
    "fractional_max_pool3d_backward_cuda": learn(lambda x: F.fractional_max_pool3d(x, 2, output_size=2), CUBE),
    "reflection_pad1d_backward_out_cuda": learn(lambda x: F.pad(x, (1, 1), "reflect"), (1, 1, 4)),
    "reflection_pad3d_backward_out_cuda": learn(lambda x: F.pad(x, (1,) * 6, "reflect"), CUBE),
    "upsample_linear1d_backward_out_cuda": resized("upsample_linear1d", 1),
    "upsample_bilinear2d_backward_out_cuda": resized("upsample_bilinear2d", 2),
    "upsample_bicubic2d_backward_out_cuda": resized("upsample_bicubic2d", 2),
    "upsample_trilinear3d_backward_out_cuda": resized("upsample_trilinear3d", 3),
    "grid_sampler_2d_backward_cuda": grid(2),
    "grid_sampler_3d_backward_cuda": grid(3),
    "embedding_bag_backward_cuda_max": bags("max"),
    "nll_loss2d_forward_out_cuda_template": lambda device: F.nll_loss(
        torch.rand(1, 2, 3, 3, device=device), whole(1, 3, 3, device=device)
    ),
    "ctc_loss_backward_gpu": learn(
        lambda x: F.ctc_loss(x.log_softmax(2), whole(1, 1, device="cpu") + 1, [4], [1]), (4, 1, 3)
    ),
    "_histc_cuda with floating point input": lambda device: torch.rand(3, device=device).histc(),
    "_bincount_cuda": counted(True),
    "put_": lambda device: ones(3, device=device).put_(whole(2, device=device), ones(2, device=device), True),
    "scatter_reduce_cuda_kernel": scattered(reduce="add"),
    "median CUDA with indices output": lambda device: torch.rand(3, device=device).median(0),
}
ALLOWED = {
    "bilinear, as nn has it": learn(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (1, 1, 2, 2)),
    "replicate": learn(lambda x: F.pad(x, (1, 1), "replicate"), (1, 1, 4)),
    "means of bags": bags("mean"),
    "scatter": scattered(),
    "without weights": counted(False),
    "one median": lambda device: torch.rand(3, device=device).median(),
    "cross entropy": learn(lambda x: F.cross_entropy(x, whole(2, device=x.device)), (2, 3)),
    "max_pool2d": learn(lambda x: F.max_pool2d(x, 2), SQUARE),
    "a mean of pictures": learn(lambda x: F.adaptive_avg_pool2d(x, 1), SQUARE),
    "scatter_add": learn(lambda x: torch.zeros_like(x).scatter_add(0, whole(3, device=x.device), x), (3,)),
}


@pytest.fixture
def no_mode_afterwards():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ALERTS)
def test_nondeterministic_kernels_are_refused_on_a_gpu_alone(gpus, no_mode_afterwards, name):
    ALERTS[name]("cuda")
    torch.use_deterministic_algorithms(True)
    ALERTS[name]("cpu")
    refused = pytest.raises(RuntimeError, match=f"^{name} does not have a deterministic implementation, but you set")
    with refused:
        ALERTS[name]("cuda")
    with virtualgpu.dry_run(), refused:
        ALERTS[name]("cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match=f"^{name} does not have .*warn_only=True"):
        ALERTS[name]("cuda")


@pytest.mark.parametrize("name", ALLOWED)
def test_deterministic_kernels_are_allowed(gpus, no_mode_afterwards, name):
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ALLOWED[name]("cuda")
