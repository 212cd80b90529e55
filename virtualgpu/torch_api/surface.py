"""The surface: every name of PyTorch's C++ that has to do with GPUs, in a row that says what becomes of it.

A name is *answered* by a module of this package, *refused* with NotImplementedError in one sentence with the cure, or *harmless*:
it works without a driver. Names are those of torch._C, of 2.11 to 2.15, with and without CUDA; those that begin with "torch." are
public ones. `tests/virtualgpu/test_surface.py` compares the rows with what PyTorch has and with what is put in place.
"""

import functools
import inspect
import re

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.patches import Patches

# Which names need a row. Those of other makers' GPUs do not.
PATTERN = re.compile(
    r"^(?!.*(xpu|mtia))(.*(cuda|cudnn|nccl|accelerator|cublas|cusparse|magma|gpu|rocm|hip|miopen|nvtx|nvshmem|mempool|graph_pool)"
    r"|_gds_|_host_|_(broadcast|scatter|gather)|_can_use_|_is_ck_|_has_gds|.*(sdp|_blas_|linalg_pref|sm_carveout|symmetricmem|_dma|_fr_trace|intra_node))",
    re.IGNORECASE,
)

ANSWERED = {  # {the module of virtualgpu whose `install` puts the answers in place: names}
    "torch_api.memory": """
        _accelerator_emptyCache _accelerator_emptyHostCache _accelerator_getAllocatorSettings _accelerator_getDeviceStats
        _accelerator_getMemoryInfo _accelerator_isAllocatorInitialized _accelerator_resetAccumulatedStats
        _accelerator_resetPeakStats _accelerator_setAllocatorSettings _cuda_allocationTraceback
        _cuda_attach_out_of_memory_observer _cuda_cudaCachingAllocator_enable _cuda_cudaCachingAllocator_is_enabled
        _cuda_cudaCachingAllocator_raw_alloc _cuda_cudaCachingAllocator_raw_delete _cuda_emptyCache _cuda_getAllocatorBackend
        _cuda_getMemoryFraction _cuda_getMemoryMetadata _cuda_isHistoryEnabled _cuda_memoryMetadataSupported
        _cuda_memorySnapshot _cuda_memoryStats _cuda_record_memory_history _cuda_record_memory_history_legacy
        _cuda_resetAccumulatedMemoryStats _cuda_resetPeakMemoryStats _cuda_setMemoryFraction _cuda_setMemoryMetadata
        _graph_pool_handle _host_emptyCache""",
    "torch_api.random": "_accelerator_getDefaultGenerator",
    "torch_api.streams": """
        _CudaEventBase _CudaStreamBase _accelerator_getStream _accelerator_setStream _cuda_getCurrentRawStream
        _cuda_getCurrentStream _cuda_getDefaultStream _cuda_getStreamFromExternal _cuda_setStream""",
    "torch_api.attention": "_can_use_cudnn_attention _can_use_flash_attention _can_use_mem_efficient_attention",
    "torch_api.cuda": """
        _cuda_clearCublasWorkspaces _cuda_getCublasLtWorkspaceSize _cuda_getCublasWorkspaceSize _cuda_getCurrentBlasHandle
        _cuda_getCurrentSolverHandle _cuda_resetCublasLtWorkspaceSize _cuda_resetCublasWorkspaceSize
        _cuda_setCublasLtWorkspaceSize _cuda_setCublasWorkspaceSize _set_blas_preferred_backend
        _CudaDeviceProperties _accelerator_exchangeDevice _accelerator_getAccelerator _accelerator_getDeviceCapability
        _accelerator_getDeviceIndex _accelerator_hooks_device_count _accelerator_hooks_exchange_device
        _accelerator_hooks_get_current_device _accelerator_hooks_maybe_exchange_device _accelerator_hooks_set_current_device
        _accelerator_maybeExchangeDevice _accelerator_setDeviceIndex _accelerator_synchronizeDevice
        _cuda_canDeviceAccessPeer _cuda_exchangeDevice _cuda_getArchFlags _cuda_getDevice _cuda_getDeviceCount
        _cuda_get_sync_debug_mode _cuda_hasPrimaryContext _cuda_init _cuda_ipc_collect _cuda_isCurrentStreamCapturing
        _cuda_isInBadFork _cuda_maybeExchangeDevice _cuda_setDevice _cuda_set_sync_debug_mode _cuda_sleep _cuda_synchronize _cudart _get_accelerator
        _is_cudnn_attention_decode_disabled _nvtx""",
    "torch_api.data_parallel": """
        _broadcast _broadcast_coalesced _broadcast_out _gather _gather_out _nccl_reduce _scatter _scatter_out""",
    "distributed.process_group": "_distributed_c10d.ProcessGroupNCCL _distributed_c10d._is_nvshmem_available",
}

