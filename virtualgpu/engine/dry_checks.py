"""What a dry run refuses, as a run with numbers does: operands whose types do not go together, shapes that do not fit, a result that overlaps.

PyTorch's meta kernels look at less than its other kernels do, and have words of their own. So the CPU's kernel is asked, once for each
operation, shapes and types that a dry run meets: small operands as they are, large ones as small ones of the same types. What it says of
values is not heard: those are ours.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from virtualgpu import _compat, errors
from virtualgpu.engine import cuda_checks
from virtualgpu.engine.cuda_differences import HALVES
from virtualgpu.engine.operations import MASKS, Operation
from virtualgpu.engine.placement import type_name
from virtualgpu.engine.storage import reach

ERRORS = (RuntimeError, IndexError, TypeError, ValueError)  # NotImplementedError is one of the first
SMALL = 4096  # numbers of all operands, and how often they may be repeated
LONG = 16  # sizes above it are made smaller, alike where they are alike
# A GPU has kernels for more of these types than the CPU
OF_GPUS = (
    torch.complex32,
    *(kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and "float8" in str(kind)),
)
FLOATS = (*HALVES, torch.float32, torch.float64)
OVERLAPS = re.compile("single memory location")
OVERLAP = "unsupported operation: {} refer to a single memory location. Please clone() the tensor before performing the operation."
# What the CPU says of types, or of dimensions, is true of larger operands as well
OF_TYPES = re.compile(
    r"dtype|scalar type|not implemented for|result type|not supported for|complex|[Bb]ool|same type|Found type"
    r"|Dimension out of range|supposed to be a vector|must be 1 dimension"
)
OF_VALUES = re.compile(r"ZeroDivisionError|[Pp]ivots|offsets|lengths|invalid multinomial|sum to|[Ss]ingular|converge")
# No partial overlap with what is read; none at all
PARTIAL = {"copy_", "cat", "masked_fill_"}
WHOLE = {"scatter_", "scatter_add_", "scatter_reduce_", "index_add_", "index_copy_", "index_put_", "gather"}
# Kernels of the CPU that take operands of other shapes or types than CUDA's do, or ask after values
UNASKED = {"_int_mm", "segment_reduce", "_embedding_bag", "_embedding_bag_forward_only"}
UNASKED |= {"linalg_lu_solve", "linalg_ldl_solve"}
_fine: set = set()  # operations and types that the CPU's kernel has taken


def check(op: Operation, args, kwargs, tensors, gpu) -> None:
    """Raises the CPU's error where it refuses these operands. Call it untracked, before a new recipe is made."""
    if op.name in OWN_CHECKS:
        OWN_CHECKS[op.name](*args)
    if not _is_asked(op, tensors):
        return
    if kwargs.get("check_errors"):  # of linalg's functions that end in _ex: these numbers are not the program's
        kwargs = {**kwargs, "check_errors": False}
    error = None
    if _is_small(args, kwargs, tensors):
        error = _error(op, gpu, _filled(args), _filled(kwargs))
        if error is not None and (_is_of_values(error) or _is_gpus_affair(op, tensors, error)):
            error = None
    elif not op.foreach and "backward" not in op.name:
        overlaps = any(_overlaps_itself(tensor) for tensor in op.written(args, kwargs))
        kinds = op, overlaps, *[(tensor.dtype, tensor.dim()) for tensor in tensors]
        if kinds in _fine or not (overlaps or _is_odd(op, tensors)):
            return
        sizes: dict = {}
        error = _error(op, gpu, _filled(args, sizes), _filled(kwargs, sizes))
        heard = OVERLAPS if overlaps else OF_TYPES
        if error is not None and (not heard.search(str(error)) or _is_gpus_affair(op, tensors, error)):
            error = None
        if error is None:
            _fine.add(kinds)
    if error is not None:
        raise error if gpu is None else cuda_checks.of_cuda(error)


