"""PyTorch's private names for tensors, the dispatcher, operators, torch.cuda, files and loaders."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller

import torch
from torch import overrides
from torch._ops import HigherOrderOperator
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction  # noqa: F401
from torch.profiler import profiler as _profiler
from torch.utils import _device, _python_dispatch, _pytree
from torch.utils.flop_counter import flop_registry

# -- Tensors, storages and devices below what virtual GPUs put in their place, and the nodes of autograd.

_C = torch._C
Device = torch.device  # torch_api/construct.py may put another in its place
TensorBase = _C.TensorBase  # where Tensor has its attributes from
fake_tensor = torch._subclasses.fake_tensor
tree_map_only = _pytree.tree_map_only

real_device = TensorBase.device.__get__  # (tensor) -> where its bytes really are
real_storage_device = torch.UntypedStorage.device.__get__
untyped = attrgetter("_untyped_storage")  # (TypedStorage) -> what it is made of
address = attrgetter("_cdata")  # of the C++ object behind a tensor, a storage or a generator
is_view = methodcaller("_is_view")  # (tensor)

is_functorch_wrapped = _C._functorch.is_functorch_wrapped_tensor
is_batched_gradient = _C._functorch.is_legacy_batchedtensor  # of autograd.grad(is_grads_batched=True)
functorch_unwrap = _C._functorch.get_unwrapped

empty = _C._VariableFunctions.empty
empty_like = _C._VariableFunctions.empty_like
empty_strided = _C._VariableFunctions.empty_strided
parse_to = _C._nn._parse_to  # (*args, **kwargs) of Tensor.to -> (device, dtype, non_blocking, memory_format)
suggest_memory_format = torch._prims_common.suggest_memory_format  # (tensor) -> the layout that its strides have

MAKE_GRADS = "_make_grads"  # of torch.autograd: (outputs, their gradients, ...), before C++ begins
graph_task = _C._current_graph_task_id  # () -> int; -1 outside a backward pass
current_node = _C._current_autograd_node  # () -> the node of the graph that is being run, or None
PythonNode = _C._FunctionBase  # of a torch.autograd.Function
next_sequence_number = _C._autograd._get_sequence_nr  # () -> the number that this thread's next node will have
sequence_number = methodcaller("_sequence_nr")  # (node)


def _past_overrides(getter):
    """`getter`, answered by C++ itself: where a TorchFunctionMode is on (torch.set_default_device, a mask of flex_attention) and for
    subclasses, PyTorch's getters ask Tensor's property of that name instead, which virtual GPUs replace."""
    plain, modes = (torch.Tensor, torch.nn.Parameter), _C._len_torch_function_stack

    def get(tensor: torch.Tensor) -> bool:
        if type(tensor) in plain and not modes():
            return getter(tensor)
        with _C.DisableTorchFunction():
            return getter(tensor)

    return get


is_really_meta = _past_overrides(TensorBase.is_meta.__get__)
is_really_on_gpu = _past_overrides(TensorBase.is_cuda.__get__)  # on a real one


def has_hooks(tensor: torch.Tensor) -> bool:
    """Does its gradient call somebody?"""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def in_forward_mode() -> bool:
    """Is torch.autograd.forward_ad.dual_level on? Any tensor may have a tangent then, also one that requires no gradient."""
    return torch.autograd.forward_ad._current_level >= 0


def coo_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The indices and the values of a sparse tensor, coalesced or not."""
    return [tensor._indices(), tensor._values()]


def numbers_are_gpus() -> bool:
    """Does C++ take torch.device(0) for cuda:0? Wheels without CUDA do not."""
    try:
        return Device(0).type == "cuda"
    except RuntimeError:  # no accelerator at all
        return False


# -- The dispatcher: its keys, what is registered for each, which of them this thread includes or excludes, and the modes of Python.


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


# -- Operators: their schemas, their kernels, and what PyTorch knows of each.


schema = attrgetter("_schema")  # (torch.ops.aten.mm.default) -> .name ("aten::mm"), .arguments, .returns
packet = attrgetter("_overloadpacket")  # -> torch.ops.aten.mm
overload_name = attrgetter("_overloadname")  # -> "default"
computation_dtype = torch._prims_common.get_computation_dtype  # (dtype) -> that in which sums are added up
# The operators behind torch.nn.attention.flex_attention; as an attribute, that name is one of them
flex = importlib.import_module("torch._higher_order_ops.flex_attention")


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


# -- torch.cuda and the libraries below it: first use, cuBLAS, attention, traces of events.


