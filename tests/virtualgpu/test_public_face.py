"""Every public function for GPUs, called on virtual ones: an answer, or an error of Python that says what is the matter.

Never a word of the driver, which is not there, never an AttributeError and never the end of the process: so they are called in a
process of their own. A new function that needs arguments needs a line in `arguments`.
"""

import importlib
import inspect
import json
import os
import re
import sys
import warnings

import pytest
import torch

import virtualgpu
from tests import forks

MODULES = """torch.cuda torch.cuda.memory torch.cuda.random torch.cuda.streams torch.cuda.nccl torch.cuda.comm torch.cuda.graphs
    torch.cuda.graph_annotations torch.cuda.green_contexts torch.cuda.gds torch.cuda.jiterator torch.cuda.tunable
    torch.cuda.nvtx torch.cuda.profiler torch.cuda.sparse torch.cuda.amp torch.accelerator torch.accelerator.memory
    torch.accelerator.graphs torch.backends.cuda torch.backends.cudnn torch.backends.cusparselt"""
OF_THE_DRIVER = re.compile(
    r"driver|libcuda|nvml|cuda error|insufficient|cannot open shared|internal assert", re.IGNORECASE
)


def arguments(file: str) -> dict[str, tuple]:
    """{the function: its arguments}, where it needs some, or where those that it has would change what is walked through."""
    there, other = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")
    stream = torch.cuda.Stream()
    attention = torch.backends.cuda.SDPAParams(*[torch.ones(1, 2, 8, 16)] * 3, None, 0.0, False, False)

    class Allocator:
        def allocator(self):
            """Nothing."""

    values = {
        "torch.backends.cuda": {
            "SDPAParams": (*[torch.ones(1, 2, 8, 16, device="cuda")] * 3, None, 0.0, False, False),
            "cuFFTPlanCache": (0,),
            "cuFFTPlanCacheAttrContextProp": (None, None),
        }
        | {f"can_use_{kind}_attention": (attention,) for kind in ("cudnn", "efficient", "flash")}
        | {f"enable_{kind}_sdp": (True,) for kind in ("cudnn", "flash", "math", "mem_efficient")}
        | {"allow_fp16_bf16_reduction_math_sdp": (False,)},
        "torch.backends.cudnn": {"is_acceptable": (there,)},
        "torch.cuda": {
            "CUDAPluggableAllocator": ("lib.so", "allocate", "free"),
            "CudaError": (2,),
            "ExternalStream": (0,),
            "StreamContext": (stream,),
            "caching_allocator_alloc": (512,),
            "caching_allocator_delete": (0,),
            "can_device_access_peer": (0, 1),
            "change_current_allocator": (Allocator(),),
            "check_error": (0,),
            "device": (1,),
            "device_of": (other,),
            "export_dot": (file,),
            "export_graph_data": (file,),
            "get_stream_from_external": (0,),
            "make_graphed_callables": (torch.nn.Linear(2, 2), (there,)),
            "manual_seed": (0,),
            "manual_seed_all": (0,),
            "set_device": (0,),
            "set_per_process_memory_fraction": (1.0,),
            "set_rng_state": (torch.cuda.get_rng_state(),),
            "set_rng_state_all": (torch.cuda.get_rng_state_all(),),
            "set_stream": (torch.cuda.current_stream(),),
            "set_sync_debug_mode": (0,),
            "stream": (stream,),
            "use_mem_pool": (torch.cuda.MemPool(),),
            "graph": (None,),
        },
        "torch.cuda.amp": {"custom_bwd": (print,)},
        "torch.cuda.comm": {
            "broadcast": (there, [0, 1]),
            "broadcast_coalesced": ([there], [0, 1]),
            "reduce_add": ([there, other],),
            "reduce_add_coalesced": ([[there], [other]],),
            "scatter": (there, [0, 1]),
            "gather": ([there, other],),
        },
        "torch.cuda.gds": {
            "GdsFile": (file, os.O_RDWR),
            "gds_deregister_buffer": (there.untyped_storage(),),
            "gds_register_buffer": (there.untyped_storage(),),
        },
        "torch.cuda.graph_annotations": {"dump_kernel_py_stacks": (file,), "mark_kernels": ("name",)},
        "torch.cuda.graphs": {
            f"register_graph_{when}_hook": (print,)
            for when in ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy")
        },
        "torch.cuda.green_contexts": {"SMPartition": (None, 0)},
        "torch.cuda.nccl": {
            "all_gather": ([there, other], [torch.ones(8, device="cuda:0"), torch.ones(8, device="cuda:1")]),
            "all_reduce": ([there, other],),
            "broadcast": ([there, other],),
            "init_rank": (1, b"x" * 128, 0),
            "is_available": ([there, other],),
            "reduce": ([there, other],),
            "reduce_scatter": ([there, other], [there[:2], other[:2]]),
        },
        "torch.cuda.nvtx": {
            "mark": ("here",),
            "range": ("here",),
            "range_end": (0,),
            "range_push": ("here",),
            "range_start": ("here",),
        },
        "torch.cuda.tunable": {
            "dynamic_dims_mask": (),
            "mgpu_tune_gemm_in_file": (file, 1),
            "set_cublaslt_requested_algo_count": (8,),
            "set_filename": (file,),
            "set_max_tuning_duration": (30,),
            "set_max_tuning_iterations": (100,),
            "set_numerical_check_tolerances": (False,),
            "set_rotating_buffer_size": (0,),
            "tune_gemm_in_file": (file,),
            "enable": (False,),
            "tuning_enable": (False,),
            "record_untuned_enable": (False,),
            "read_file": (file,),
        },
        "torch.accelerator": {
            "device_index": (1,),
            "set_device_idx": (0,),
            "set_device_index": (0,),
            "set_stream": (torch.cuda.current_stream(),),
        },
    }
    return {f"{module}.{name}": args for module, names in values.items() for name, args in names.items()}


