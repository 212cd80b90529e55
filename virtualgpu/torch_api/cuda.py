"""The driver as PyTorch's own Python sees it: the C functions below torch.cuda, torch.accelerator and torch.backends.cuda."""

import ctypes
import os
from collections.abc import Callable

import torch

from virtualgpu import _compat
from virtualgpu.engine.frames import warn_at_the_program
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import gpu_of
from virtualgpu.errors import forked, no_gpus, of_real_gpu
from virtualgpu.torch_api import nvml, streams
from virtualgpu.torch_api.patches import Patches, standing_in

# -- cuBLAS's handles and workspaces: the C functions below torch.backends.cuda and torch.cuda.current_blas_handle.


def _install_blas(machine: Machine, patches: Patches) -> None:
    workspaces = machine.workspaces

    def handle() -> int:
        """No handle, as there is no cuBLAS. Where handles keep their workspaces, whoever asks for one takes its workspace."""
        gpu = machine.expect_gpu()
        if workspaces.keeps and gpu.memory.context:
            workspaces.keep(gpu)
        return 0

    def prefer(library) -> None:
        """torch.backends.cuda.preferred_blas_library: cuBLAS or cuBLASLt."""
        _compat.prefer_blas(library)
        workspaces.prefer(_compat.preferred_blas())

    answers: dict[str, Callable] = {
        "_set_blas_preferred_backend": prefer,
        "_cuda_getCurrentBlasHandle": handle,
        "_cuda_clearCublasWorkspaces": lambda: workspaces.clear(machine.gpus),
    }
    if _compat.SETS_WORKSPACES:  # from PyTorch 2.13 on
        answers |= {
            "_cuda_getCublasWorkspaceSize": lambda: workspaces.size(machine.expect_gpu()),
            "_cuda_setCublasWorkspaceSize": lambda nbytes: workspaces.set_size(_checked_size("cublas", nbytes)),
            "_cuda_resetCublasWorkspaceSize": lambda: workspaces.set_size(None),
            "_cuda_getCublasLtWorkspaceSize": lambda: workspaces.lt_size(machine.expect_gpu()),
            "_cuda_setCublasLtWorkspaceSize": lambda nbytes: workspaces.set_lt_size(_checked_size("cublaslt", nbytes)),
            "_cuda_resetCublasLtWorkspaceSize": lambda: workspaces.set_lt_size(None),
            "_cuda_getCurrentSolverHandle": lambda: 0,
        }
    for name, answer in answers.items():
        patches.add(_compat.C, name, answer)


def _checked_size(library: str, nbytes: int) -> int:
    if not isinstance(nbytes, int):
        raise RuntimeError(f"set {library} workspace size expects an int, but got {type(nbytes).__name__}")
    if nbytes < 0:
        raise RuntimeError(f"{library} workspace size must be non-negative, got {nbytes}")
    return nbytes


# -- The driver as PyTorch's own Python sees it: the functions of C++ below torch.cuda and torch.accelerator.
#
# torch.cuda's Python code stays as it is; what it calls (`torch._C._cuda_getDeviceCount` and its kind) is answered here. A wheel
# without CUDA lacks those names: they are added. What is not modelled is refused by `surface`.


# What a wheel without CUDA says: the default wheel of PyTorch 2.11 has these (2.11.0+cu130 on PyPI)
CUDA_VERSION, CUDNN_VERSION, NCCL_VERSION = "13.0", 91900, (2, 28, 9)


