"""NVIDIA's management library (NVML), as nvidia-ml-py's `pynvml` and the copies of it know it, for the virtual GPUs.

`pynvml` finds each C function by name in the driver's library. Here a `Library` stands in that library's place, so that all of
pynvml's own Python (structures, versions, errors) runs unchanged, and so does what is built on it (nvitop, Ray, PyTorch's
`torch.cuda.utilization`). What a virtual GPU does not have (temperature, power, fans, ...) answers NVML_ERROR_NOT_SUPPORTED.

Memory counts as `nvidia-smi` counts it: the contexts and the segments of all processes. Utilization is the share of simulated
time in which kernels ran since this process last asked; a kernel reads or writes memory for as long as it lasts, so the
figure for memory is the same.
"""

import ctypes
import functools
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

from virtualgpu import environment
from virtualgpu.memory.ledger import PLAYED_PID, Board, share

if TYPE_CHECKING:
    from virtualgpu.engine.machine import Machine
    from virtualgpu.torch_api.patches import Patches

# nvml.h, nvmlReturn_t
SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 0, 1, 2, 3, 6, 7
WORDS = {
    0: b"Success",
    1: b"Uninitialized",
    2: b"Invalid Argument",
    3: b"Not Supported",
    6: b"Not Found",
    7: b"Insufficient Size",
}
# The first driver that runs every CUDA 13 (CUDA Toolkit 13.0 release notes, table 2), and the CUDA it reports: 1000 * major.
DRIVER, CUDA = "580.65.06", 13000


def of_the_runner() -> "Library":
    """The library for a process that the runner's program started: it sees what every process holds."""
    return Library(Board(environment.settings()))


def install(machine: "Machine", patches: "Patches") -> None:
    """Let each pynvml that is imported already ask this machine, unless the runner's hook was there before."""
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[2] not in ("pynvml", "nvml", "py3nvml") or "_nvmlGetFunctionPointer" not in vars(
            module
        ):
            continue
        if vars(module).get("nvmlLib") is None or isinstance(module.nvmlLib, ctypes.CDLL):
            patches.replace(module, "nvmlLib", Library(_OfMachine(machine)))
            if "_nvmlGetFunctionPointer_cache" in vars(module):
                patches.replace(module, "_nvmlGetFunctionPointer_cache", {})


class _OfMachine:
    """The virtual GPUs of this process alone, where there is no runner: as `Board`."""

    def __init__(self, machine: "Machine"):
        self.machine = machine
        specs = [gpu.spec for gpu in machine.gpus]
        self.cards = [environment.Card(spec.name, spec.name, spec.memory, spec.capability) for spec in specs]

    def processes(self, gpu: int) -> list[tuple[int, int]]:
        memory = self.machine.gpus[gpu].settled()
        own = memory.host_pid or os.getpid(), memory.reserved + memory.context
        held = [*memory.processes(), (PLAYED_PID, memory.occupied), own]
        return [(pid, used) for pid, used in held if used]

    def busy(self, gpu: int) -> tuple[float, float]:
        clock = self.machine.clock
        return clock.busy[gpu], clock.latest()


