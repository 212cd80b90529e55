"""Operators: their schemas, their kernels, and what PyTorch knows of each."""

import importlib
import sys
from operator import attrgetter

import torch
from torch._ops import HigherOrderOperator
from torch.utils.flop_counter import flop_registry

_C = torch._C
schema = attrgetter("_schema")  # (torch.ops.aten.mm.default) -> .name ("aten::mm"), .arguments, .returns
packet = attrgetter("_overloadpacket")  # -> torch.ops.aten.mm
overload_name = attrgetter("_overloadname")  # -> "default"
computation_dtype = torch._prims_common.get_computation_dtype  # (dtype) -> that in which sums are added up
# The operators behind torch.nn.attention.flex_attention; as an attribute, that name is one of them
flex = importlib.import_module("torch._higher_order_ops.flex_attention")


class Copy:
    """The base of what passes for the operation of a copy, in the eyes of who reads its schema."""

    _schema = torch.ops.aten._to_copy.default._schema


def flop_formula(operator):
    """What PyTorch's own counter of FLOPs calls for an operation, with its arguments and out_val; None where it counts none."""
    formula = flop_registry.get(operator._overloadpacket)
    if formula is None or operator._overloadname != "dtype":
        return formula
    # Before 2.15 formulas take the third argument of mm.dtype(a, b, out_dtype) for the shape of the result
    return lambda *args, **kwargs: formula(*(arg for arg in args if not isinstance(arg, torch.dtype)), **kwargs)


def is_composite(operator) -> bool:
    """Is it only made of other operations, without a kernel of its own?"""
    return operator._can_decompose() and not _C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU")


def is_structured(operator) -> bool:
    """Is its kernel for shapes made of the same C++ as its others ("structured" in native_functions.yaml)?"""
    return "RegisterMeta" in _C._dispatch_dump(operator.name())


def decompose(operator, args, kwargs):
    """Carry out a composite operation as C++ does, which may differ from its decomposition in Python."""
    if _C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return operator._op_dk(_C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    return operator.decompose(*args, **kwargs)


def decompositions() -> dict:
    """{operator: the function that decomposes it for tracers}; changes there count."""
    return torch._decomp.decomposition_table


def implementation(operator: HigherOrderOperator):
    """The Python function that carries out a higher-order operator on plain tensors. Raises NotImplementedError where it has none."""
    kernels = operator.py_kernels
    for key in (_C.DispatchKey.CompositeExplicitAutograd, _C.DispatchKey.CPU):
        if key in kernels:
            return kernels[key]
    raise NotImplementedError(
        f"{operator.name()} is not modelled by virtual GPUs: PyTorch has no plain implementation of it. "
        "Call the operations that it stands for"
    )


def kernel(operator, key: str):
    """The function that carries it out for one dispatch key, "CPU"."""
    return lambda *args, **kwargs: operator._op_dk(getattr(_C.DispatchKey, key), *args, **kwargs)


def registered_in_python() -> set[str]:
    """{"namespace/operation.overload/dispatch key"} of the kernels that torch.library has registered."""
    return torch.library._impls


def custom_kernels(operator) -> dict | None:
    """{device or None for all: kernel} of an operation that torch.library.custom_op has made; None for any other."""
    known = sys.modules.get("torch._library.custom_ops")
    custom = known.OPDEFS.get(operator.name().split(".")[0]) if known else None
    return None if custom is None else custom._backend_fns


_library = None  # of the kernels that `add_kernel` registers; they stay for the life of the process


def add_kernel(name: str, key: str, kernel) -> None:
    """Register a Python kernel of an operation ("mm.dtype") for a dispatch key, unless PyTorch or we have one there."""
    global _library
    packet, _, overload = name.partition(".")
    operation = getattr(torch.ops.aten, packet, None)
    if operation is None or (overload or "default") not in operation.overloads():
        return
    if _C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        return
    if _library is None:
        # It notes the file that calls it, and fails where the locale does not know that path's letters: so it is no file
        _library = eval(compile('torch.library.Library("aten", "IMPL")', "virtualgpu", "eval"))
    _library.m.impl(name, key, kernel)  # Library.impl refuses what decomposes; on a GPU that is one kernel


def carried_out_by_dtensor(operator) -> bool:
    """Has somebody given DTensor a function of its own for this operation? context_parallel does, for the fused kernels of attention."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and operator in module.DTensor._op_dispatcher._custom_op_handlers