def _install_driver(machine: Machine, patches: Patches) -> None:
    driver, cuda = Driver(machine), torch.cuda
    for names, answer in driver.answers().items():
        for name in names.split():
            patches.add(_compat.C, name, answer)
    for name in ("_exchange_device", "_maybe_exchange_device"):  # torch.cuda bound C's when it was imported
        patches.replace(cuda, name, driver.exchange_device)
    cudart, nvtx = Cudart(driver), _Nvtx()
    patches.add(_compat.C, "_cudart", cudart)
    patches.add(_compat.C, "_nvtx", nvtx)
    patches.replace(cuda, "_cudart", cudart)
    patches.replace(cuda.nvtx, "_nvtx", nvtx)
    patches.add(_compat.C, "_CudaDeviceProperties", DeviceProperties)
    patches.replace(cuda, "_CudaDeviceProperties", DeviceProperties)
    patches.replace(cuda, "_lazy_init", driver.lazy_init)
    patches.set(cuda, "_initialized", machine.initialized)
    patches.replace(cuda, "_is_in_bad_fork", lambda: machine.forked)
    patches.set(cuda, "_cached_device_count", None)
    patches.replace_everywhere(cuda, "is_available", lambda: bool(machine.look()))
    patches.replace_everywhere(cuda, "device_count", lambda: len(machine.look()))
    patches.add(cuda, "_get_device_properties", lambda device: DeviceProperties(machine.expect_gpu(device)))
    patches.replace(cuda, "is_bf16_supported", driver.is_bf16_supported)
    patches.replace(cuda, "get_arch_list", driver.arch_list)
    patches.replace(torch.backends.cuda, "is_built", lambda: True)
    # PyTorch 2.11 would make a tensor on a real GPU in it
    patches.replace(_compat.fake_tensor, "init_gpu_context", lambda device: None)
    if torch.version.cuda is None:
        _of_a_wheel_with_cuda(patches)
    if hasattr(cuda.graphs, "_cuda_isCurrentStreamCapturing"):
        patches.replace(cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    if hasattr(cuda.green_contexts, "_get_driver_version"):  # no card has domains before CUDA 13.4
        patches.replace(cuda.green_contexts, "_get_driver_version", lambda: nvml.CUDA)
    patches.set(_compat.parallel_functions, "_streams", None)  # it keeps its streams; those of earlier GPUs have gone
    machine.call_on_first_use(driver.lazy_init)


def _of_a_wheel_with_cuda(patches: Patches) -> None:
    """The versions that programs print and check."""
    major, minor = CUDA_VERSION.split(".")
    compiled = 1000 * int(major) + 10 * int(minor)  # CUDA's own way to write a version
    patches.add(torch.version, "cuda", CUDA_VERSION)
    patches.add(_compat.C, "_cuda_getCompiledVersion", lambda: compiled)
    patches.replace(torch.backends.cudnn, "is_available", lambda: True)
    patches.replace(torch.backends.cudnn, "version", lambda: CUDNN_VERSION)
    if not hasattr(_compat.C, "_nccl_version"):
        nccl = NCCL_VERSION[0] << 32 | NCCL_VERSION[1] << 16 | NCCL_VERSION[2]
        patches.add(_compat.C, "_nccl_version", lambda: nccl)
        patches.add(_compat.C, "_nccl_version_suffix", lambda: b"")


class Driver:
    """What C++ would ask CUDA. A device is an index, a name, a torch.device or None for the current one."""

    def __init__(self, machine: Machine):
        self.machine, self.clock, self.local = machine, machine.clock, machine.local
        self.sync_debug_mode = 0

    def answers(self) -> dict[str, Callable]:
        """{names in torch._C: what answers}."""
        return {
            "_cuda_getDeviceCount _accelerator_hooks_device_count": lambda: len(self.machine.look()),
            "_cuda_getDevice _accelerator_getDeviceIndex _accelerator_hooks_get_current_device": lambda: (
                self.local.current
            ),
            "_cuda_setDevice _accelerator_setDeviceIndex _accelerator_hooks_set_current_device": self.set_device,
            """_cuda_exchangeDevice _accelerator_exchangeDevice _accelerator_hooks_exchange_device
            _cuda_maybeExchangeDevice _accelerator_maybeExchangeDevice _accelerator_hooks_maybe_exchange_device""": (
                self.exchange_device
            ),
            "_get_accelerator _accelerator_getAccelerator": lambda check=None: torch.device("cuda"),
            "_accelerator_getDeviceCapability": self.capability,
            "_accelerator_synchronizeDevice": lambda device: self.clock.wait(self.machine.expect_gpu(device).index),
            "_cuda_synchronize": lambda: self.clock.wait(self.local.current),
            "_cuda_init _cuda_ipc_collect": lambda: None,
            "_cuda_isInBadFork": lambda: self.machine.forked,
            "_cuda_hasPrimaryContext": lambda device: self.machine.initialized,
            "_cuda_canDeviceAccessPeer": self.can_access_peer,
            "_cuda_getArchFlags": lambda: " ".join(self.arch_list()),
            "_cuda_sleep": self.sleep,
            "_cuda_get_sync_debug_mode": lambda: self.sync_debug_mode,
            "_cuda_set_sync_debug_mode": self.set_sync_debug_mode,
            "_cuda_isCurrentStreamCapturing": lambda: False,
            "_is_cudnn_attention_decode_disabled": self.cudnn_cannot_decode,
        }

    def lazy_init(self) -> None:
        """PyTorch's own asks the driver; here the generators are made, and what waited for them is called."""
        if self.machine.forked:
            raise forked()
        if not self.machine.look():
            raise no_gpus()
        if _compat.first_use_has_begun():
            return
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        with _compat.first_use() as waiting:
            self.machine.initialize()
            for call in waiting():  # torch.cuda.manual_seed before the first use of a GPU
                call()

    def set_device(self, device: int) -> None:
        """torch.cuda.set_device: the current GPU of this thread."""
        self.local.use_device(self.machine.expect_gpu(int(device)).index)

    def exchange_device(self, device: int) -> int:
        """Make it current; returns the index of the one before. A negative one changes nothing, and returns -1."""
        before = self.local.current
        if device < 0:
            return -1
        if device != before:
            self.set_device(device)
        return before

    def can_access_peer(self, device: int, peer: int) -> bool:
        """torch.cuda.can_device_access_peer: where both cards' `peer_access` allow it. False for a GPU and itself."""
        one, other = self.machine.expect_gpu(device), self.machine.expect_gpu(peer)
        return one is not other and one.spec.peer_access and other.spec.peer_access

    def arch_list(self) -> list[str]:
        """torch.cuda.get_arch_list: here the capabilities of the GPUs there are ("sm_75"), not those of a wheel."""
        return sorted({"sm_{}{}".format(*gpu.spec.capability) for gpu in self.machine.gpus})

    def sleep(self, cycles: int) -> None:
        """A kernel of one thread, which does nothing for so many cycles."""
        gpu = self.machine.expect_gpu()
        with self.clock.ours():
            self.clock.spin(gpu.index, gpu.kernels.took(cycles), "sleep")

    def set_sync_debug_mode(self, mode: int) -> None:
        """1: a warning, 2: an error where the host waits for a stream to go on. Waiting that is asked for by its name
        (torch.cuda.synchronize, Event.synchronize) stays without a word."""
        self.sync_debug_mode = mode
        self.clock.set(before_wait=self._say_waiting if mode else None)

    def _say_waiting(self) -> None:
        if self.sync_debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        warn_at_the_program("called a synchronizing CUDA operation")

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """torch.cuda.is_bf16_supported: True, since cards emulate it; without that, from capability 8.0 on. False without a GPU."""
        if not self.machine.look():
            return False
        return including_emulation or self.machine.expect_gpu().spec.capability >= (8, 0)

    def capability(self, device: int) -> dict:
        """torch.accelerator.get_device_capability: all types, as PyTorch says of every card."""
        self.machine.expect_gpu(device)
        return {"supported_dtypes": {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}}

    def cudnn_cannot_decode(self) -> bool:
        """Attention of one query by cuDNN: PyTorch leaves it out on Blackwell for these versions of cuDNN (its MHA.cpp)."""
        version = torch.backends.cudnn.version() or 0
        return (
            self.machine.expect_gpu().spec.capability[0] in (10, 11) and 91900 <= version <= 92500 and version != 92401
        )


class DeviceProperties:
    """torch.cuda.get_device_properties: of the card's data sheet, under PyTorch's names."""

    def __init__(self, gpu: GPU):
        spec = gpu.spec
        self.name = spec.name
        self.major, self.minor = spec.capability
        self.total_memory = spec.memory
        self.multi_processor_count = spec.processors
        self.is_multi_gpu_board = self.is_integrated = False
        self.warp_size = 32
        self.uuid = gpu.uuid
        self.pci_domain_id, self.pci_bus_id, self.pci_device_id = 0, gpu.physical + 1, 0
        for name in CARD.split():
            value = getattr(spec, name, None)
            if value is not None:
                setattr(self, name, value)

    def __eq__(self, other) -> bool:
        return isinstance(other, DeviceProperties) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // (1 << 20)}MB, multi_processor_count={self.multi_processor_count}, uuid={self.uuid})"
        )

    def __getattr__(self, name: str):
        raise AttributeError(f"{self.name}, virtual, does not say its {name!r}: give it in a Spec of your own")