REFUSED = [  # (what is or are not modelled, the cure, names)
    (
        "CUDA graphs are",
        "call what would be captured; a virtual GPU gains nothing by a graph",
        """_CUDAGraph _acceleratorGraph _construct_CUDA_Tensor_From_Storage_And_Metadata _cuda_beginAllocateCurrentStreamToPool
        _cuda_beginAllocateToPool _cuda_checkPoolLiveAllocations _cuda_getCheckpointState _cuda_setCheckpointPoolState
        torch.cuda.CUDAGraph torch.cuda.graph torch.cuda.make_graphed_callables torch.accelerator.Graph""",
    ),
    (
        "allocating in a pool of one's own (torch.cuda.MemPool) is",
        "leave use_mem_pool out; without it all memory comes from one cache",
        """_cuda_beginAllocateCurrentThreadToPool _cuda_endAllocateToPool _cuda_releasePool torch.cuda.memory.use_mem_pool""",
    ),
    (
        "an allocator of one's own (CUDAPluggableAllocator) is",
        "leave it out; PyTorch's native allocator is there",
        """_CUDAPluggableAllocator _cuda_changeCurrentAllocator _cuda_customAllocator _cuda_getAllocator
        torch.cuda.memory.CUDAPluggableAllocator""",
    ),
    (
        "the allocator of pinned memory is",
        "leave its figures out; pin_memory() works",
        """_cuda_cudaHostAllocator _cuda_hostMemoryStats _cuda_resetAccumulatedHostMemoryStats
        _cuda_resetPeakHostMemoryStats""",
    ),
    ("a note on an address of the GPU is", "use torch.cuda.memory._annotate_tensor", "_cuda_annotateMemory"),
    (
        "green contexts (a part of a GPU's processors) are",
        "use torch.cuda.Stream()",
        "_CUDAGreenContext torch.cuda.green_contexts.GreenContext torch.cuda.green_contexts.SMPartition",
    ),
    (
        "GPUDirect Storage is",
        "use torch.save and torch.load",
        """_gds_deregister_buffer _gds_deregister_handle _gds_load_storage _gds_register_buffer _gds_register_handle
        _gds_save_storage""",
    ),
    (
        "kernels that are compiled from CUDA's source are",
        "write them with PyTorch's operations",
        "_cuda_jiterator_compile_and_launch_kernel torch.cuda._compile_kernel",
    ),
    (
        "NCCL's collectives of one process (torch.cuda.nccl) are",
        "use torch.cuda.comm, or torch.distributed with a process for each GPU",
        "_nccl_all_gather _nccl_all_reduce _nccl_broadcast _nccl_init_rank _nccl_reduce_scatter _nccl_unique_id",
    ),
    (
        "NCCL's own process groups and communicators are",
        'use torch.distributed.init_process_group("nccl")',
        """_distributed_c10d.NCCLXStub _distributed_c10d.ProcessGroupNCCL2 _distributed_c10d.ProcessGroupNCCLLazy
        _distributed_c10d._register_external_nccl_comm _distributed_c10d._unregister_external_nccl_comm""",
    ),
    (
        "memory that several GPUs see (symmetric memory, NVSHMEM) is",
        "use the collectives of torch.distributed",
        """_distributed_c10d._SymmetricMemory.empty_strided_p2p _distributed_c10d._SymmetricMemory.has_multicast_support
        _distributed_c10d._SymmetricMemory.rendezvous _distributed_c10d._detect_dma_connectivity
        _distributed_c10d._nvshmemx_cumodule_init""",
    ),
    (
        "choosing among kernels by trying them (TunableOp) is",
        "leave torch.cuda.tunable out; its switches alone are kept, and tune nothing",
        """_cuda_tunableop_clear_all _cuda_tunableop_get_results _cuda_tunableop_get_rotating_buffer_size
        _cuda_tunableop_get_validators _cuda_tunableop_read_file torch.cuda.tunable.mgpu_tune_gemm_in_file
        torch.cuda.tunable.tune_gemm_in_file""",
    ),
    (
        "cuDNN's reserve for batch normalization is",
        "measure the layer with torch.cuda.max_memory_allocated()",
        "_get_cudnn_batch_norm_reserve_space_size",
    ),
    (
        "cuFFT's cache of plans is",
        "leave torch.backends.cuda.cufft_plan_cache out",
        "torch.backends.cuda.cuFFTPlanCacheManager.__getitem__",
    ),
    (
        "RPC is",
        "send with torch.distributed.isend and irecv, or build the pipeline with torch.distributed.pipelining",
        "torch.distributed.rpc.init_rpc",
    ),
    (
        "PyTorch's own detector of races is",
        "run the program by python -m virtualgpu --sanitize",
        "_activate_gpu_trace",
    ),
    ("the temperature of a GPU is", "leave it out; a virtual one has no sensor", "torch.cuda.temperature"),
]

