"""Operations for which the host waits for the GPU, and whether torch.cuda.set_sync_debug_mode speaks of it.

It speaks where PyTorch waits by c10::cuda (memcpy_and_sync, stream_synchronize), as item() does; Thrust's algorithms wait by themselves. By
the kernels in aten/src/ATen/native, and, for what they share with the CPU's, by what PyTorch's profiler shows below them there. The source
counts where documentation says more: `cond` by another norm than 2, -2 and "nuc" reads no value. What C++ composes of other
operations (linalg.inv of inv_ex and a check) is not here, for these come by.
"""

from collections.abc import Callable

import torch

from virtualgpu import _compat
from virtualgpu.engine.storage import gpu_of

SILENTLY, ALOUD = 1, 2
Rule = Callable[[tuple, dict], int]  # (args, kwargs) -> SILENTLY, ALOUD, or 0: it does not wait
MASKS = {torch.bool, torch.uint8}  # as indices
FUSED_MODE = 2048  # numbers of a row, up to which torch.mode is one kernel (TensorModeKernel.cpp)


def always(args, kwargs) -> int:
    """A value decides, or a result's shape."""
    return ALOUD


def _silently(args, kwargs) -> int:
    return SILENTLY


def _checks_errors(args, kwargs) -> int:
    """linalg's functions that end in _ex."""
    return ALOUD if kwargs.get("check_errors") else 0


def _counts_repeats(args, kwargs) -> int:
    return ALOUD if kwargs.get("output_size") is None else 0


def _reads_by_mask(args, kwargs) -> int:
    return ALOUD if any(index is not None and index.dtype in MASKS for index in args[1]) else 0


def _writes_by_mask(args, kwargs) -> int:
    """x[mask] = values: PyTorch counts the mask's entries, unless it is one number of the host's, with which it fills."""
    return 0 if args[2].numel() == 1 and gpu_of(args[2]) is None else _reads_by_mask(args, kwargs)


def _reads(name: str, *positions: int) -> Rule:
    """It waits where one of these arguments, or the one of that name, is a tensor on a GPU."""

    def rule(args, kwargs) -> int:
        values = [args[position] for position in positions if len(args) > position] or [kwargs.get(name)]
        return ALOUD if any(isinstance(value, torch.Tensor) and gpu_of(value) is not None for value in values) else 0

    return rule


def _compares_values(args, kwargs) -> int:
    """equal: two sizes are two tensors, and nothing equals nothing. A traced function hands over numbers."""
    one, other = args[:2]
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return ALOUD
    return ALOUD if one.shape == other.shape and one.numel() else 0


def _finds_range(args, kwargs) -> int:
    """histc: the range of the numbers, where none is given."""
    low, high = (args[place] if len(args) > place else kwargs.get(name, 0) for place, name in ((2, "min"), (3, "max")))
    return ALOUD if low == high and args[0].numel() else 0


def _sorts(args, kwargs) -> int:
    """isin of many: the unique ones among both are sorted, unless they are so already (TensorCompare.cpp)."""
    elements, among = (value.numel() if isinstance(value, torch.Tensor) else 1 for value in args[:2])
    many = isinstance(args[1], torch.Tensor) and among >= 10 * elements**0.145
    return ALOUD if many and not kwargs.get("assume_unique") else 0


def _checks_sorter(args, kwargs) -> int:
    """Its smallest and largest index, for searchsorted."""
    sorter = kwargs.get("sorter")
    return ALOUD if sorter is not None and sorter.numel() else 0


def _checks_lengths(args, kwargs) -> int:
    return 0 if kwargs.get("unsafe") or kwargs.get("lengths") is None else ALOUD


def _unique_consecutive(args, kwargs) -> int:
    dim = args[3] if len(args) > 3 else kwargs.get("dim")
    return ALOUD if dim is None else SILENTLY


def _coalesces(args, kwargs) -> int:
    """Indices of several dimensions become one by factors that are copied from the host."""
    return ALOUD if args[0].sparse_dim() > 1 else SILENTLY


def _from_strided(args, kwargs) -> int:
    return ALOUD if args[0].layout is torch.strided else 0


def _long_rows(args, kwargs) -> int:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return SILENTLY if args[0].dim() and args[0].shape[dim] > FUSED_MODE else 0


def _within(*nodes: str) -> Rule:
    """Derivatives ask for a value that C++ does not ask for where a dispatch mode is on (areAnyTensorSubclassLike): it takes another way,
    of which this operation is a part."""

    def rule(args, kwargs) -> int:
        return ALOUD if _compat.graph_task() != -1 and _compat.current_node().name() in nodes else 0

    return rule


# By name, or by name and overload
RULES: dict[str, Rule] = {
    # what a decomposition reports is read: infos.any().item() (_linalg_check_errors), infos.cpu() (_check_gesvdj_convergence)
    **dict.fromkeys(["_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig", "_linalg_eigvals"], always),
    **dict.fromkeys(["linalg_eigvals", "linalg_lstsq", "linalg_pinv", "linalg_polar", "linalg_matrix_sqrth"], always),
    "linalg_matrix_exp": lambda args, kwargs: ALOUD if args[0].numel() and args[0].shape[-1] > 1 else 0,  # their norms
    "_nested_tensor_from_mask": always,
    "_nested_tensor_from_mask_left_aligned": always,
    "_ctc_loss": always,  # lengths are copied to the GPU
    "_ctc_loss_backward": always,
    "_to_sparse": _from_strided,
    "_to_sparse_csr": _from_strided,
    "_to_sparse_csc": _from_strided,
    "_to_sparse_bsr": _from_strided,
    "_to_sparse_bsc": _from_strided,
    "_coalesce": _coalesces,
    "masked_scatter_backward": always,
    "segment_reduce": _checks_lengths,
    "normal.float_Tensor": always,  # std.min()
    "normal.Tensor_Tensor": always,
    "linspace": _reads("start", 0, 1),
    "logspace": _reads("start", 0, 1),
    "quantize_per_tensor.tensor_qparams": always,
    "masked_fill.Tensor": _reads("value", 2),
    "masked_fill_.Tensor": _reads("value", 2),
    "index_fill.int_Tensor": _reads("value", 3),
    "index_fill_.int_Tensor": _reads("value", 3),
    "searchsorted": _checks_sorter,
    "histc": _finds_range,
    "isin": _sorts,
    "equal": _compares_values,
    "repeat_interleave": _counts_repeats,
    "index": _reads_by_mask,
    "_unsafe_index": _reads_by_mask,
    **dict.fromkeys(["index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"], _writes_by_mask),
    "mode": _long_rows,
    "unique_dim": _silently,
    "unique_dim_consecutive": _silently,
    "unique_consecutive": _unique_consecutive,
    "where": _within("MaskedFillBackward1"),
    "logical_and": _within("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"),
    "cumprod": _within("ProdBackward0", "ProdBackward1", "CumprodBackward0"),
}


def rule_of(func) -> Rule | None:
    """When the host waits for an operation; None: never. PyTorch's tags say so of those that give a value, or a shape of values."""
    if func.namespace != "aten":
        return None
    name, overload = _compat.packet(func).__name__, _compat.overload_name(func).removesuffix("_out")
    rule = RULES.get(f"{name}.{overload}", RULES.get(name))
    if rule is not None:
        return rule
    if any(argument.name == "check_errors" for argument in _compat.schema(func).arguments):
        return _checks_errors
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return always if any(tag in func.tags for tag in tags) else None
