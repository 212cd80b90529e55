"""CUDA's own errors: the device that is not there, the assert inside a kernel, the cuDNN handle that finds no room.

A kernel that meets an index out of range cannot raise: the host has long gone on. The GPU stops, and each later call of CUDA
that comes to know of it fails ("device-side assert triggered"), until the process ends. The CPU's kernels do raise; what they
say decides here whether a GPU's kernel would have asserted.
"""

import re
from typing import Any

import torch

from virtualgpu._compat import tree_map_only
from virtualgpu.hardware.units import MIB

# What a CPU kernel says of values that only a kernel can see; of dimensions and shapes the host knows without one.
SEEN_BY_KERNEL = re.compile(
    r"(^|: )index (-?\d+ is )?out of (range in self|bounds for dimension)|Target -?\d+ is out of bounds"
    r"|out of range: tried to access index|not in the valid range|all elements of (input|target) should be between"
    r"|probability tensor contains|Expected p_in >= 0 && p_in <= 1|Expected Tensor with single nonzero value"
)
# What the kernel of an operation asserts, by the beginning of the operation's name: where below aten/src/ATen/native/cuda, in which
# function, what. As public reports have it of releases since 2022, but for the lines of take and bernoulli; lines move from release to release.
OF_INDEX = "IndexKernel.cu:94: operator()", '-sizes[i] <= index && index < sizes[i] && "index out of bounds"'
OF_SELECTION = "Indexing.cu:1478: indexSelectSmallIndex", "srcIndex < srcSelectDimSize"
OF_SCATTER = "ScatterGatherKernel.cu:144: operator()", 'idx_dim >= 0 && idx_dim < index_size && "index out of bounds"'
OF_TAKE = (
    "IndexKernel.cu:252: operator()",
    'idx < numel && idx >= -numel && "cuda_take_put_kernel() index out of bounds"',
)
ASSERTIONS = {
    "nll_loss2d": ("NLLLoss2d.cu:106: nll_loss2d_forward_kernel", "t >= 0 && t < n_classes"),
    "nll_loss": ("Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d", "t >= 0 && t < n_classes"),
    "embedding": OF_SELECTION,
    "index_select": OF_SELECTION,
    "index": OF_INDEX,
    "_unsafe_index": OF_INDEX,
    "gather": OF_SCATTER,
    "scatter": OF_SCATTER,
    "take": OF_TAKE,
    "put": OF_TAKE,
    "binary_cross_entropy": ("Loss.cu:92: operator()", "input_val >= zero && input_val <= one"),
    "bernoulli": ("DistributionTemplates.h:647: operator()", "0 <= p && p <= 1"),
    "multinomial": (
        "TensorCompare.cu:106: _assert_async_cuda_kernel",
        "probability tensor contains either `inf`, `nan` or element < 0",
    ),
    "_assert_async": ("TensorCompare.cu:106: _assert_async_cuda_kernel", "input[0] != 0"),
}
PRINTED = 8  # lines of one assert: CUDA prints one for each thread
# Where CUDA's documentation explains its errors, of which PyTorch explains only the first (c10/cuda/CUDAMiscFunctions.cpp)
ERRORS_OF_CUDA = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
# What has to be free on the GPU, beside all that PyTorch's allocator keeps, when cuDNN makes its handle. NVIDIA prints
# no figure, and it differs between versions; this one is chosen small. It is asked for, and not counted as used.
CUDNN_HANDLE = 8 * MIB


def invalid_ordinal() -> RuntimeError:
    """The error of CUDA for cuda:5 of two."""
    return _cuda_error(101, "cudaErrorInvalidDevice", "invalid device ordinal")


def no_gpus() -> RuntimeError:
    """The error of PyTorch where CUDA_VISIBLE_DEVICES leaves none."""
    return RuntimeError("No CUDA GPUs are available")


def no_device() -> RuntimeError:
    """The error of CUDA for what asks it past PyTorch's own look (a stream, a generator), where no GPU is visible."""
    return _cuda_error(100, "cudaErrorNoDevice", "no CUDA-capable device is detected")


def device_assert(blocking: bool = False) -> RuntimeError:
    """The error of CUDA for every call after a kernel's assert. blocking: under CUDA_LAUNCH_BLOCKING=1."""
    return _cuda_error(710, "cudaErrorAssert", "device-side assert triggered", blocking)


def cudnn_not_initialized() -> RuntimeError:
    """The error of PyTorch where cuDNN finds no room for its handle (CUDNN_HANDLE)."""
    return RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")


def in_kernel(error: Exception) -> bool:
    """Would a GPU find this in a kernel, and not on the host?"""
    return SEEN_BY_KERNEL.search(str(error)) is not None


def assertions(name: str, args) -> str:
    """What CUDA prints where this operation's kernel asserts: a line for each of the first threads that do, each with one number."""
    where, what = next((assertion for begin, assertion in ASSERTIONS.items() if name.startswith(begin)), OF_INDEX)
    lines = [
        f"/pytorch/aten/src/ATen/native/cuda/{where}: block: [{at // 128},0,0], thread: [{at % 128},0,0] Assertion `{what}` failed."
        for at in _offending(name, args)
    ]
    return "\n".join(lines)