CARD = """
    L2_cache_size clock_rate max_threads_per_multi_processor memory_bus_width memory_clock_rate regs_per_multiprocessor
    shared_memory_per_block shared_memory_per_block_optin shared_memory_per_multiprocessor max_threads_per_block"""


class Cudart:
    """torch.cuda.cudart(): those calls of the CUDA runtime that programs make."""

    class cudaError(int):
        success = 0

    def __init__(self, driver: Driver):
        self.driver = driver

    def cudaMemGetInfo(self, device=None) -> tuple[int, int]:
        """Bytes that are free, and all of the GPU's. Raises CUDA's error after a kernel's assert."""
        gpu = self.driver.machine.expect_gpu(device)
        self.driver.clock.check(gpu.index)
        memory = gpu.settled()
        return memory.free_on_gpu, memory.capacity

    def cudaGetErrorString(self, error: int) -> str:
        """CUDA's words for 0, 2 and 100; for any other, its number."""
        return {0: "no error", 2: "out of memory", 100: "no CUDA-capable device is detected"}.get(
            error, f"error {error}"
        )

    def cudaStreamCreate(self, pointer: int) -> int:
        """Writes the handle of a new stream to that address of the host."""
        queue = self.driver.clock.new_stream(self.driver.local.current)
        ctypes.c_ulonglong.from_address(pointer).value = streams.handle(queue)
        return 0

    def cudaDeviceSynchronize(self) -> int:
        """The host waits for the current GPU. Returns 0, or raises CUDA's error after a kernel's assert."""
        self.driver.clock.wait(self.driver.local.current)
        return 0

    # 0, for success, and nothing else: a stream stays, memory does not count as pinned, and there is no profiler
    cudaStreamDestroy = cudaHostRegister = cudaHostUnregister = staticmethod(lambda *_: 0)
    cudaProfilerStart = cudaProfilerStop = staticmethod(lambda: 0)


