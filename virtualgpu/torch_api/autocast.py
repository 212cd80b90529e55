"""torch.autocast("cuda"): CUDA's lists and rules, their casts and the casts' cache, at a dispatch key of PyTorch's that is free."""

import contextlib
import functools
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from virtualgpu import _compat, errors
from virtualgpu.engine.machine import Machine, gpu_of
from virtualgpu.engine.rnn import on_cudnn
from virtualgpu.torch_api.patches import Patches

# Which operation is cast to what, by the names that ATen has: CUDA's lists
LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LOWER_PRECISION_FP, FP32, FP32_SET_OPT_DTYPE, PROMOTE, BANNED = (
    tuple(LISTS[name].split()) for name in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE", "BANNED")
)
FP32_APPEND_DTYPE: dict[str, str] = LISTS["FP32_APPEND_DTYPE"]

# cuDNN's recurrent layers have a rule of their own (aten/src/ATen/cudnn/AutocastRNN.cpp): float16, whatever the dtype of
# autocast. TorchScript calls these operations, which would have called _cudnn_rnn.
CUDNN_RNN = ("_cudnn_rnn",)
RNN = tuple(f"{name}.{kind}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for kind in ("input", "data"))

# The CPU's kernel that runs in place of CUDA's flash attention, where something calls it without the public function
FLASH_ON_CPU = ("_scaled_dot_product_flash_attention_for_cpu",)


# -- What CUDA's autocast does to the arguments of each operation, on tensors of virtual GPUs: the casts, their cache, the rules.
#
# A rule takes an operation and its (args, kwargs), as the dispatcher hands them to a kernel in Python, and returns these cast.
# Source: aten/src/ATen/autocast_mode.h and .cpp, and cudnn/AutocastRNN.cpp.


Rule = Callable[[Any, tuple, dict], tuple[tuple, dict]]

# What autocast takes for a floating-point tensor; float64 it leaves alone
CASTABLE = {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and kind.is_floating_point}
CASTABLE.remove(torch.float64)

# The virtual GPUs that are on; and the weight cache, {identity of the weight: its cast}, shared by all threads as PyTorch's is
_on = SimpleNamespace(machine=None, casts={})
_lock = threading.RLock()


def _clear_cache() -> None:
    with _lock:
        _on.casts.clear()


def tensors_of(args, kwargs) -> list[torch.Tensor]:
    """The tensors among the arguments, and in lists and tuples among them."""
    values: list = []
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
        cast = _on.casts.get(_compat.address(weight))
        if cast is None:
            with torch.enable_grad():  # so its graph keeps the weight, and no other tensor gets that identity meanwhile
                cast = _on.casts[_compat.address(weight)] = _copy(weight, dtype)
    return cast


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype)
    with _compat.without_function_subclasses():  # autocast is below what a subclass sees as functions
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype)


def _cast_all(args, kwargs, dtype: torch.dtype, cached: bool = True) -> tuple[tuple, dict]:
    kwargs = {name: _cast(value, dtype, cached) for name, value in kwargs.items()} if kwargs else kwargs
    return tuple([_cast(value, dtype, cached) for value in args]), kwargs


def _lower(op, args, kwargs):
    return _cast_all(args, kwargs, torch.get_autocast_dtype("cuda"))


def _float32(op, args, kwargs):
    return _cast_all(args, kwargs, torch.float32)


def _float32_result(op, args, kwargs):
    index = _position(op, "dtype")
    dtype = args[index] if index < len(args) else kwargs.get("dtype")
    if dtype is not None or not _eligible(args[0]):
        return args, kwargs
    return args[:index], {**kwargs, "dtype": torch.float32}  # nothing in these schemas comes after dtype


def _float32_appended(op, args, kwargs):
    first, arguments = args[0], _compat.schema(op).arguments
    result = torch.float32 if _eligible(first) else first.dtype
    rest = [argument.default_value for argument in arguments[len(args) :]]  # the longer overload has no defaults
    return (*args, *rest), {**kwargs, "dtype": result}


def _promote(op, args, kwargs):
    kinds = {tensor.dtype for tensor in tensors_of(args, kwargs) if _eligible(tensor)}
    if torch.float32 in kinds:
        return _cast_all(args, kwargs, torch.float32)
    if kinds - {torch.get_autocast_dtype("cuda")}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")  # PyTorch's words
    return args, kwargs