HARMLESS = {  # {why: names}
    "a switch of C++ that is kept without a GPU": """
        _get_blas_default_backend _get_blas_preferred_backend _get_cublas_allow_bf16_reduced_precision_reduction
        _get_cublas_allow_fp16_accumulation _get_cublas_allow_fp16_reduced_precision_reduction _get_cublas_allow_tf32
        _get_cudnn_allow_tf32 _get_cudnn_benchmark _get_cudnn_depthwise_kernel _get_cudnn_deterministic _get_cudnn_enabled
        _get_cudnn_sdp_enabled _get_fa3_sdp_enabled _get_fa4_sdp_enabled _get_flash_sdp_enabled _get_linalg_preferred_backend
        _get_math_sdp_allow_fp16_bf16_reduction _get_math_sdp_enabled _get_mem_efficient_sdp_enabled _get_miopen_immediate
        _get_overrideable_sdp_enabled _get_rocm_fa_preferred_backend _get_sdp_priority_order _get_sm_carveout_experimental
        _jit_can_fuse_on_gpu _jit_get_te_cuda_pointwise_block_count _jit_get_te_cuda_pointwise_block_size
        _jit_get_te_cuda_pointwise_loop_levels _jit_override_can_fuse_on_gpu _jit_set_te_cuda_pointwise_block_count
        _jit_set_te_cuda_pointwise_block_size _jit_set_te_cuda_pointwise_loop_levels
        _set_cublas_allow_bf16_reduced_precision_reduction _set_cublas_allow_fp16_accumulation
        _set_cublas_allow_fp16_reduced_precision_reduction _set_cublas_allow_tf32 _set_cudnn_allow_tf32 _set_cudnn_benchmark
        _set_cudnn_depthwise_kernel _set_cudnn_deterministic _set_cudnn_enabled _set_linalg_preferred_backend
        _set_math_sdp_allow_fp16_bf16_reduction _set_miopen_immediate _set_rocm_fa_preferred_backend _set_sdp_priority_order
        _set_sdp_use_cudnn _set_sdp_use_fa3 _set_sdp_use_fa4 _set_sdp_use_flash _set_sdp_use_math _set_sdp_use_mem_efficient
        _set_sdp_use_overrideable _set_sm_carveout_experimental get_autocast_gpu_dtype set_autocast_gpu_dtype""",
    "what the wheel was built with": "_has_cuda _has_cudnn _has_cusparselt _has_gds _has_magma _is_ck_sdpa_available",
    "a type that says which, without a function of its own": """
        AcceleratorError _BlasBackend _ROCmFABackend _SDPAParams _SDPBackend _cuda_CUDAAllocator
        _cuda_CUDAAllocator_AllocatorState _distributed_c10d._DEFAULT_PG_NCCL_TIMEOUT _distributed_c10d._DMAConnectivity
        _distributed_c10d._SymmetricMemory""",
    "the base of torch.cuda.MemPool, which torch_api.memory replaces": "_MemPool",
    "launches Triton's kernels, of which there are none": "_FastCudaLauncher _StaticCudaLauncher",
    "versions, and functions of libraries that no driver is asked for": "_cudnn _cusparselt",
    "called when virtual GPUs are turned on": "_ensureCUDADeviceGuardSet",
    "the flight recorder, which C++ keeps for NCCL's groups: empty": """
        _distributed_c10d._dump_fr_trace _distributed_c10d._dump_fr_trace_file _distributed_c10d._dump_fr_trace_json
        _distributed_c10d._dump_nccl_trace _distributed_c10d._dump_nccl_trace_json
        _distributed_c10d._get_intra_node_comm_usage_counter _distributed_c10d._reset_fr_recording_nccl
        _distributed_c10d._reset_fr_trace""",
    "sends by the process group, which is ours": "_distributed_c10d._broadcast_coalesced",
    "a factor for a sum, which distributed._compat reads": "_distributed_c10d._make_nccl_premul_sum",
}

