"""The private names of PyTorch that the engine needs, each in one place. `tests/virtualgpu/test_compat.py` walks through them.

Versions 2.11 to 2.15, wheels with CUDA and wheels for the CPU alone.
"""

import importlib
import sys

import torch
from torch import overrides
from torch._ops import HigherOrderOperator
from torch.utils import _device, _python_dispatch
from torch.utils._device import DeviceContext
from torch.utils.flop_counter import flop_registry

_C = torch._C
Device = torch.device  # torch_api/devices.py may put another in its place
fake_tensor = torch._subclasses.fake_tensor
# The operators behind torch.nn.attention.flex_attention; as an attribute, that name is one of them
flex = importlib.import_module("torch._higher_order_ops.flex_attention")
built_with_cuda = _C._has_cuda  # C++ of other wheels has no guard for CUDA's devices, also where no driver is needed

graph_task = _C._current_graph_task_id  # () -> int; -1 outside a backward pass
current_node = _C._current_autograd_node  # () -> the node of the graph that is being run, or None
next_sequence_number = _C._autograd._get_sequence_nr  # () -> the number that this thread's next node will have

no_dispatch = _C._disabled_torch_dispatch_impl  # the __torch_dispatch__ of a subclass of Tensor that has none
without_dispatch = _C._DisableTorchDispatch  # with without_dispatch(): no mode and no subclass sees what happens

TensorBase = _C.TensorBase  # where Tensor has its attributes from
real_device = _C.TensorBase.device.__get__  # (tensor) -> where its bytes really are
is_really_meta = _C.TensorBase.is_meta.__get__

# Which kernel attention takes: SDPBackend's numbers in the order in which they are asked, and as it is before anybody changes it
attention_priority, ATTENTION_PRIORITY = _C._get_sdp_priority_order, [1, 2, 0, 3, 4]
fused_choice = (
    torch._fused_sdp_choice
)  # (query, key, value, mask, dropout_p, is_causal, *, scale, enable_gqa) -> SDPBackend's number
computation_dtype = torch._prims_common.get_computation_dtype  # (dtype) -> that in which sums are added up

is_functorch_wrapped = _C._functorch.is_functorch_wrapped_tensor
functorch_unwrap = _C._functorch.get_unwrapped

empty = _C._VariableFunctions.empty
empty_like = _C._VariableFunctions.empty_like
empty_strided = _C._VariableFunctions.empty_strided
parse_to = _C._nn._parse_to  # (*args, **kwargs) of Tensor.to -> (device, dtype, non_blocking, memory_format)
suggest_memory_format = torch._prims_common.suggest_memory_format  # (tensor) -> the layout that its strides have

preferred_blas = (
    _C._get_blas_preferred_backend
)  # () -> one of _BlasBackend: what torch.backends.cuda.preferred_blas_library said
prefer_blas = _C._set_blas_preferred_backend
CUBLASLT = _C._BlasBackend.Cublaslt

# How PyTorch's C++ gives cuBLAS its workspaces (CublasHandlePool.cpp, and the wheels of 2.11 to 2.15, disassembled)
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
LARGE_WORKSPACES = (9,) if VERSION < (2, 12) else (9, 10, 11, 12)  # major capabilities whose workspace has 32 MiB
KEEPS_WORKSPACES = VERSION < (2, 15)  # for each handle and stream; later, each product gives its own back
LT_HAS_ITS_OWN = VERSION < (2, 12)  # cuBLASLt's workspace beside cuBLAS's, whose handle it takes with that workspace
SETS_WORKSPACES = VERSION >= (2, 13)  # torch.backends.cuda.cublas_workspace_size


# What torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32 say, twenty times as fast
convolutions_in_tf32, products_in_tf32 = _C._get_cudnn_allow_tf32, _C._get_cublas_allow_tf32

# The dispatcher: its keys, what is registered for each, and which of them this thread includes or excludes
DispatchKey, KeySet = _C.DispatchKey, _C.DispatchKeySet
keys_below = _C._dispatch_keyset_full_after  # (key) -> the set of all keys after it
include_key = _C._dispatch_tls_set_dispatch_key_included  # (key, on)
exclude_key = _C._dispatch_tls_set_dispatch_key_excluded  # (key, on)
without_keys = _C._ExcludeDispatchKeyGuard  # with without_keys(set)
without_function_subclasses = _C.DisableTorchFunctionSubclass
has_fallback = _C._dispatch_has_backend_fallback  # (key)
has_kernel = _C._dispatch_has_kernel_for_dispatch_key  # ("aten::mm", "Meta")
registrations = _C._dispatch_get_registrations_for_dispatch_key  # ("AutocastCUDA") -> ["aten::mm", ...]

# Does torch.tensor(..., device="cuda") come to the dispatch modes as a copy from the CPU? It does where this is on
lifts_only_cpu_tensors = _C._only_lift_cpu_tensors
lift_only_cpu_tensors = _C._set_only_lift_cpu_tensors


def with_autograd():
    """with with_autograd(): autograd records, also below itself, where a dispatch mode works."""
    hidden = (
        _C._dispatch_tls_local_exclude_set() - KeySet(DispatchKey.AutogradCPU) - KeySet(DispatchKey.ADInplaceOrView)
    )
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), hidden)


def guard_without_driver() -> None:
    """C++ that asks for a CUDA device meets a guard that does nothing, where there is no driver: no process ends by that."""
    _C._ensureCUDADeviceGuardSet()