C = torch._C
NN, VF = C._nn, torch._VF  # functions of torch.nn.functional, and of layers of cells
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
built_with_cuda = C._has_cuda  # C++ of other wheels has no guard for CUDA's devices, also where no driver is needed
parallel_functions = torch.nn.parallel._functions  # where DataParallel keeps its streams
REPLICATE = "_replicate_for_data_parallel"  # of a Module: () -> its replica, without children and parameters

fp32_precision = C._get_fp32_precision_getter  # (backend, operation) -> "tf32", "ieee", "bf16", "none"

# Which kernel attention takes: SDPBackend's numbers in the order in which they are asked, and as it is before anybody changes it
attention_priority, ATTENTION_PRIORITY = C._get_sdp_priority_order, [1, 2, 0, 3, 4]
# (query, key, value, mask, dropout_p, is_causal, *, scale, enable_gqa) -> SDPBackend's number
fused_choice = torch._fused_sdp_choice
safe_softmax = torch._safe_softmax  # (scores, dim): zeros where all scores of a row are minus infinity

preferred_blas = C._get_blas_preferred_backend  # () -> _BlasBackend: what preferred_blas_library said
prefer_blas = C._set_blas_preferred_backend
CUBLASLT = C._BlasBackend.Cublaslt

# How PyTorch's C++ gives cuBLAS its workspaces (CublasHandlePool.cpp, and the wheels of 2.11 to 2.15, disassembled)
LARGE_WORKSPACES = (9,) if VERSION < (2, 12) else (9, 10, 11, 12)  # major capabilities whose workspace has 32 MiB
KEEPS_WORKSPACES = VERSION < (2, 15)  # for each handle and stream; later, each product gives its own back
LT_HAS_ITS_OWN = VERSION < (2, 12)  # cuBLASLt's workspace beside cuBLAS's, whose handle it takes with that workspace
SETS_WORKSPACES = VERSION >= (2, 13)  # torch.backends.cuda.cublas_workspace_size


def in_tf32(operation: str) -> bool:
    """May float32 be rounded to TF32 in a GPU's "matmul", "conv" or "rnn"? As cuBLAS and cuDNN are told, whether the program said so by
    fp32_precision, allow_tf32 or set_float32_matmul_precision; whoever asks by another of these than the program used gets an error."""
    return fp32_precision("cuda", operation) == "tf32"


def cpu_multiplies_in_bfloat16() -> bool:
    """Numbers of float32, where the processor can."""
    return fp32_precision("mkldnn", "matmul") == "bf16"


def real_gpus() -> int:
    """How many work here, where no virtual ones are on. torch.cuda.device_count() alone also counts those whose driver is too old."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hide_real_gpus() -> None:
    """In this process C++ finds no real GPU any more, as where there is no driver: it counts them once, with CUDA_VISIBLE_DEVICES as
    that is then. Does nothing where one is in use."""
    if not built_with_cuda or torch.cuda.is_initialized():
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        C._cuda_getDeviceCount()
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def guard_without_driver() -> None:
    """C++ that asks for a CUDA device meets a guard that does nothing, where it finds no real GPU: no process ends by that."""
    C._ensureCUDADeviceGuardSet()


def first_use_has_begun() -> bool:
    """Has torch.cuda been initialized, or is this thread about to do it?"""
    return torch.cuda._initialized or hasattr(torch.cuda._tls, "is_initializing")


@contextlib.contextmanager
def first_use() -> Iterator[Callable[[], list]]:
    """`with first_use() as waiting:` torch.cuda is initialized; waiting() takes the calls that were put off until then."""
    torch.cuda._tls.is_initializing = True
    try:
        yield _take_waiting
    finally:
        del torch.cuda._tls.is_initializing
    torch.cuda._initialized = True


def _take_waiting() -> list:
    tracker = torch.cuda._lazy_seed_tracker
    waiting, tracker.call_order = tracker.call_order, []
    return [call[0] for call in waiting if call]


def gpu_trace_has_listeners() -> bool:
    """Does somebody wait for reports, such as torch.cuda._sanitizer?"""
    trace = sys.modules.get("torch.cuda._gpu_trace")
    return trace is not None and bool(trace.EventRecordCallbacks.callback_list)


# -- What PyTorch has beside tensors: files, TorchScript, loaders, the profiler, the compiler.


KinetoProfile = _profiler._KinetoProfile  # the base of torch.profiler.profile
pickling = torch._utils  # its _rebuild_tensor: of files, and of what another process sends
WORKER_LOOP = "_worker_loop"  # of loader_workers()
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


def loader_workers():
    """The module whose WORKER_LOOP is all that a DataLoader's worker does."""
    return importlib.import_module("torch.utils.data._utils.worker")


def in_loader_worker() -> bool:
    """Is this process one of a DataLoader's workers?"""
    return importlib.import_module("torch.utils.data").get_worker_info() is not None