def _recurrent(op, args, kwargs):
    """The layers of cuDNN: float16, whatever autocast's dtype. Where cuDNN does not run them, their cells have autocast's."""
    first, dtype = args[_position(op, "data", "input")], torch.get_autocast_dtype("cuda")
    gpu = gpu_of(first)
    if gpu is None:
        return args, kwargs
    if on_cudnn(first.dtype, gpu):
        dtype = torch.float16
    # no cache: PyTorch writes the cast weights into one flat buffer, anew each time
    return _cast_all(args, kwargs, dtype, cached=False)


def _refuse(op, args, kwargs):
    """PyTorch's own kernel for CUDA does nothing but raise the error that says what to use instead."""
    if any(map(_eligible, tensors_of(args, kwargs))):
        op.redispatch(_compat.KeySet(_compat.DispatchKey.AutocastCUDA), *args, **kwargs)
    return args, kwargs


def _unknown(op, args, kwargs):
    if any(map(_eligible, tensors_of(args, kwargs))):
        raise NotImplementedError(
            f"virtual GPUs do not know what autocast does to {op.name()} in this version of PyTorch; call it in "
            'torch.autocast("cuda", enabled=False), with its arguments cast by hand'
        )
    return args, kwargs


@functools.cache
def _position(op, *names: str) -> int:
    """Where the first of these arguments that the operation has stands."""
    order = [argument.name for argument in _compat.schema(op).arguments]
    return next(order.index(name) for name in names if name in order)


@functools.cache
def rules() -> dict[str, tuple]:
    """{name: (operation, the one to run in its place, its rule)}, for what this PyTorch casts on CUDA."""
    lists = {
        _lower: LOWER_PRECISION_FP,
        _float32: FP32,
        _float32_result: FP32_SET_OPT_DTYPE,
        _float32_appended: FP32_APPEND_DTYPE,
        _promote: PROMOTE,
        _refuse: BANNED,
    }
    rule_of = {name: rule for rule, names in lists.items() for name in names}
    table = {}
    for name in registered("AutocastCUDA") - set(CUDNN_RNN):
        target = operation(FP32_APPEND_DTYPE.get(name, name))
        table[name] = (operation(name), target, rule_of.get(name, _unknown))
    others = dict.fromkeys((*CUDNN_RNN, *RNN), _recurrent) | dict.fromkeys(FLASH_ON_CPU, _lower)
    table |= {name: (operation(name), operation(name), rule) for name, rule in others.items()}
    return {name: row for name, row in table.items() if row[0] is not None}


