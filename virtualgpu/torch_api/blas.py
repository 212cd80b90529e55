"""cuBLAS's handles and workspaces: the C functions below torch.backends.cuda and torch.cuda.current_blas_handle."""

from collections.abc import Callable

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Answer them; those that set a size are there from PyTorch 2.13 on."""
    blas, workspaces = Blas(machine), machine.workspaces
    answers: dict[str, Callable] = {
        "_set_blas_preferred_backend": blas.prefer,
        "_cuda_getCurrentBlasHandle": blas.handle,
        "_cuda_clearCublasWorkspaces": lambda: workspaces.clear(machine.gpus),
    }
    if _compat.SETS_WORKSPACES:
        answers |= {
            "_cuda_getCublasWorkspaceSize": lambda: workspaces.size(machine.gpu(None)),
            "_cuda_setCublasWorkspaceSize": lambda nbytes: workspaces.set_size(checked("cublas", nbytes)),
            "_cuda_resetCublasWorkspaceSize": lambda: workspaces.set_size(None),
            "_cuda_getCublasLtWorkspaceSize": lambda: workspaces.lt_size(machine.gpu(None)),
            "_cuda_setCublasLtWorkspaceSize": lambda nbytes: workspaces.set_lt_size(checked("cublaslt", nbytes)),
            "_cuda_resetCublasLtWorkspaceSize": lambda: workspaces.set_lt_size(None),
            "_cuda_getCurrentSolverHandle": lambda: 0,
        }
    for name, answer in answers.items():
        patches.add(_compat.C, name, answer)


class Blas:
    """What has to do with the handles of cuBLAS."""

    def __init__(self, machine: Machine):
        self.machine, self.workspaces = machine, machine.workspaces

    def handle(self) -> int:
        """No handle, as there is no cuBLAS. Where handles keep their workspaces, whoever asks for one takes its workspace."""
        gpu = self.machine.gpu(None)
        if self.workspaces.keeps and gpu.memory.context:
            self.workspaces.keep(gpu)
        return 0

    def prefer(self, library) -> None:
        """torch.backends.cuda.preferred_blas_library: cuBLAS or cuBLASLt."""
        _compat.prefer_blas(library)
        self.workspaces.prefer(_compat.preferred_blas())


def checked(library: str, nbytes: int) -> int:
    """The size of a workspace. Raises RuntimeError for what is none."""
    if not isinstance(nbytes, int):
        raise RuntimeError(f"set {library} workspace size expects an int, but got {type(nbytes).__name__}")
    if nbytes < 0:
        raise RuntimeError(f"{library} workspace size must be non-negative, got {nbytes}")
    return nbytes
