"""What CUDA's kernels refuse and the CPU's take, in CUDA's words: types, sizes, options, and nondeterministic kernels.

`data/cuda_checks.toml` has the checks of one type or number, the names of kernels, and those of types; here are the others.
"""

import re
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from virtualgpu.engine.cuda_differences import HALVES
from virtualgpu.engine.storage import gpu_of

TABLES = tomllib.loads((Path(__file__).parent / "data" / "cuda_checks.toml").read_text("utf-8"))

# -- CUDA's words for what the CPU's kernels refuse: the name of the kernel, and the names of types on a GPU.

KERNELS = TABLES["kernels"]  # {the CPU's name of a kernel in an error: CUDA's}
KERNEL = re.compile(r'^"(\w+)" not implemented')
TYPE = re.compile(r"\btorch\.(?=[A-Z]\w*Tensor\b)|\bCPU(?=\w+Type\b)")
ON_GPU = {"torch.": "torch.cuda.", "CPU": "CUDA"}


def of_cuda(error: Exception) -> Exception:
    """The same error, or one of its type in CUDA's words."""
    message = str(error)
    found = KERNEL.match(message)
    if found is not None and found[1] in KERNELS:
        message = message.replace(found[1], KERNELS[found[1]], 1)
    if "Expected tensor for argument" in message:
        message = TYPE.sub(lambda prefix: ON_GPU[prefix[0]], message)
    return error if message == str(error) else type(error)(message)


# What PyTorch's errors call the types of numbers: 'Half' in most of them, c10::Half where C++ prints the type itself, and HalfTensor
DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
NAMES = {DTYPES[name]: words for name, words in TABLES["types"].items()}
for _name, _kind in DTYPES.items():
    NAMES.setdefault(_kind, _name[0].upper() + _name[1:])  # float8_e4m3fn: Float8_e4m3fn
C_NAMES = {DTYPES[name]: words for name, words in TABLES["c_types"].items()}
LEGACY = {DTYPES[name]: f"{NAMES[DTYPES[name]]}Tensor" for name in TABLES["legacy_types"].split()}


# -- torch.use_deterministic_algorithms(True): CUDA's kernels that have no deterministic implementation, and say so.


MAX = 2  # embedding_bag's number of mode="max"
# Of those that alert for some arguments alone: do these?
SOMETIMES: dict[str, Callable[..., bool]] = {
    "histc": lambda args, kwargs: args[0].is_floating_point(),
    "bincount": lambda args, kwargs: len(args) > 1 and args[1] is not None,
    "_embedding_bag_backward": lambda args, kwargs: args[8] == MAX,
    # accumulate=True
    **dict.fromkeys(("put", "put_"), lambda args, kwargs: len(args) > 3 and args[3]),
    # with reduce=, of a tensor; that of a number says nothing
    **dict.fromkeys(
        ("scatter", "scatter_"),
        lambda args, kwargs: "reduce" in kwargs and len(args) > 3 and isinstance(args[3], Tensor),
    ),
    # along one dimension
    **dict.fromkeys(("median", "nanmedian"), lambda args, kwargs: len(args) > 1),
}
# {operation of ATen: (name in the message, whether these arguments need it)}
ALERTS = {operation: (name, SOMETIMES.get(operation)) for operation, name in TABLES["alerts"].items()}


def check(op, args, kwargs) -> None:
    """Raises PyTorch's RuntimeError for an operation in ALERTS, or warns, where `warn_only` was asked for."""
    name, needed = op.alert
    if needed is not None and not needed(args, kwargs):
        return
    message = (
        f"{name} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True"
    )
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(f"{message}, warn_only=True)'.", stacklevel=5)
        return
    raise RuntimeError(
        f"{message})'. You can turn off determinism just for this operation, or you can use the 'warn_only=True' option, if that's acceptable "
        "for your application."
    )


# -- What CUDA's kernels refuse and the CPU's, or those for shapes alone, take: types, sizes, options.
#
# Asked before an operation on a GPU is carried out, with numbers and in a dry run alike. An operation that is not here is refused by the
# CPU's kernel or by none.


REAL = {*HALVES, torch.float32, torch.float64}
NUMBERS = REAL | {torch.complex64, torch.complex128}
EXACT = frozenset((torch.float32, torch.float64))
FLOAT8 = frozenset(kind for name, kind in DTYPES.items() if name.startswith("float8"))
SETS = {
    "real": REAL,
    "numbers": NUMBERS,
    "without bfloat16": REAL - {torch.bfloat16},
    "exact": EXACT,
    "float8": FLOAT8,
    "unsigned": frozenset((torch.uint16, torch.uint32, torch.uint64)),
}
MM, BMM = "addmm_cuda", "baddbmm_cuda"
BLACKWELL = (10, 0)
# Types that cuDNN has a name for, without a convolution of them
NAMED_BY_CUDNN = frozenset((torch.int32, torch.uint8, torch.int8))