def _offending(name: str, args) -> list[int]:
    """Places of the first numbers that a kernel asserts of; the first place where that is not looked up."""
    tensors = [value for value in args[:3] if isinstance(value, torch.Tensor)]
    wrong = None
    if name.startswith("nll_loss"):
        target, classes, ignored = args[1], args[0].shape[1 if args[0].dim() > 1 else 0], args[4]
        wrong = (target != ignored) & ((target < 0) | (target >= classes))
    elif name.startswith("binary_cross_entropy"):
        wrong = ~((args[0] >= 0) & (args[0] <= 1))
    elif name == "embedding":
        wrong = (args[1] < 0) | (args[1] >= args[0].shape[0])
    elif name.startswith(("index_select", "gather", "scatter")) and len(tensors) > 1 and args[0].dim():
        wrong = (tensors[1] < 0) | (tensors[1] >= args[0].shape[args[1]])
    return [0] if wrong is None else wrong.flatten().nonzero().flatten()[:PRINTED].tolist() or [0]


def undefined(func, returns, args, kwargs):
    """Results of the right shapes, for an operation whose kernel stopped: zeros, where a GPU leaves what was in its memory."""
    if len(returns) == 1 and returns[0] is not None:
        return args[returns[0]]
    shapes = func(*on_meta(args), **on_meta(kwargs))
    return tree_map_only(torch.Tensor, lambda shape: torch.zeros_like(shape, device="cpu"), shapes)


def on_meta(values):
    """Arguments in which each tensor, however deep in lists and dicts, is an empty one on meta."""
    return tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), values)


def _cuda_error(code: int, name: str, what: str, blocking: bool = False) -> RuntimeError:
    """As PyTorch 2.11 says it on an H100 (2026-11-26); its advice to launch one by one is left out where that is done."""
    advice = (
        "GPU device may be out of range, do you have enough GPUs?\n"
        if name == "cudaErrorInvalidDevice"
        else f"Search for `{name}' in {ERRORS_OF_CUDA} for more information.\n"
    )
    if not blocking:
        advice += (
            "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
            "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        )
    error: Any = getattr(torch, "AcceleratorError", RuntimeError)(
        f"CUDA error: {what}\n{advice}Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    error.error_code = code
    return error


def without_cpu_kernel(name: str) -> NotImplementedError:
    """The error of PyTorch for an operation that has a kernel for CUDA alone, on the CPU's tensor."""
    return NotImplementedError(
        f"Could not run 'aten::{name}' with arguments from the 'CPU' backend: PyTorch has a CUDA kernel of it alone. "
        "Move the tensors to a GPU first"
    )


def forked() -> RuntimeError:
    """The error of PyTorch for a GPU used in a process that was forked from one that had used it."""
    return RuntimeError(
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method"
    )


def used_before_fork() -> RuntimeError:
    """The error of CUDA for a tensor of its parent's that a forked process computes with."""
    return _cuda_error(3, "cudaErrorInitializationError", "initialization error")


def host_full(needed: int, free: int) -> RuntimeError:
    """The virtual GPU has the room, but the machine that plays it has not."""
    return RuntimeError(
        f"the virtual GPU has room for these {needed / 2**30:.1f} GiB, but this machine, which holds its numbers, has "
        f"{free / 2**30:.1f} GiB left. Work on shapes alone: virtualgpu.dry_run(), or python -m virtualgpu --dry"
    )


def on_real_gpu(device: torch.device) -> RuntimeError:
    """A tensor of a real GPU, made before virtual ones were on, meets an operation beside them."""
    return RuntimeError(
        f"this tensor lies on the real {device}, which virtual GPUs hide: take it over by .cpu() or .to(...), or turn them off "
        "by virtualgpu.reset()"
    )


def made_on_real_gpu(func) -> RuntimeError:
    """PyTorch's C++ went past us."""
    return RuntimeError(
        f"{func} made its result on a real GPU, which virtual ones hide: that is a fault of virtualgpu. Run the program by "
        "python -m virtualgpu, which hides the real one from PyTorch altogether"
    )


def of_real_gpu(what: str) -> RuntimeError:
    """A stream, an event or a generator of before virtual GPUs were on meets them."""
    return RuntimeError(f"this {what} belongs to a real GPU, which virtual ones hide: make it again")


def no_data(made_in_dry_run: bool) -> RuntimeError:
    """A shape is to be copied to where numbers are: of a dry run, or the program's own, on meta (PyTorch's words)."""
    return without_values() if made_in_dry_run else NotImplementedError("Cannot copy out of meta tensor; no data!")


def without_values() -> RuntimeError:
    """A tensor that was made in a dry run meets an operation with numbers."""
    return RuntimeError("a tensor of this line was made in a dry run and has no values: make it outside dry_run(), too")


def host_refused(error: Exception) -> bool:
    """Did the CPU's allocator find no memory?"""
    return "DefaultCPUAllocator" in str(error)


def foreign(traceback):
    """A traceback from the first frame on that is not the engine's own; None where there is none (the error is ours)."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith("virtualgpu."):
        traceback = traceback.tb_next
    if traceback is not None and traceback.tb_frame.f_code.co_filename.endswith("_ops.py"):
        inner = foreign(traceback.tb_next)  # OpOverload.__call__
        return traceback if inner is not None else None
    return traceback