# Harmless where PyTorch was built with CUDA; where it was not, they are refused, unless torch_api.cuda answers
OF_CUDA_WHEELS = """
    _cuda_getCompiledVersion _cuda_getHipblasltVersion _cuda_get_conv_benchmark_empty_cache _cuda_get_cudnn_benchmark_limit
    _cuda_lock_mutex _cuda_record_untuned_enable _cuda_record_untuned_is_enabled _cuda_set_cudnn_benchmark_limit
    _cuda_tunableop_enable _cuda_tunableop_get_cublaslt_requested_algo_count _cuda_tunableop_get_filename
    _cuda_tunableop_get_max_tuning_duration _cuda_tunableop_get_max_tuning_iterations _cuda_tunableop_is_enabled
    _cuda_tunableop_pop_dynamic_dims_mask _cuda_tunableop_push_dynamic_dims_mask
    _cuda_tunableop_set_cublaslt_requested_algo_count _cuda_tunableop_set_filename _cuda_tunableop_set_max_tuning_duration
    _cuda_tunableop_set_max_tuning_iterations _cuda_tunableop_set_numerical_check_tolerances
    _cuda_tunableop_set_rotating_buffer_size _cuda_tunableop_tuning_enable _cuda_tunableop_tuning_is_enabled
    _cuda_tunableop_wildcard_fallback_enable _cuda_tunableop_wildcard_fallback_is_enabled _cuda_unlock_mutex
    _cudnn_clear_dropout_state _cudnn_set_conv_benchmark_empty_cache _get_cublaslt_prefer_grouped_gemm _nccl_version
    _nccl_version_suffix _rocm_is_backward_pass _set_cublaslt_prefer_grouped_gemm"""