def _not_implemented(kernel: str, dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(f"\"{kernel}\" not implemented for '{NAMES[dtype]}'")


def _expected(tensor: Tensor, other: Tensor) -> RuntimeError:
    return RuntimeError(f"expected scalar type {NAMES[tensor.dtype]} but found {NAMES[other.dtype]}")


def _only(kernel: str, types, at: int = 0):
    """The kernel has this name, and takes these types of the argument `at`, where there is anything in it."""

    def check(*args, **kwargs):
        tensor = args[at] if at < len(args) else None
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return
        if tensor.dtype not in types and tensor.numel():
            raise _not_implemented(kernel, tensor.dtype)

    return check


def _all_but(kernel: str, types):
    """The kernel takes none of these types."""

    def check(*args, **kwargs):
        for tensor in args[:2]:
            if isinstance(tensor, Tensor) and tensor.dtype in types and tensor.numel():
                raise _not_implemented(kernel, tensor.dtype)

    return check


def _positive(at: int, argument: str, default: float, message: str):
    """A number that has to be positive."""

    def check(*args, **kwargs):
        value = args[at] if at < len(args) else kwargs.get(argument, default)
        if not value > 0:
            raise RuntimeError(f"{message}={value:g}")

    return check


def _draws(kernel: str):
    """A factory draws floating point alone."""

    def check(*args, dtype=None, **kwargs):
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise _not_implemented(kernel, dtype)

    return check


def _refused(condition: Callable[..., bool], message: str, error: type[Exception] = RuntimeError):
    """Refused where the condition holds for its arguments, in these words."""

    def check(*args, **kwargs):
        if condition(*args, **kwargs):
            raise error(message)

    return check


def _product(kernel: str, lhs: int, rhs: int):
    """Matrices of floating point alone; both of one type, in CUDA's words."""
    types = _only(kernel, NUMBERS, lhs)

    def check(*args, **kwargs):
        first, second = args[lhs], args[rhs]
        if second.dtype is first.dtype and first.dtype not in NUMBERS:
            types(*args)
        elif second.dtype is not first.dtype and kernel == MM and first.layout is second.layout is torch.strided:
            _one_type(first, second, args[0] if lhs else None)
        elif first.layout is torch.sparse_coo and first.dtype in HALVES and second.layout is torch.strided:
            # s_addmm_out_sparse_dense_cuda (cuda/SparseCUDABlas.cu)
            raise _not_implemented("addmm_sparse_cuda", first.dtype)

    return check


def _one_type(first: Tensor, second: Tensor, added: Tensor | None) -> None:
    """addmm_out_cuda_impl (cuda/Blas.cpp); addmm looks at what is added first."""
    if added is None:
        kinds = [C_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in (first, second)]
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {kinds[0]} != {kinds[1]}")
    if added.dtype is second.dtype:
        raise RuntimeError(
            f"mat1 and mat2 must have the same dtype, but got {NAMES[first.dtype]} and {NAMES[second.dtype]}"
        )


def _convolution(input, weight, bias=None, *rest, **kwargs):
    """Of floating point alone, and all of one type."""
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype is not input.dtype:
            kinds = [f"torch.cuda.{LEGACY.get(tensor.dtype, tensor.dtype)}" for tensor in (input, other)]
            raise RuntimeError(f"Input type ({kinds[0]}) and {name} type ({kinds[1]}) should be the same")
    if input.dtype not in NUMBERS and input.numel():
        if input.dtype in NAMED_BY_CUDNN:
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        raise RuntimeError(f"getCudnnDataTypeFromScalarType() not supported for {NAMES[input.dtype]}")


def _norm(weights_at: int):
    """layer_norm and group_norm read weights as their input's type (aten/src/ATen/native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu)."""

    def check(*args, **kwargs):
        for weight in args[weights_at : weights_at + 2]:
            if isinstance(weight, Tensor) and weight.dtype is not args[0].dtype and args[0].dtype in REAL:
                if weights_at == 1 and args[0].dtype not in HALVES:
                    return  # is_mixed_type: the same words for all devices
                raise _expected(args[0], weight)

    return check


def _embedding_bag(weight, indices, offsets, scale=False, mode=0, sparse=False, per_sample=None, *rest, **kwargs):
    """The weights of samples have the type of what they weigh (cuda/EmbeddingBag.cu)."""
    if isinstance(per_sample, Tensor) and per_sample.dtype is not weight.dtype:
        raise _expected(weight, per_sample)


def _int_mm(lhs, rhs, **kwargs):
    """Sizes that cuBLASLt can do (cuda/Blas.cpp)."""
    if lhs.dim() != 2 or rhs.dim() != 2:
        return
    if lhs.shape[0] <= 16:
        raise RuntimeError(f"self.size(0) needs to be greater than 16, but got {lhs.shape[0]}")
    for name, size in (("self", lhs.shape[1]), ("mat2", rhs.shape[1])):
        if not size or size % 8:
            raise RuntimeError(f"{name}.size(1) needs to be greater than 0 and a multiple of 8, but got {size}")


def _scaled_mm(lhs, rhs, *rest, **kwargs):
    """Rows of whole 16 bytes (cuda/ScaledBlas.cpp); before Blackwell, matrices of rows by those of columns alone."""
    if lhs.dim() != 2 or rhs.dim() != 2 or lhs.dtype not in FLOAT8:
        return
    if lhs.shape[1] % 16:
        size = "x".join(map(str, lhs.shape))
        raise RuntimeError(f"Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ({size}).")
    if rhs.shape[0] % 16 or rhs.shape[1] % 16:
        raise RuntimeError(f"mat2 shape ({rhs.shape[0]}x{rhs.shape[1]}) must be divisible by 16")
    if (lhs.stride(1) != 1 or rhs.stride(0) != 1) and gpu_of(lhs).spec.capability < BLACKWELL:
        raise RuntimeError("Only multiplication of row-major and column-major matrices is supported by cuBLASLt")


def _index(tensor, indices, *rest, **kwargs):
    """A mask has the sizes of what it chooses from."""
    at = 0
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            at += 1
            continue
        for dim in range(index.dim()):
            if at + dim < tensor.dim() and index.shape[dim] != tensor.shape[at + dim]:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {dim} does not match the shape of the indexed tensor "
                    f"{list(tensor.shape)} at index {at + dim}"
                )
        at += index.dim()