def in_its_words(op: Operation, args, kwargs, tensors, gpu, error: Exception) -> Exception:
    """What the CPU says of operands that the meta kernel refused; that error itself, where the CPU takes them or they are large."""
    if not _is_asked(op, tensors) or not _is_small(args, kwargs, tensors, 256 * SMALL):
        return error
    of_cpu = _error(op, gpu, _filled(args), _filled(kwargs))
    refusal = error if of_cpu is None or _is_of_values(of_cpu) else of_cpu
    return refusal if gpu is None else cuda_checks.of_cuda(refusal)


def check_overlap(op: Operation, args, kwargs, tensors) -> None:
    """Raises PyTorch's RuntimeError where an operation writes to memory of which a part is read as another's. This can differ from call to call."""
    whole = op.name in WHOLE
    if op.foreach or not (whole or op.pointwise or op.name in PARTIAL):
        return
    for target in op.written(args, kwargs):
        storage = _compat.address(target.untyped_storage())
        for tensor in tensors:
            if tensor is not target and _compat.address(tensor.untyped_storage()) == storage:
                same = _compare(target, tensor)
                if same is not None and (whole or not same):
                    raise RuntimeError(OVERLAP.format("some elements of the input tensor and the written-to tensor"))


def _compare(target: Tensor, tensor: Tensor) -> bool | None:
    """The status of at::get_overlap_status: True for the same memory, False for a part of it, None for none or what is too hard to tell."""
    if not (target.numel() and tensor.numel() and _is_dense(target) and _is_dense(tensor)):
        return None
    first, second = target.storage_offset(), tensor.storage_offset()
    if first == second and target.numel() == tensor.numel():
        return target.stride() == tensor.stride()
    size = target.element_size()
    return False if first < second + tensor.numel() and second < first + target.numel() and size else None