def more() -> dict[str, object]:
    """What the functions do not reach: attributes, and functions that others make."""
    backends, tensor = torch.backends, torch.ones(2, device="cuda")
    switches = ["enabled", "deterministic", "benchmark", "benchmark_limit", "allow_tf32", "fp32_precision"]
    reads = {f"torch.backends.cudnn.{name}": lambda name=name: getattr(backends.cudnn, name, None) for name in switches}
    products = [name for name in dir(type(backends.cuda.matmul)) if name.startswith(("allow", "fp32"))]
    reads |= {f"matmul.{name}": lambda name=name: getattr(backends.cuda.matmul, name) for name in products}
    code, make = "template <typename T> T twice(T x) { return x + x; }", torch.cuda.jiterator._create_jit_fn
    return reads | {
        "cufft_plan_cache.size": lambda: backends.cuda.cufft_plan_cache.size,
        "cufft_plan_cache[1].max_size": lambda: backends.cuda.cufft_plan_cache[1].max_size,
        "cufft_plan_cache.clear": lambda: backends.cuda.cufft_plan_cache.clear(),
        "a jitted function": lambda: make(code)(tensor),
        "torch.cuda._compile_kernel": lambda: torch.cuda._compile_kernel("__global__ void f() {}", "f"),
        "Event.from_ipc_handle": lambda: torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), b"x" * 64),
        "_get_current_allocator": lambda: torch.cuda.memory._get_current_allocator(),
        "is_nvshmem_available": lambda: importlib.import_module(
            "torch.distributed._symmetric_memory"
        ).is_nvshmem_available(),
    }


def public() -> dict[str, object]:
    """{full name: function or class} that the modules define for GPUs, each once."""
    homes = ("torch.cuda", "torch.accelerator", "torch.backends.cu", "torch.nn.parallel.comm", "torch._C", "virtualgpu")
    calls, seen = {}, set()
    for module in MODULES.split():
        try:
            names = vars(importlib.import_module(module))
        except ImportError:
            continue  # an older version
        for name, value in sorted(names.items()):
            home = getattr(value, "__module__", None) or ""
            if callable(value) and home.startswith(homes) and not name.startswith("_") and id(value) not in seen:
                seen.add(id(value))
                calls[f"{module}.{name}"] = value
    return calls


def needs_arguments(call) -> bool:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def walk(file: str) -> None:
    """Call them all; print a line before each, and after one that fails: [name, the error's class, its words]."""
    warnings.simplefilter("ignore")
    virtualgpu.gpus(2)
    args, calls = arguments(file), public()
    for name, call in {**calls, **more()}.items():
        print(json.dumps([name]), flush=True)
        if name in calls and name not in args and needs_arguments(call):
            print(json.dumps([name, "LookupError", "give it a line in arguments()"]), flush=True)
            continue
        try:
            call(*args.get(name, ()))
        except BaseException as error:
            print(json.dumps([name, type(error).__name__, str(error)]), flush=True)


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """{the name of what failed: (the error's class, its words)}"""
    file = tmp_path_factory.mktemp("face") / "file"
    file.touch()
    environment = {**forks.environment(), "HELPERS_GPUS": "virtual"}
    done = forks.run("-m", "tests.virtualgpu.test_public_face", file, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert done.returncode == 0, f"the process ended with {done.returncode} in {lines[-1:]}: {done.stderr[-2000:]}"
    assert len({line[0] for line in lines}) > 150
    return {line[0]: (line[1], line[2]) for line in lines if len(line) == 3}


def test_no_function_speaks_of_the_driver(errors):
    assert {name: error for name, error in errors.items() if OF_THE_DRIVER.search(error[1])} == {}


def test_no_function_fails_without_a_sentence(errors):
    unclear = {"AttributeError", "LookupError", "SystemError", "OSError"}
    assert {name: error for name, error in errors.items() if error[0] in unclear} == {}


if __name__ == "__main__":
    walk(sys.argv[1])