def _nll_loss(tensor, target, *rest, **kwargs):
    """Targets of int64 or uint8 (cuda/NLLLoss.cu)."""
    if target.dtype not in (torch.int64, torch.uint8):
        raise _not_implemented("nll_loss_forward_reduce_cuda_kernel_2d_index", target.dtype)


def _allclose(tensor, other, *rest, **kwargs):
    if other.dtype is not tensor.dtype:
        raise RuntimeError(f"{NAMES[tensor.dtype]} did not match {NAMES[other.dtype]}")


def _uniform(tensor, low=0.0, high=1.0, **kwargs):
    if tensor.dtype not in REAL:
        raise _not_implemented("check_uniform_bounds", tensor.dtype)
    if low > high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low:g} > to={high:g}")


def _geometric(tensor, p, **kwargs):
    if not 0 < p < 1:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p:g}")


def _lstsq(lhs, rhs, rcond=None, *, driver=None, **kwargs):
    if lhs.dim() < 2:
        raise RuntimeError("torch.linalg.lstsq: input must have at least 2 dimensions.")
    if driver not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")


# By name: a function of the operation's arguments that raises CUDA's error
CHECKS: dict[str, Callable] = {
    **{name: _only(row["kernel"], SETS[row["types"]], row.get("at", 0)) for name, row in TABLES["takes"].items()},
    **{name: _all_but(row["kernel"], SETS[row["types"]]) for name, row in TABLES["refuses"].items()},
    **{name: _positive(**row) for name, row in TABLES["positive"].items()},
    **{name: _draws(kernel) for name, kernel in TABLES["draws"].items()},
    "mm": _product(MM, 0, 1),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation"), _product(MM, 1, 2)),
    "bmm": _product(BMM, 0, 1),
    **dict.fromkeys(("baddbmm", "baddbmm_"), _product(BMM, 1, 2)),
    "_int_mm": _int_mm,
    "_scaled_mm": _scaled_mm,
    "convolution": _convolution,
    "native_layer_norm": _norm(2),
    "native_group_norm": _norm(1),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _embedding_bag),
    "histc": _refused(lambda x, *args, **options: x.dtype is torch.float16, "HalfTensor is not supported"),
    "linalg_lstsq": _lstsq,
    "linalg_ldl_solve": _refused(
        lambda factors, pivots, other, *, hermitian=False, **options: hermitian and other.is_complex(),
        "torch.linalg.ldl_solve: complex tensors with hermitian=True flag are not supported on CUDA.",
    ),
    "masked_select": _refused(
        lambda x, mask, **options: mask.dtype is not torch.bool, "masked_select: expected BoolTensor for mask"
    ),
    "index": _index,
    "nll_loss_forward": _nll_loss,
    **dict.fromkeys(
        ("median", "nanmedian"),
        _refused(lambda x, *args, **options: x.dim() > 25, "CUDA Tensors cannot have more than 25 dimensions"),
    ),
    "multinomial": _refused(
        lambda x, *args, **options: x.dim() and x.shape[-1] > 1 << 24, "number of categories cannot exceed 2^24"
    ),
    "allclose": _allclose,
    "uniform_": _uniform,
    "geometric_": _geometric,
}