def remove_modes(unwanted) -> None:
    """Take the dispatch modes for which `unwanted(mode)` is true off this thread's stack, wherever in it."""
    kept = []
    while any(unwanted(mode) for mode in _python_dispatch._get_current_dispatch_mode_stack()):
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


activate_gpu_trace = _C._activate_gpu_trace  # from then on C++ reports to torch.cuda._gpu_trace


def gpu_trace():
    """torch.cuda._gpu_trace, to whose registries (EventRecordCallbacks and others) CUDA's events are reported."""
    return importlib.import_module("torch.cuda._gpu_trace")


def gpu_trace_has_listeners() -> bool:
    """Does somebody wait for reports, such as torch.cuda._sanitizer?"""
    trace = sys.modules.get("torch.cuda._gpu_trace")
    return trace is not None and bool(trace.EventRecordCallbacks.callback_list)


def cuda_sanitizer_mode():
    """The dispatch mode of torch.cuda._sanitizer, where it is on in this thread; or None."""
    kind = getattr(sys.modules.get("torch.cuda._sanitizer"), "CUDASanitizerDispatchMode", ())
    return next((mode for mode in _python_dispatch._get_current_dispatch_mode_stack() if isinstance(mode, kind)), None)


def fake_mode_is_on() -> bool:
    """Does FakeTensorMode come after the other modes of this thread?"""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None


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


def decompose(operator, args, kwargs):
    """Carry out a composite operation as C++ does, which may differ from its decomposition in Python."""
    key = _C.DispatchKey.CompositeImplicitAutograd
    if _C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return operator._op_dk(key, *args, **kwargs)
    return operator.decompose(*args, **kwargs)


def implementation(operator: HigherOrderOperator):
    """The Python function that carries out a higher-order operator on plain tensors. Raises NotImplementedError where it has none."""
    kernels = operator.py_kernels
    for key in (_C.DispatchKey.CompositeExplicitAutograd, _C.DispatchKey.CPU):
        if key in kernels:
            return kernels[key]
    raise NotImplementedError(
        f"{operator.name()} is not modelled by virtual GPUs: PyTorch has no plain implementation of it"
    )


def registered_in_python() -> set[str]:
    """{"namespace/operation.overload/dispatch key"} of the kernels that torch.library has registered."""
    return torch.library._impls


_library = None  # of the kernels that `add_kernel` registers; they stay for the life of the process


def add_kernel(name: str, key: str, kernel) -> None:
    """Register a Python kernel of an operation ("mm.dtype") for a dispatch key, unless PyTorch or we have one there."""
    global _library
    packet, _, overload = name.partition(".")
    operation = getattr(torch.ops.aten, packet, None)
    if operation is None or (overload or "default") not in operation.overloads() or has_kernel(f"aten::{name}", key):
        return
    if _library is None:
        # It notes the file that calls it, and fails where the locale does not know that path's letters: so it is no file
        _library = eval(compile('torch.library.Library("aten", "IMPL")', "virtualgpu", "eval"))
    _library.m.impl(name, key, kernel)  # Library.impl refuses what decomposes; on a GPU that is one kernel


def default_device() -> torch.device | None:
    """What torch.set_default_device or `with torch.device(...)` chose in this thread."""
    if _C._len_torch_function_stack():
        for mode in reversed(overrides._get_current_function_mode_stack()):
            if isinstance(mode, DeviceContext):
                return mode.device
    return None


def carried_out_by_dtensor(operator) -> bool:
    """Has somebody given DTensor a function of its own for this operation? context_parallel does, for the fused kernels of attention."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and operator in module.DTensor._op_dispatcher._custom_op_handlers


def numbers_are_gpus() -> bool:
    """Does C++ take torch.device(0) for cuda:0? Wheels without CUDA do not."""
    try:
        return Device(0).type == "cuda"
    except RuntimeError:  # no accelerator at all
        return False


# () -> the functions that heed torch.set_default_device; who calls it first while some are replaced would have the wrong ones
device_constructors = _device._device_constructors

real_storage_device = torch.UntypedStorage.device.__get__
# its _rebuild_tensor(storage, offset, size, stride): of files, and of what another process sends
pickling = torch._utils
saving = torch.serialization._package_registry  # [(priority, tag, restore)] of torch.save and torch.load


def register_as_builtin(function, name: str):
    """TorchScript knows PyTorch's functions by identity: let it know one that stands in for another. Returns what undoes it."""
    table = torch.jit._builtins._get_builtin_table()
    torch.jit._builtins._register_builtin(function, name)
    return lambda: table.pop(id(function), None)


def builtin_name(function) -> str | None:
    """TorchScript's name for a function of PyTorch ("aten::ones"), or None."""
    return torch.jit._builtins._find_builtin(function)


def loader_iterator() -> type:
    """The class of what iter() of a DataLoader gives. A function, for not every program imports torch.utils.data."""
    return importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter


def fetchers() -> list[type]:
    """The classes whose fetch(index) makes one batch of a DataLoader, in a worker or not."""
    fetch = importlib.import_module("torch.utils.data._utils.fetch")
    return [fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher]


def in_loader_worker() -> bool:
    """Is this process one of a DataLoader's workers?"""
    return importlib.import_module("torch.utils.data").get_worker_info() is not None
