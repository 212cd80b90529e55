"""Derivatives that PyTorch's C++ works out in place of a tensor it has just made, but not where a dispatch mode is on.

isTensorSubclassLike (aten/src/ATen/TensorSubclassLikeUtils.h) says yes to every tensor then, and the formulas of
torch/csrc/autograd/FunctionsManual.cpp scatter into a copy: twice the memory. Such a result takes over the bytes of what it was made of here.
"""

from virtualgpu import _compat
from virtualgpu.engine.storage import allocation_of, label

_SELECTS = ("Sort", "Topk", "Kthvalue", "Mode", "Median", "Nanmedian", "Max", "Min", "Cummax", "Cummin")
# Operation: the derivatives in which it is one in place of its first argument
NODES = {
    "scatter": {f"{name}Backward{number}" for name in _SELECTS for number in (0, 1)},
    "scatter_add": {"GatherBackward0", "CummaxBackward0", "CumminBackward0"},
    "index_add": {"IndexSelectBackward0"},
    "index_put": {"IndexBackward0", "UnsafeIndexBackward0"},
    "put": {"TakeBackward0"},
    "masked_scatter": {"MaskedSelectBackward0"},
    "sub": {"BinaryCrossEntropyWithLogitsBackward0"},
    "mul": {"BinaryCrossEntropyWithLogitsBackward0"},
}


def take_over(op, args, out) -> None:
    """Let a new result have the memory of the first argument, where PyTorch would have written it there."""
    node = _compat.current_node()
    if node is None or node.name() not in NODES[op.name]:
        return
    first = args[0]
    allocation = allocation_of(first)
    if allocation is not None and allocation.gpu is not None and out.untyped_storage().nbytes() == allocation.nbytes:
        label(out, allocation)