class _Nvtx:
    """Ranges for a profiler that is not there."""

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: 0


# -- Where real GPUs work as well, C++ would ask their driver: what of that is refused while virtual ones are on.
#
# Real GPUs are hidden, not gone: `engine.dispatch.DispatchBesideReal` has tensors that lie on one, `torch_api.construct` what C++ makes
# with a device of its own. A process that never wants them back hides them from C++ as well (`_compat.hide_real_gpus`).


def _install_beside_real(machine: Machine, patches: Patches) -> None:
    if not machine.real_gpus:
        return
    for name in ("record", "wait"):  # of events of before
        patches.replace(torch.cuda.Event, name, _refuse_event)
    patches.wrap(torch.Tensor, "__cuda_array_interface__", _array_interface)
    kind = _compat.fake_tensor.FakeTensor
    patches.replace(kind, "__new__", staticmethod(standing_in(kind.__new__, _fake_tensor, machine.real_gpus)))


def _refuse_event(*_, **__):
    raise of_real_gpu("event")


def _array_interface(original: property) -> property:
    """Without a driver nobody could follow the address; with one, a kernel that does ends the process's use of the real GPU."""

    def interface(tensor):
        if gpu_of(tensor) is None:
            return original.__get__(tensor)
        raise AttributeError(
            "kernels of other libraries run on a real GPU, and cannot reach the memory of a virtual one: give them tensor.cpu()"
        )

    return property(interface)


def _fake_tensor(real_gpus: int, original, cls, *args, **kwargs):
    """Of a fake tensor that says cuda, C++ asks the driver for that device, and ends the process where there are fewer."""
    for value in (*args, *kwargs.values()):
        device = _compat.Device(value) if isinstance(value, str) else value
        if isinstance(device, _compat.Device) and device.type == "cuda" and (device.index or 0) >= real_gpus:
            raise NotImplementedError(
                f"torch.export and other users of fake tensors find {real_gpus} real GPU{'s' * (real_gpus > 1)} here, and no {device}: "
                'hide the real by CUDA_VISIBLE_DEVICES="" in front of the program, or run it by python -m virtualgpu'
            )
    return original(cls, *args, **kwargs)


def install(machine: Machine, patches: Patches) -> None:
    """All of this file's stand-ins. Before `streams`, whose events are not those of before."""
    _install_beside_real(machine, patches)
    _install_blas(machine, patches)
    _install_driver(machine, patches)