def _is_dense(tensor: Tensor) -> bool:
    """Does it fill its memory from its first to its last number, each once?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _overlaps_itself(tensor: Tensor) -> bool:
    return 0 in tensor.stride() and any(
        not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


# -- asking the CPU's kernel


def _is_asked(op: Operation, tensors) -> bool:
    if (
        op.func.namespace != "aten"
        or op.name in UNASKED
        or op.host_result is not None
        or (op.random and not op.generator)
    ):
        return False
    by_values = op.shape_from_values and not op.indexes
    if by_values or (op.indexes and any(tensor.dtype in MASKS for tensor in tensors[1:])):
        return False
    return bool(tensors) and not any(
        tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype in OF_GPUS for tensor in tensors
    )


def _is_small(args, kwargs, tensors, most: int = SMALL) -> bool:
    total = sum(_span(tensor) for tensor in tensors)
    for value in (*args, *kwargs.values()):
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if type(number) is int and number > LONG:
                total *= number
    return total <= most


def _span(tensor: Tensor) -> int:
    """Numbers from its first to its last; as many as it has, where these are too many to be gone through."""
    if not tensor.numel() or tensor.numel() > 256 * SMALL:
        return tensor.numel()
    return reach(tensor)


def _is_odd(op: Operation, tensors) -> bool:
    """Types of which not every kernel takes any."""
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1 or not kinds <= set(FLOATS) or op.name.startswith(("bitwise_", "gcd", "lcm", "index_")):
        return True
    return op.name.startswith("linalg_") and bool(kinds & set(HALVES))


def _is_of_values(error: Exception) -> bool:
    return OF_VALUES.search(str(error)) is not None or errors.in_kernel(error)


def _is_gpus_affair(op: Operation, tensors, error: Exception) -> bool:
    """May a GPU have a kernel where the CPU has none? Then a dry run takes it."""
    if not isinstance(error, NotImplementedError) or "linalg" in op.name:
        return False
    if str(error).startswith("Could not run"):
        return True
    return all(tensor.dtype in HALVES for tensor in tensors if tensor.is_floating_point()) and any(
        tensor.dtype in HALVES for tensor in tensors
    )


def _error(op: Operation, gpu, args, kwargs) -> Exception | None:
    if op.random:
        kwargs = {**kwargs, "generator": torch.Generator()}
        args = [value for value in args if not isinstance(value, torch.Generator)]
    try:
        (op.func if gpu is None else op.on_gpu)(*args, **kwargs)
    except torch.linalg.LinAlgError:
        return None
    except ERRORS as error:
        return error.with_traceback(None)
    return None


def _filled(value, sizes: dict | None = None):
    """Operands on the CPU, those of floats full of ones, others of zeros. sizes: what each long size becomes; None: all stay as they are."""
    if isinstance(value, Tensor):
        shape, stride = value.shape, value.stride()
        if sizes is not None:
            shape = [_shorter(size, sizes) for size in shape]
            kept = [step != 0 for step in stride]
            stride = [step * kept[dim] for dim, step in enumerate(torch.empty(shape, device="meta").stride())]
        filled = torch.empty_strided(tuple(shape), tuple(stride), dtype=value.dtype)
        return filled.fill_(1 if value.is_floating_point() or value.is_complex() else 0)
    if isinstance(value, (list, tuple)):
        return type(value)(_shorter(item, sizes) if type(item) is int else _filled(item, sizes) for item in value)
    if isinstance(value, dict):
        return {name: _filled(item, sizes) for name, item in value.items()}
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _shorter(size: int, sizes: dict | None) -> int:
    if sizes is None or size <= LONG:
        return size
    return sizes.setdefault(size, LONG + len(sizes))


# -- for operands of any size, what meta kernels do not look at


def _check_convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> None:
    """As check_input_same_type_as_parameters and check_shape_forward do (aten/src/ATen/native/Convolution.cpp)."""
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype is not input.dtype:
            kinds = type_name(input), type_name(tensor)
            raise RuntimeError(f"Input type ({kinds[0]}) and {name} type ({kinds[1]}) should be the same")
    given = list(weight.shape)
    if input.dim() != weight.dim():
        raise RuntimeError(
            f"Expected {weight.dim()}-dimensional input for {weight.dim()}-dimensional weight {given}, but got {input.dim()}-dimensional "
            f"input of size {list(input.shape)} instead"
        )
    in_channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if input.shape[1] != in_channels:
        kind = "transposed=1, " if transposed else f"groups={groups}, "
        size = list(input.shape)
        raise RuntimeError(
            f"Given {kind}weight of size {given}, expected input{size} to have {in_channels} channels, but got {size[1]} channels instead"
        )
    out_channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != out_channels):
        raise RuntimeError(
            f"Given {'transposed=1, ' if transposed else ''}weight of size {given}, expected bias to be 1-dimensional with {out_channels} elements, "
            f"but got bias of size {list(bias.shape)} instead"
        )


def _check_softmax(tensor, dim, half_to_float) -> None:
    most = max(tensor.dim(), 1)
    if not -most <= dim < most:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})")


def _check_index_put(tensor, indices, values, *rest) -> None:
    """Can the values be given the shape of what they are written to?"""
    if any(index is not None and index.dtype in MASKS for index in indices):
        return  # its shape depends on values
    shapes = [
        None if index is None else torch.empty(index.shape, dtype=index.dtype, device="meta") for index in indices
    ]
    result = torch.ops.aten.index.Tensor(torch.empty(tensor.shape, device="meta"), shapes).shape
    fits = all(size in (1, there) for size, there in zip(reversed(values.shape), reversed(result), strict=False))
    if not fits or len(values.shape) > len(result):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape {list(result)}"
        )


OWN_CHECKS: dict[str, Callable] = {
    "convolution": _check_convolution,
    **dict.fromkeys(("_softmax", "_log_softmax"), _check_softmax),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _check_index_put),
}
