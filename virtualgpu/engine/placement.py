"""Tensors that may not meet, in PyTorch's words; and where an operation runs whose tensors need not all be in one place."""

import opcode

import torch

from virtualgpu import _compat
from virtualgpu.engine.cuda_checks import LEGACY
from virtualgpu.engine.frames import callers_frame
from virtualgpu.engine.gpu import GPU
from virtualgpu.engine.operations import Operation
from virtualgpu.engine.storage import gpu_of

aten = torch.ops.aten
SAME_DEVICE = "Expected all tensors to be on the same device"
MKLDNN = " or input should be a MKLDNN tensor and weight is a dense tensor"
FILLS = ("index_fill_", "masked_fill_")


def place_of_lists(op: Operation, args, kwargs, tensors) -> GPU | None:
    """Entries of one list may be anywhere; those at one place in all lists must be together. Raises PyTorch's RuntimeError."""
    # of addcdiv and addcmul
    if len(args) > 3 and isinstance(args[3], torch.Tensor) and gpu_of(args[3]) is not None:
        raise RuntimeError(f"Expected scalars to be on CPU, got {args[3].device} instead.")
    common = gpu_of(tensors[0]) if tensors else None
    if common is not None and all([gpu_of(tensor) is common for tensor in tensors]):
        return common
    if op.name.startswith("_foreach") and len(args) > 1 and isinstance(args[1], torch.Tensor):
        _check_scalar(op, args[0], args[1])
    first = None
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
    for column in zip(*[entries for entries in lists if isinstance(entries[0], torch.Tensor)], strict=False):
        devices = {gpu_of(tensor) for tensor in column if tensor.dim() or gpu_of(tensor) is not None}
        if len(devices) > 1:
            raise mismatch(op, column, {})
        first = first or next(iter(devices), None)
    return first or next((gpu for tensor in tensors if (gpu := gpu_of(tensor)) is not None), None)


def _check_scalar(op: Operation, entries, scalar: torch.Tensor) -> None:
    """A GPU's tensor of no dimension goes with that GPU's entries alone. Entries at one place meet it in one kernel
    (ForeachBinaryOpScalarTensor.cu), others one by one."""
    where = gpu_of(scalar)
    devices = [gpu_of(entry) for entry in entries]
    alike = len(set(devices)) == 1 and entries[0].dtype == scalar.dtype and devices[0] is not None
    for entry, place in zip(entries, devices, strict=True):
        if where is not None and place is not where and (place is not None or entry.dim()):
            if alike:
                raise RuntimeError(f"scalar tensor expected to be on {entry.device} but is on {scalar.device}")
            raise mismatch(op, ([entry], scalar), {})


def place_of_mixed(op: Operation, args, gpu: GPU) -> GPU | None:
    """Where an operation runs whose tensors may be on several devices. Raises RuntimeError for those that may not."""
    if op.indexes:
        indexed = gpu_of(args[0])
        for index in args[1]:
            if index is not None and gpu_of(index) not in (None, indexed):
                raise RuntimeError(
                    f"indices should be either on cpu or on the same device as the indexed tensor ({args[0].device})"
                )
        values = args[2] if len(args) > 2 else None
        if values is not None and values.dim() and gpu_of(values) is not indexed:
            raise two_devices(args[0].device, values.device)
        return indexed
    if op.packs and gpu_of(args[1]) is not None:
        kind = type_name(args[1]).rpartition(".")[2].removesuffix("Tensor")
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {args[1].dim()}D {gpu.device} {kind} tensor"
        )
    return gpu


def may_stay_on_cpu(op: Operation, gpu: GPU | None, here: GPU | None) -> bool:
    """x[[0, 1]] = 0 and x[mask] = 0 become one of FILLS with an index on the CPU: allowed in a subscript, and nowhere else."""
    if op.name not in FILLS or here is not None or gpu is None:
        return False
    frame = callers_frame()
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == opcode.opmap["STORE_SUBSCR"]


# -- PyTorch's words


def mismatch(op: Operation, args, kwargs) -> RuntimeError:
    """PyTorch's error for tensors on two devices: which words it has depends on the operation."""
    values = list(zip([argument.name for argument in _compat.schema(op.func).arguments], args, strict=False))
    named = []
    for name, value in (*values, *kwargs.items()):
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                named.append((name, tensor, tensor.device))
    if op.name in ("convolution", "_convolution"):
        (_, input, place), *others = named
        for name, tensor, where in others:
            if where.type != place.type:
                kinds = f"Input type ({type_name(input)}) and {name} type ({type_name(tensor)}) should be the same"
                return RuntimeError(kinds + ("" if place.type == "cuda" else MKLDNN))
    common = named[0][2]
    by_iterator = op.name == "allclose" or (op.pointwise and not op.strict)  # TensorIterator's check
    if by_iterator:
        common = next((where for _, _, where in named if where.type == "cuda"), common)
    name, other = next(((name, where) for name, _, where in named if where != common), named[0][::2])
    return two_devices(common, other) if by_iterator or op.foreach else wrong_device(op.func, name, other, common)


def two_devices(one, other) -> RuntimeError:
    """PyTorch's error for tensors of two devices."""
    return RuntimeError(f"{SAME_DEVICE}, but found at least two devices, {one} and {other}!")


def wrong_device(func, name: str, other, common) -> RuntimeError:
    """The error of the code that PyTorch generates around each kernel (torchgen/dest/register_dispatch_key.py)."""
    kernel = _compat.packet(func).__name__
    if kernel == "embedding":
        func, name = aten.index_select.default, "index"
    elif kernel == "stack":
        func = aten.cat.default
    kernel, overload = _compat.packet(func).__name__, _compat.overload_name(func)
    overload = "" if overload == "default" else overload
    wrapper = "_".join(filter(None, (kernel, overload))) if _compat.is_structured(func) else f"{overload}_{kernel}"
    return RuntimeError(
        f"{SAME_DEVICE}, but got {name} is on {other}, different from other tensors on "
        f"{common} (when checking argument in method wrapper_CUDA_{wrapper})"
    )


def type_name(tensor: torch.Tensor) -> str:
    """What Tensor.type() answers, and some errors still say: torch.cuda.FloatTensor."""
    sparse = "sparse." if tensor.layout is torch.sparse_coo else ""
    where = "cuda." if gpu_of(tensor) else ""
    return f"torch.{where}{sparse}{LEGACY.get(tensor.dtype, str(tensor.dtype))}"