def registered(key: str) -> set[str]:
    """The names of ATen's operations that have a kernel of their own for a dispatch key."""
    names = _compat.registrations(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def operation(name: str):
    """The operation of ATen with this name ("mm", "pow.Scalar"), or None where this PyTorch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


# -- torch.autocast("cuda") on virtual GPUs: CUDA's own rules, at a dispatch key of PyTorch's that is free.
#
# Autocast works below Python, by dispatch keys that a tensor's real device brings along: AutocastCPU has other lists, meta has none,
# and CUDA's kernels for AutocastCUDA ask C++ whether the tensor is CUDA's. A key that a thread includes is met by tensors of every
# device, though, also inside operations made of others. So while autocast is on, the thread includes AutocastPrivateUse1, where
# each operation of CUDA's lists gets a kernel from here that casts what lies on a virtual GPU, and hands on to the keys below: a cast
# is an operation of its own, with a gradient, memory and time. All other operations fall through at no cost.
#
# PyTorch's own flags stay the truth (is_autocast_enabled, dtype, cache, nesting; one of each in every thread), and its Python code
# runs unchanged: only the functions of C++ that set the flag, or clear the cache, are followed by ours. autocast("cpu") is PyTorch's
# for what is on the CPU; tensors on virtual GPUs really are the CPU's, so here they pass by its kernels.
#
# What is registered with PyTorch stays so when virtual GPUs go, and does nothing.


KEY = "AutocastPrivateUse1"
OURS, CPUS = _compat.DispatchKey.AutocastPrivateUse1, _compat.DispatchKey.AutocastCPU
ONLY_OURS = _compat.KeySet(OURS)
BELOW = _compat.keys_below(OURS)
SETTERS = ("set_autocast_enabled", "set_autocast_cpu_enabled")

_libraries: list[torch.library.Library] = []  # registrations last as long as these
_registered: set[str] = set()  # operations that have a kernel, and "cuda", "cpu" when all of those have


def install(machine: Machine, patches: Patches) -> None:
    """Autocast for these virtual GPUs, until `patches` are put back."""
    patches.replace(_on, "machine", machine)
    patches.replace(_on, "casts", {})
    for owner in (torch, _compat.C):
        for name in SETTERS:
            if hasattr(owner, name):  # the second is deprecated
                patches.stand_in(owner, name, _followed, _follow)
        patches.stand_in(owner, "clear_autocast_cache", _followed, _clear_cache)
    patches.stand_in(torch.amp.GradScaler, "_maybe_opt_step", _maybe_step, machine)
    _follow()


def _followed(then: Callable[[], None], original, *args, **kwargs):
    result = original(*args, **kwargs)
    then()
    return result


def _follow() -> None:
    """Let this thread include our key while it autocasts, and only then."""
    cpu = torch.is_autocast_enabled("cpu")
    wanted = cpu or torch.is_autocast_enabled("cuda")
    if wanted:
        _register(cpu)
    _include(wanted)


def _include(wanted: bool) -> None:
    _compat.exclude_key(OURS, not wanted)  # as PyTorch has it where nobody autocasts
    _compat.include_key(OURS, wanted)


@contextlib.contextmanager
def cast(name: str, tensors: tuple) -> Iterator[tuple]:
    """The tensors as autocast("cuda") gives them to an operation of ATen whose stand-in is a function of Python. What is called in this
    block is part of the operation: autocast casts no more there."""
    if not torch.is_autocast_enabled("cuda") or name not in rules():  # a version's lists may lack it
        yield tensors
        return
    op, _, rule = rules()[name]
    with _compat.without_keys(ONLY_OURS):
        yield rule(op, tensors, {})[0]


def _register(cpu: bool) -> None:
    """Kernels for CUDA's lists when a thread first autocasts, and for the rest of the CPU's when one does so for the CPU."""
    if "cuda" in _registered and (not cpu or "cpu" in _registered):
        return
    with _lock:
        if "cuda" not in _registered:
            if not _compat.has_fallback(OURS):
                _libraries.append(torch.library.Library("_", "IMPL"))
                _libraries[-1].fallback(torch.library.fallthrough_kernel, KEY)
            _libraries.append(torch.library.Library("aten", "IMPL"))
            for name, (op, target, rule) in rules().items():
                _libraries[-1].impl(op, _kernel(target, functools.partial(rule, op)), KEY, with_keyset=True)
                _registered.add(name)
            _registered.add("cuda")
        if cpu and "cpu" not in _registered:
            for name in registered("AutocastCPU") - _registered:
                op = operation(name)
                if op is not None:
                    _libraries[-1].impl(op, _kernel(op, None), KEY, with_keyset=True)
                    _registered.add(name)
            _registered.add("cpu")


def _kernel(op, rule: Callable[[tuple, dict], tuple[tuple, dict]] | None):
    """What our key does for an operation. rule: None for those that only the CPU's autocast has in its lists."""

    def kernel(keyset, *args, **kwargs):
        __tracebackhide__ = True
        keyset, machine = keyset & BELOW, _on.machine
        if machine is None:
            _include(False)  # virtual GPUs went while this thread was in autocast
            return op.redispatch(keyset, *args, **kwargs)
        if machine.local.bypass:
            return op.redispatch(keyset, *args, **kwargs)
        try:
            return cast_and_run(keyset, args, kwargs)
        except (RuntimeError, IndexError) as error:  # PyTorch's error, for the line above
            raise error.with_traceback(errors.foreign(error.__traceback__)) from error.__cause__

    def cast_and_run(keyset, args, kwargs):
        inside = ONLY_OURS
        if torch.is_autocast_enabled("cpu") and any(gpu_of(tensor) is not None for tensor in tensors_of(args, kwargs)):
            keyset, inside = keyset.remove(CPUS), inside.add(CPUS)
        if rule is None or not torch.is_autocast_enabled("cuda"):
            return op.redispatch(keyset, *args, **kwargs)
        with _compat.without_keys(inside):  # as PyTorch does: no casts inside of what was cast
            args, kwargs = rule(args, kwargs)
            return op.redispatch(keyset, *args, **kwargs)

    return kernel


def _maybe_step(machine: Machine, original, scaler, optimizer, state, *args, **kwargs):
    """GradScaler asks whether a gradient was infinite. A dry run has no values: none was, and the step is taken."""
    if not machine.dry:
        return original(scaler, optimizer, state, *args, **kwargs)
    with machine.silent_about_nan():  # the program itself reads no nan
        for found_inf in state["found_inf_per_device"].values():
            found_inf.item()  # the host waits for each GPU, as it would
    return optimizer.step(*args, **kwargs)