# The first version that has a name, and the first that has it no more; the others are in all from 2.11 to 2.15
SINCE = {
    (2, 12): """
        _acceleratorGraph _accelerator_emptyHostCache _accelerator_getAllocatorSettings _cuda_allocationTraceback
        _cuda_cudaCachingAllocator_is_enabled _is_ck_sdpa_available""",
    (2, 13): """
        _FastCudaLauncher _cuda_getCublasLtWorkspaceSize _cuda_getCublasWorkspaceSize _cuda_getCurrentSolverHandle
        _cuda_resetCublasLtWorkspaceSize _cuda_resetCublasWorkspaceSize _cuda_setCublasLtWorkspaceSize
        _cuda_setCublasWorkspaceSize _distributed_c10d.NCCLXStub _distributed_c10d._register_external_nccl_comm
        _distributed_c10d._unregister_external_nccl_comm _get_blas_default_backend _get_cudnn_depthwise_kernel
        _set_cudnn_depthwise_kernel""",
    (2, 14): """
        _accelerator_getDefaultGenerator _cuda_annotateMemory _cuda_memoryMetadataSupported
        _cuda_tunableop_get_cublaslt_requested_algo_count _cuda_tunableop_set_cublaslt_requested_algo_count
        _cudnn_clear_dropout_state _distributed_c10d.ProcessGroupNCCL2 _distributed_c10d.ProcessGroupNCCLLazy
        _get_cublaslt_prefer_grouped_gemm _has_gds _set_cublaslt_prefer_grouped_gemm""",
    (2, 15): """
        _cuda_tunableop_clear_all _cuda_tunableop_pop_dynamic_dims_mask _cuda_tunableop_push_dynamic_dims_mask
        _cuda_tunableop_wildcard_fallback_enable _cuda_tunableop_wildcard_fallback_is_enabled
        _distributed_c10d._dump_fr_trace_file _distributed_c10d._reset_fr_trace _get_fa4_sdp_enabled
        _is_cudnn_attention_decode_disabled _set_sdp_use_fa4""",
}
UNTIL = {(2, 12): "_cuda_lock_mutex _cuda_unlock_mutex", (2, 14): "_CUDAGreenContext"}


def install(machine: Machine, patches: Patches) -> None:
    """Refuse the rows of REFUSED and, where PyTorch has no CUDA, of OF_CUDA_WHEELS. After all other modules, which answer."""
    for subject, cure, names in REFUSED:
        for name in names.split():
            _refuse(name, f"{subject} not modelled on virtual GPUs: {cure}", patches)
    for name in () if _compat.built_with_cuda else OF_CUDA_WHEELS.split():
        if not hasattr(_compat.C, name):
            sentence = f"this wheel of PyTorch has no torch._C.{name}: install one with CUDA, or leave the call out"
            _refuse(name, sentence, patches)


def lacking(version: tuple[int, int]) -> set[str]:
    """The names that a wheel with CUDA of that version of PyTorch, (2, 15), does not have."""
    later = [names for first, names in SINCE.items() if version < first]
    return {
        name for names in later + [names for end, names in UNTIL.items() if version >= end] for name in names.split()
    }


def locate(name: str) -> tuple[object, str]:
    """(owner, attribute) of a row's name; the owner is None where this PyTorch has no such module or class."""
    path = name.split(".") if name.startswith("torch.") else ["torch", "_C", *name.split(".")]
    owner = torch
    for step in path[1:-1]:
        owner = getattr(owner, step, None)
    return owner, path[-1]


def _refuse(name: str, sentence: str, patches: Patches) -> None:
    owner, attribute = locate(name)
    if hasattr(owner, attribute):  # other modules may have imported it by name
        patches.replace_everywhere(owner, attribute, refusing(sentence, getattr(owner, attribute)))
    elif owner is _compat.C and not _compat.built_with_cuda and name not in lacking(_compat.VERSION):
        patches.add(owner, attribute, refusing(sentence))


def refusing(sentence: str, original=None):
    """What raises NotImplementedError in the place of `original`; a class stays a class, for isinstance."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(sentence)

    if not isinstance(original, type):
        return functools.wraps(original)(refuse) if inspect.isfunction(original) else refuse
    made = [
        key
        for key in dir(original)
        if not key.startswith("__") and isinstance(inspect.getattr_static(original, key), (staticmethod, classmethod))
    ]
    members = {"__new__": refuse, "__init__": refuse, "__module__": original.__module__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (original,), members | {key: staticmethod(refuse) for key in made})
