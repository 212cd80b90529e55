"""The dispatcher: its keys, what is registered for each, which of them this thread includes or excludes, and the modes of Python."""

import torch
from torch import overrides
from torch.utils import _device, _python_dispatch

_C = torch._C
TorchDispatchMode = _python_dispatch.TorchDispatchMode
DispatchKey, KeySet = _C.DispatchKey, _C.DispatchKeySet
keys_below = _C._dispatch_keyset_full_after  # (key) -> the set of all keys after it
include_key = _C._dispatch_tls_set_dispatch_key_included  # (key, on)
exclude_key = _C._dispatch_tls_set_dispatch_key_excluded  # (key, on)
without_keys = _C._ExcludeDispatchKeyGuard  # with without_keys(set)
without_function_subclasses = _C.DisableTorchFunctionSubclass
has_fallback = _C._dispatch_has_backend_fallback  # (key)
has_kernel = _C._dispatch_has_kernel_for_dispatch_key  # ("aten::mm", "Meta")
registrations = _C._dispatch_get_registrations_for_dispatch_key  # ("AutocastCUDA") -> ["aten::mm", ...]

no_dispatch = _C._disabled_torch_dispatch_impl  # the __torch_dispatch__ of a subclass of Tensor that has none
without_dispatch = _C._DisableTorchDispatch  # with without_dispatch(): no mode and no subclass sees what happens

# Does torch.tensor(..., device="cuda") come to the dispatch modes as a copy from the CPU? It does where this is on
lifts_only_cpu_tensors = _C._only_lift_cpu_tensors
lift_only_cpu_tensors = _C._set_only_lift_cpu_tensors

# () -> the functions that heed torch.set_default_device; who calls it first while some are replaced would have the wrong ones
device_constructors = _device._device_constructors
DeviceContext = _device.DeviceContext  # the mode of `with torch.device(...)`

# Modules of PyTorch between an operation and the program that calls it
BETWEEN = ("torch._ops", "torch.utils._python_dispatch", "torch._dynamo.eval_frame", "torch._compile")


def with_autograd():
    """with with_autograd(): autograd records, also below itself, where a dispatch mode works."""
    hidden = (
        _C._dispatch_tls_local_exclude_set() - KeySet(DispatchKey.AutogradCPU) - KeySet(DispatchKey.ADInplaceOrView)
    )
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), hidden)


def remove_modes(unwanted) -> None:
    """Take the dispatch modes for which `unwanted(mode)` is true off this thread's stack, wherever in it."""
    kept = []
    while has_mode(unwanted):
        top = _python_dispatch._get_current_dispatch_mode()
        if unwanted(top):
            top.__exit__(None, None, None)
        else:
            kept.append(_python_dispatch._pop_mode())
    for other in reversed(kept):
        _python_dispatch._push_mode(other)


def has_mode(wanted) -> bool:
    """Is a dispatch mode for which `wanted(mode)` is true on this thread's stack?"""
    return any(wanted(mode) for mode in _python_dispatch._get_current_dispatch_mode_stack())


def enter_below(mode) -> None:
    """Enter a dispatch mode below those that are on in this thread: `with` ends whatever is on top, so each of them ends itself."""
    above = []
    while _python_dispatch._get_current_dispatch_mode_stack():
        above.append(_python_dispatch._pop_mode())
    mode.__enter__()
    for other in reversed(above):
        _python_dispatch._push_mode(other)


def fake_mode_is_on() -> bool:
    """Does FakeTensorMode come after the other modes of this thread?"""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None


def default_device() -> torch.device | None:
    """What torch.set_default_device or `with torch.device(...)` chose in this thread."""
    if _C._len_torch_function_stack():
        for mode in reversed(overrides._get_current_function_mode_stack()):
            if isinstance(mode, DeviceContext):
                return mode.device
    return None