class Library:
    """Where `pynvml` expects a ctypes.CDLL: its attributes are NVML's C functions. `board`: a `ledger.Board`, or alike."""

    def __init__(self, board: Any):
        self._board = board
        self._users = 0  # nvmlInit less nvmlShutdown
        self._asked: dict[int, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return functools.partial(self._call, re.sub(r"_v\d+$", "", name))  # a partial: pynvml sets its restype

    def _call(self, name: str, *arguments):
        if name == "nvmlErrorString":
            return WORDS.get(getattr(arguments[0], "value", arguments[0]), b"Unknown Error")
        with self._lock:
            if name in ("nvmlInit", "nvmlInitWithFlags"):
                self._users += 1
                return SUCCESS
            if not self._users:
                return UNINITIALIZED
            if name == "nvmlShutdown":
                self._users -= 1
                return SUCCESS
            answer = SYSTEM.get(name)
            if answer is not None:
                return answer(self._board, *arguments)
            answer = DEVICE.get(name)
            if answer is None:
                return NOT_SUPPORTED
            gpu = (ctypes.cast(arguments[0], ctypes.c_void_p).value or 0) - 1
            if not 0 <= gpu < len(self._board.cards):
                return INVALID_ARGUMENT
            if name == "nvmlDeviceGetUtilizationRates":
                return self._utilization(gpu, *arguments[1:])
            return answer(self._board, gpu, *arguments[1:])

    def _utilization(self, gpu: int, rates) -> int:
        now = self._board.busy(gpu)
        busy = share(now, self._asked.get(gpu, (0.0, 0.0)))
        self._asked[gpu] = now
        rates = _target(rates)
        rates.gpu = rates.memory = round(100 * busy)
        return SUCCESS


def _target(pointer):
    """What byref() points to."""
    return getattr(pointer, "_obj", pointer)


def _set(pointer, value) -> int:
    _target(pointer).value = value
    return SUCCESS


def _text(buffer, length, text: str) -> int:
    if len(text) >= length.value:
        return INSUFFICIENT_SIZE
    buffer.value = text.encode()
    return SUCCESS


def _handle(board, index: int | None, device) -> int:
    """A handle is the GPU's index plus one; whoever holds it never looks inside."""
    if index is None:
        return NOT_FOUND
    if not 0 <= index < len(board.cards):
        return INVALID_ARGUMENT
    ctypes.c_void_p.from_buffer(_target(device)).value = index + 1
    return SUCCESS


def _index(board, name, text) -> int | None:
    wanted = name.value.decode().upper()
    return next((index for index in range(len(board.cards)) if wanted in text(index)), None)


def _bus_ids(index: int) -> tuple[str, str]:
    long = environment.bus_id(index)
    return long, long[4:]  # the older form has a domain of four digits


def _pci(board, gpu: int, info) -> int:
    info, (long, short) = _target(info), _bus_ids(gpu)
    info.busId = long.encode()
    if hasattr(info, "busIdLegacy"):
        info.busIdLegacy = short.encode()
    info.domain, info.bus, info.device = 0, gpu + 1, 0
    return SUCCESS


def _memory(board, gpu: int, info) -> int:
    info, total = _target(info), board.cards[gpu].memory
    used = min(total, sum(nbytes for _, nbytes in board.processes(gpu)))
    info.total, info.used, info.free = total, used, total - used
    if hasattr(info, "reserved"):
        info.reserved = 0
    return SUCCESS


def _processes(board, gpu: int, count, infos) -> int:
    processes, count = board.processes(gpu), _target(count)
    room, count.value = count.value, len(processes)
    if not processes:
        return SUCCESS
    if infos is None or room < len(processes):
        return INSUFFICIENT_SIZE
    none = 0xFFFFFFFF  # nvml.h: "value is not available" for instance ids without MIG
    for place, (pid, used) in zip(infos, processes, strict=False):
        place.pid, place.usedGpuMemory = pid, used
        for name in ("gpuInstanceId", "computeInstanceId"):
            if hasattr(place, name):
                setattr(place, name, none)
    return SUCCESS


def _no_processes(board, gpu: int, count, infos) -> int:
    return _set(count, 0)


def process_name(pid: int) -> str | None:
    """The program that a process runs; None where there is no such process."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return None


def _process_name(board, pid, buffer, length) -> int:
    name = process_name(pid.value)
    return NOT_FOUND if name is None else _text(buffer, length, name[: length.value - 1])


def _capability(board, gpu: int, major, minor) -> int:
    _target(major).value, _target(minor).value = board.cards[gpu].capability
    return SUCCESS


# C functions by name, without the version at its end; the arguments are C's.
SYSTEM = {
    "nvmlSystemGetDriverVersion": lambda board, buffer, length: _text(buffer, length, DRIVER),
    "nvmlSystemGetNVMLVersion": lambda board, buffer, length: _text(buffer, length, f"{CUDA // 1000}.{DRIVER}"),
    "nvmlSystemGetCudaDriverVersion": lambda board, version: _set(version, CUDA),
    "nvmlSystemGetProcessName": _process_name,
    "nvmlDeviceGetCount": lambda board, count: _set(count, len(board.cards)),
    "nvmlDeviceGetHandleByIndex": lambda board, index, device: _handle(board, index.value, device),
    "nvmlDeviceGetHandleByUUID": lambda board, name, device: _handle(
        board, _index(board, name, lambda index: [environment.uuid(index).upper()]), device
    ),
    "nvmlDeviceGetHandleByPciBusId": lambda board, name, device: _handle(board, _index(board, name, _bus_ids), device),
}
DEVICE = {
    "nvmlDeviceGetName": lambda board, gpu, buffer, length: _text(buffer, length, board.cards[gpu].name),
    "nvmlDeviceGetUUID": lambda board, gpu, buffer, length: _text(buffer, length, environment.uuid(gpu)),
    "nvmlDeviceGetIndex": lambda board, gpu, index: _set(index, gpu),
    "nvmlDeviceGetMinorNumber": lambda board, gpu, number: _set(number, gpu),
    "nvmlDeviceGetPciInfo": _pci,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetUtilizationRates": True,  # Library answers, which knows when this process last asked
    "nvmlDeviceGetComputeRunningProcesses": _processes,
    "nvmlDeviceGetGraphicsRunningProcesses": _no_processes,
    "nvmlDeviceGetMPSComputeRunningProcesses": _no_processes,
    "nvmlDeviceGetCudaComputeCapability": _capability,
    "nvmlDeviceGetComputeMode": lambda board, gpu, mode: _set(mode, 0),  # NVML_COMPUTEMODE_DEFAULT
    "nvmlDeviceGetPersistenceMode": lambda board, gpu, mode: _set(mode, 0),  # disabled, and so the next two
    "nvmlDeviceGetDisplayMode": lambda board, gpu, mode: _set(mode, 0),
    "nvmlDeviceGetDisplayActive": lambda board, gpu, mode: _set(mode, 0),
}
