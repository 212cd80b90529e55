"""The sizes of cuBLAS's workspaces, as torch.backends.cuda.cublas_workspace_size tells and sets them.

The figures are those of CUDABlas's CublasHandlePool.cpp: 32 MiB for Hopper and Blackwell, 8.125 MiB for older cards, and 1 MiB for
cuBLASLt. CUBLAS_WORKSPACE_CONFIG (":4096:2:16:8", in KiB) and CUBLASLT_WORKSPACE_SIZE (KiB) override them, and a program both.
"""

import os
import re

import torch

from virtualgpu.engine.machine import Machine
from virtualgpu.patches.registry import Patches

MIB = 1 << 20


def install(machine: Machine, patches: Patches) -> None:
    """Answer the C functions behind torch.backends.cuda.cublas_workspace_size, and those that make handles."""
    chosen: dict[str, int] = {}  # bytes, by library

    def default() -> int:
        pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if pairs:
            return sum(int(size) * int(count) for size, count in pairs) << 10
        return 32 * MIB if machine.gpu(None).spec.capability >= (9, 0) else 8 * MIB + MIB // 8

    def default_lt() -> int:
        size = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
        return int(size) << 10 if size.isdigit() else MIB

    for library, of_library in (("Cublas", default), ("CublasLt", default_lt)):

        def set_size(size: int, library=library) -> None:
            if size < 0:
                raise RuntimeError(f"the size of {library}'s workspace must not be negative, got {size}")
            chosen[library] = size

        def get_size(library=library, of_library=of_library) -> int:
            return chosen[library] if library in chosen else of_library()

        def reset_size(library=library) -> None:
            chosen.pop(library, None)

        patches.add(torch._C, f"_cuda_get{library}WorkspaceSize", get_size)
        patches.add(torch._C, f"_cuda_set{library}WorkspaceSize", set_size)
        patches.add(torch._C, f"_cuda_reset{library}WorkspaceSize", reset_size)
    patches.add(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    for name in ("_cuda_getCurrentBlasHandle", "_cuda_getCurrentSolverHandle"):
        patches.add(torch._C, name, lambda: 0)  # no address; compiled extensions, which could use one, do not run
