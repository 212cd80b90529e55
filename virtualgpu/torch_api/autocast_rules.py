"""What CUDA's autocast does to the arguments of each operation, on tensors of virtual GPUs: the casts, their cache, the rules.

A rule takes an operation's (args, kwargs), as the dispatcher hands them to a kernel in Python, and returns them cast. The lists that
say which operation has which rule are in autocast_lists.py. Source: aten/src/ATen/autocast_mode.h and .cpp, and cudnn/AutocastRNN.cpp.
"""

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import gpu_of
from virtualgpu.engine.recurrent import on_cudnn
from virtualgpu.torch_api import autocast_lists

Rule = Callable[[tuple, dict], tuple[tuple, dict]]

# What autocast takes for a floating-point tensor; float64 it leaves alone
CASTABLE = {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and kind.is_floating_point}
CASTABLE.remove(torch.float64)

# The weight cache, shared by all threads as PyTorch's is: {identity of the weight: its cast}
cache = SimpleNamespace(casts={})
_lock = threading.RLock()


def forget() -> None:
    """Empty the weight cache, for all threads."""
    with _lock:
        cache.casts.clear()


# -- casts


def tensors_of(args, kwargs) -> list[torch.Tensor]:
    """The tensors among the arguments, and in lists and tuples among them."""
    values = []
    for value in (*args, *kwargs.values()):
        values.extend(value if isinstance(value, (list, tuple)) else [value])
    return [value for value in values if isinstance(value, torch.Tensor)]


def _eligible(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in CASTABLE and gpu_of(value) is not None


def _cast(value, dtype: torch.dtype, cached: bool = True):
    """An argument in which each tensor of a virtual GPU is cast."""
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not _eligible(value):
            return value
        weight = cached and value.dtype is torch.float32 and value.requires_grad and value.is_leaf
        if weight and dtype is torch.get_autocast_dtype("cuda") and not _compat.is_view(value):
            return _cast_once(value, dtype)
        return _copy(value, dtype)
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, cached) for item in value]
    return value


def _cast_once(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The cast of a parameter: made once, kept until the outermost autocast ends. Gradients flow through it even where it was first
    made in no_grad(), as in PyTorch since 2.11; what inference_mode() makes could not be used elsewhere, and is not kept."""
    if not torch.is_autocast_cache_enabled() or torch.is_inference_mode_enabled():
        return _copy(weight, dtype)
    with _lock:
        known = cache.casts.get(_compat.address(weight))
        if known is None:
            with torch.enable_grad():  # so its graph keeps the weight, and no other tensor gets that identity meanwhile
                known = cache.casts[_compat.address(weight)] = _copy(weight, dtype)
    return known


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype)
    with _compat.without_function_subclasses():  # autocast is below what a subclass sees as functions
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype)


def _cast_all(args, kwargs, dtype: torch.dtype, cached: bool = True) -> tuple[tuple, dict]:
    kwargs = {name: _cast(value, dtype, cached) for name, value in kwargs.items()} if kwargs else kwargs
    return tuple([_cast(value, dtype, cached) for value in args]), kwargs


# -- rules, each made for one operation


def _lower(op) -> Rule:
    return lambda args, kwargs: _cast_all(args, kwargs, torch.get_autocast_dtype("cuda"))


def _float32(op) -> Rule:
    return lambda args, kwargs: _cast_all(args, kwargs, torch.float32)


def _float32_result(op) -> Rule:
    index = [argument.name for argument in _compat.schema(op).arguments].index("dtype")

    def rule(args, kwargs):
        dtype = args[index] if index < len(args) else kwargs.get("dtype")
        if dtype is not None or not _eligible(args[0]):
            return args, kwargs
        return args[:index], {**kwargs, "dtype": torch.float32}  # nothing in these schemas comes after dtype

    return rule


def _float32_appended(op) -> Rule:
    defaults = [argument.default_value for argument in _compat.schema(op).arguments]

    def rule(args, kwargs):
        first = args[0]
        result = torch.float32 if _eligible(first) else first.dtype
        return (*args, *defaults[len(args) :]), {**kwargs, "dtype": result}  # the longer overload has no defaults

    return rule


def _promote(op) -> Rule:
    def rule(args, kwargs):
        kinds = {tensor.dtype for tensor in tensors_of(args, kwargs) if _eligible(tensor)}
        if torch.float32 in kinds:
            return _cast_all(args, kwargs, torch.float32)
        if kinds - {torch.get_autocast_dtype("cuda")}:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")  # PyTorch's words
        return args, kwargs

    return rule


def _recurrent(op) -> Rule:
    """The layers of cuDNN: float16, whatever autocast's dtype. Where cuDNN does not run them, their cells have autocast's."""
    order = [argument.name for argument in _compat.schema(op).arguments]
    data = order.index("data" if "data" in order else "input")

    def rule(args, kwargs):
        first, dtype = args[data], torch.get_autocast_dtype("cuda")
        gpu = gpu_of(first)
        if gpu is None:
            return args, kwargs
        if on_cudnn(first.dtype, gpu):
            dtype = torch.float16
        # no cache: PyTorch writes the cast weights into one flat buffer, anew each time
        return _cast_all(args, kwargs, dtype, cached=False)

    return rule


def _refuse(op) -> Rule:
    """PyTorch's own kernel for CUDA does nothing but raise the error that says what to use instead."""

    def rule(args, kwargs):
        if any(map(_eligible, tensors_of(args, kwargs))):
            op.redispatch(_compat.KeySet(_compat.DispatchKey.AutocastCUDA), *args, **kwargs)
        return args, kwargs

    return rule


def _unknown(op) -> Rule:
    def rule(args, kwargs):
        if any(map(_eligible, tensors_of(args, kwargs))):
            raise NotImplementedError(
                f"virtual GPUs do not know what autocast does to {op.name()} in this version of PyTorch; call it in "
                'torch.autocast("cuda", enabled=False), with its arguments cast by hand'
            )
        return args, kwargs

    return rule


# -- which operation has which


@functools.cache
def rules() -> dict[str, tuple]:
    """{name: (operation, the one to run in its place, maker of its rule)}, for what this PyTorch casts on CUDA."""
    lists = {
        _lower: autocast_lists.LOWER_PRECISION_FP,
        _float32: autocast_lists.FP32,
        _float32_result: autocast_lists.FP32_SET_OPT_DTYPE,
        _float32_appended: autocast_lists.FP32_APPEND_DTYPE,
        _promote: autocast_lists.PROMOTE,
        _refuse: autocast_lists.BANNED,
    }
    rule_of = {name: rule for rule, names in lists.items() for name in names}
    table = {}
    for name in registered("AutocastCUDA") - set(autocast_lists.CUDNN_RNN):
        target = operation(autocast_lists.FP32_APPEND_DTYPE.get(name, name))
        table[name] = (operation(name), target, rule_of.get(name, _unknown))
    for name in (*autocast_lists.CUDNN_RNN, *autocast_lists.RNN):
        table[name] = (operation(name), operation(name), _recurrent)
    for name in autocast_lists.FLASH_ON_CPU:
        table[name] = (operation(name), operation(name), _lower)
    return {name: row for name, row in table.items() if row[0] is not None}


def registered(key: str) -> set[str]:
    """The names of ATen's operations that have a kernel of their own for a dispatch key."""
    names = _compat.registrations(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def operation(name: str):
    """The operation of ATen with this name ("mm", "pow.Scalar"), or None where this PyTorch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
