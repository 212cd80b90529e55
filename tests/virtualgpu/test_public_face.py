"""Every public function for GPUs, called on virtual ones: an answer, or an error of Python that says what is the matter.

Never a word of the driver, which is not there, never an AttributeError and never the end of the process: so they are called in a
process of their own. A new function that needs arguments needs a line in public_face.toml.
"""

import importlib
import inspect
import json
import re
import sys
import tomllib
import warnings
from pathlib import Path

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


class Allocator:
    def allocator(self):
        """Nothing."""


def arguments(file: str) -> dict[str, tuple]:
    """{the function: its arguments}"""
    names = {
        "torch": torch,
        "file": file,
        "Allocator": Allocator,
        "stream": torch.cuda.Stream(),
        "q": torch.ones(1, 2, 8, 16, device="cuda"),
        "there": torch.ones(4, device="cuda:0"),
        "other": torch.ones(4, device="cuda:1"),
        "attention": torch.backends.cuda.SDPAParams(*[torch.ones(1, 2, 8, 16)] * 3, None, 0.0, False, False),
    }
    table = tomllib.loads(Path(__file__).with_name("public_face.toml").read_text("utf-8"))
    return {
        f"{module}.{name}": eval(f"({args})", names) for module, rows in table.items() for name, args in rows.items()
    }


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
            print(json.dumps([name, "LookupError", "give it a line in public_face.toml"]), flush=True)
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


def test_no_function_speaks_of_the_driver_or_fails_without_a_sentence(errors):
    unclear = {"AttributeError", "LookupError", "SystemError", "OSError"}
    assert {name: error for name, error in errors.items() if OF_THE_DRIVER.search(error[1])} == {}
    assert {name: error for name, error in errors.items() if error[0] in unclear} == {}


if __name__ == "__main__":
    walk(sys.argv[1])
