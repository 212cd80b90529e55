"""torch.cuda and the libraries below it: first use, cuBLAS, attention, traces of events."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch

C = torch._C
NN, VF = C._nn, torch._VF  # functions of torch.nn.functional, and of layers of cells
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
built_with_cuda = C._has_cuda  # C++ of other wheels has no guard for CUDA's devices, also where no driver is needed
parallel_functions = torch.nn.parallel._functions  # where DataParallel keeps its streams
REPLICATE = "_replicate_for_data_parallel"  # of a Module: () -> its replica, without children and parameters

_fp32_precision = C._get_fp32_precision_getter

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
    return _fp32_precision("cuda", operation) == "tf32"


def cpu_multiplies_in_bfloat16() -> bool:
    """Numbers of float32, where the processor can."""
    return _fp32_precision("mkldnn", "matmul") == "bf16"


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
