"""cuBLAS's handles and workspaces: the C functions below torch.backends.cuda and torch.cuda.current_blas_handle."""

from collections.abc import Callable

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Answer them; those that set a size are there from PyTorch 2.13 on."""
    workspaces = machine.workspaces

    def current_handle() -> int:
        """No handle, as there is no cuBLAS. Where handles keep their workspaces, whoever asks for one takes its workspace."""
        gpu = machine.gpu(None)
        if workspaces.keeps and gpu.memory.context:
            workspaces.keep(gpu)
        return 0

    def size(read: Callable) -> Callable:
        return lambda: read(machine.gpu(None))

    def setter(name: str, put: Callable) -> Callable:
        def set_size(nbytes: int) -> None:
            if not isinstance(nbytes, int):
                raise RuntimeError(f"set {name} workspace size expects an int, but got {type(nbytes).__name__}")
            if nbytes < 0:
                raise RuntimeError(f"{name} workspace size must be non-negative, got {nbytes}")
            put(nbytes)

        return set_size

    prefer = _compat.prefer_blas

    def prefer_library(library) -> None:
        prefer(library)
        workspaces.prefer(_compat.preferred_blas())

    answers = {
        "_set_blas_preferred_backend": prefer_library,
        "_cuda_getCurrentBlasHandle": current_handle,
        "_cuda_clearCublasWorkspaces": lambda: workspaces.clear(machine.gpus),
    }
    if _compat.SETS_WORKSPACES:
        answers |= {
            "_cuda_getCublasWorkspaceSize": size(workspaces.size),
            "_cuda_setCublasWorkspaceSize": setter("cublas", workspaces.set_size),
            "_cuda_resetCublasWorkspaceSize": lambda: workspaces.set_size(None),
            "_cuda_getCublasLtWorkspaceSize": size(workspaces.lt_size),
            "_cuda_setCublasLtWorkspaceSize": setter("cublaslt", workspaces.set_lt_size),
            "_cuda_resetCublasLtWorkspaceSize": lambda: workspaces.set_lt_size(None),
            "_cuda_getCurrentSolverHandle": lambda: 0,
        }
    for name, answer in answers.items():
        patches.add(torch._C, name, answer)
