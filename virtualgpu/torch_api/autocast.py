"""torch.autocast("cuda") on virtual GPUs: CUDA's own rules, at a dispatch key of PyTorch's that is free.

Autocast works below Python, by dispatch keys that a tensor's real device brings along: AutocastCPU has other lists, meta has none,
and CUDA's kernels for AutocastCUDA ask C++ whether the tensor is CUDA's. A key that a thread includes is met by tensors of every
device, though, also inside operations made of others. So while autocast is on, the thread includes AutocastPrivateUse1, where
each operation of CUDA's lists gets a kernel from here that casts what lies on a virtual GPU, and hands on to the keys below: a cast
is an operation of its own, with a gradient, memory and time. All other operations fall through at no cost.

PyTorch's own flags stay the truth (is_autocast_enabled, dtype, cache, nesting; one of each in every thread), and its Python code
runs unchanged: only the functions of C++ that set the flag, or clear the cache, are followed by ours. autocast("cpu") is PyTorch's
for what is on the CPU; tensors on virtual GPUs really are the CPU's, so here they pass by its kernels.

What is registered with PyTorch stays so when virtual GPUs go, and does nothing.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from virtualgpu import _compat, errors
from virtualgpu.engine.machine import Machine, gpu_of
from virtualgpu.torch_api.autocast_rules import Rule, cache, forget, operation, registered, rules, tensors_of
from virtualgpu.torch_api.registry import Patches

KEY = "AutocastPrivateUse1"
OURS, CPUS = _compat.DispatchKey.AutocastPrivateUse1, _compat.DispatchKey.AutocastCPU
ONLY_OURS = _compat.KeySet(OURS)
BELOW = _compat.keys_below(OURS)
SETTERS = ("set_autocast_enabled", "set_autocast_cpu_enabled")

_on = SimpleNamespace(machine=None)  # the virtual GPUs that are on
_lock = threading.Lock()
_libraries: list[torch.library.Library] = []  # registrations last as long as these
_known: set[str] = set()  # operations that have a kernel, and "cuda", "cpu" when all of those have


def install(machine: Machine, patches: Patches) -> None:
    """Autocast for these virtual GPUs, until `patches` are put back."""
    patches.replace(_on, "machine", machine)
    patches.replace(cache, "casts", {})
    for owner in (torch, _compat.C):
        for name in SETTERS:
            if hasattr(owner, name):  # the second is deprecated
                patches.stand_in(owner, name, _followed, _follow)
        patches.stand_in(owner, "clear_autocast_cache", _followed, forget)
    patches.stand_in(torch.amp.GradScaler, "_maybe_opt_step", _maybe_step, machine)
    _follow()


# -- PyTorch's flags, and our key


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
    rule = _rule(name)
    with _compat.without_keys(ONLY_OURS):
        yield rule(tensors, {})[0]


@functools.cache
def _rule(name: str) -> Rule:
    return rules()[name][2](operation(name))


# -- the kernels


def _register(cpu: bool) -> None:
    """Kernels for CUDA's lists when a thread first autocasts, and for the rest of the CPU's when one does so for the CPU."""
    if "cuda" in _known and (not cpu or "cpu" in _known):
        return
    with _lock:
        if "cuda" not in _known:
            if not _compat.has_fallback(OURS):
                _libraries.append(torch.library.Library("_", "IMPL"))
                _libraries[-1].fallback(torch.library.fallthrough_kernel, KEY)
            _libraries.append(torch.library.Library("aten", "IMPL"))
            for name, (op, target, rule) in rules().items():
                _libraries[-1].impl(op, _kernel(target, rule(op)), KEY, with_keyset=True)
                _known.add(name)
            _known.add("cuda")
        if cpu and "cpu" not in _known:
            for name in registered("AutocastCPU") - _known:
                op = operation(name)
                if op is not None:
                    _libraries[-1].impl(op, _kernel(op, None), KEY, with_keyset=True)
                    _known.add(name)
            _known.add("cpu")


def _kernel(op, rule: Rule | None):
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


# -- the scaler of gradients


def _maybe_step(machine: Machine, original, scaler, optimizer, state, *args, **kwargs):
    """GradScaler asks whether a gradient was infinite. A dry run has no values: none was, and the step is taken."""
    if not machine.dry:
        return original(scaler, optimizer, state, *args, **kwargs)
    with machine.silent_about_nan():  # the program itself reads no nan
        for found_inf in state["found_inf_per_device"].values():
            found_inf.item()  # the host waits for each GPU, as it would
    return optimizer.step(*args, **kwargs)
