"""How busy virtual GPUs are and what they hold: one source of figures for NVIDIA's management library (NVML), for what torch.cuda and GPUtil
tell of it, and for `monitor`.

`pynvml` (nvidia-ml-py, and the copies of it) finds each C function by name in the driver's library. Here a `Library` stands in that
library's place, so that all of pynvml's own Python (structures, versions, errors) runs unchanged, and so does what is built on it
(nvitop, Ray). What a virtual GPU does not have (temperature, power, fans, ...) answers NVML_ERROR_NOT_SUPPORTED.

Memory counts as `nvidia-smi` counts it: the contexts and the segments of all processes. Utilization is the fraction of simulated time in
which kernels ran since the same one last asked; a kernel reads or writes memory for as long as it lasts, so the figure for memory is the
same. A virtual GPU runs at the highest clock of its data sheet, and draws its power limit for as long as it works, nothing in between: a
bound for energy.

The runner's programs come here without PyTorch.
"""

import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Container
from types import ModuleType
from typing import TYPE_CHECKING, Any

from virtualgpu import environment
from virtualgpu.hardware.units import MIB
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


def install(machine: "Machine", patches: "Patches") -> None:
    """Replace functions of torch.cuda and, once somebody imports it, GPUtil's list (it brings setuptools along); let each pynvml that is
    imported already ask this machine, unless the runner's hook was there before."""
    import torch

    from virtualgpu.torch_api.patches import when_imported

    figures = CudaFigures(machine)
    for name in ("utilization", "memory_usage", "clock_rate", "power_draw"):
        patches.replace(torch.cuda, name, getattr(figures, name))
    when_imported("GPUtil", functools.partial(_replace_list, figures, patches), patches)
    for name, module in list(sys.modules.items()):
        known = name.rpartition(".")[2] in ("pynvml", "nvml", "py3nvml") and "_nvmlGetFunctionPointer" in vars(module)
        if known and (vars(module).get("nvmlLib") is None or isinstance(module.nvmlLib, ctypes.CDLL)):
            patches.replace(module, "nvmlLib", Library(OfProcess(machine)))
            if "_nvmlGetFunctionPointer_cache" in vars(module):
                patches.replace(module, "_nvmlGetFunctionPointer_cache", {})


# -- the figures


class SinceAsked:
    """The fraction of simulated time in which a GPU was busy since the same one last asked (at first: since time 0), 0 to 1.

    busy: of a GPU's index, the seconds in which it was busy up to now, and now."""

    def __init__(self, busy: Callable[[int], tuple[float, float]]):
        self._busy = busy
        self._asked: dict[tuple[int, str], tuple[float, float]] = {}

    def fraction(self, gpu: int, asker: str = "") -> float:
        """Of work already queued, also where the GPU comes to it later."""
        before = self._asked.get((gpu, asker), (0.0, 0.0))
        now = self._asked[gpu, asker] = self._busy(gpu)
        return share(now, before)


class OfProcess:
    """As `ledger.Board`, of the virtual GPUs of this process alone, where there is no runner."""

    def __init__(self, machine: "Machine"):
        self.machine = machine
        specs = [gpu.spec for gpu in machine.gpus]
        self.cards = [environment.Card(spec.name, spec.name, spec.memory, spec.capability) for spec in specs]

    def processes(self, gpu: int) -> list[tuple[int, int]]:
        """(pid, bytes) of each that holds some of the GPU."""
        memory = self.machine.gpus[gpu].settled()
        this_one = memory.host_pid or os.getpid(), memory.reserved + memory.context
        held = [*memory.processes(), (PLAYED_PID, memory.occupied), this_one]
        return [(pid, used) for pid, used in held if used]

    def busy(self, gpu: int) -> tuple[float, float]:
        """Seconds in which the GPU was busy up to now, and now."""
        clock = self.machine.clock
        return clock.busy[gpu], clock.latest()


# -- what torch.cuda and GPUtil tell


class CudaFigures:
    """The functions of torch.cuda. They raise ValueError for the CPU."""

    def __init__(self, machine: "Machine"):
        self.machine = machine
        self.busy = SinceAsked(OfProcess(machine).busy)

    def utilization(self, device=None) -> int:
        """Percent of time in which kernels ran."""
        return round(100 * self.busy.fraction(self.machine.expect_gpu(device).index, "utilization"))

    def memory_usage(self, device=None) -> int:
        """Percent of time in which memory was read or written."""
        return round(100 * self.busy.fraction(self.machine.expect_gpu(device).index, "memory_usage"))

    def clock_rate(self, device=None) -> int:
        """MHz."""
        return self.machine.expect_gpu(device).spec.clock_rate // 1000

    def power_draw(self, device=None) -> int:
        """Milliwatts. Raises NotImplementedError for a card that does not say its limit."""
        gpu = self.machine.expect_gpu(device)
        if gpu.spec.power is None:
            raise NotImplementedError(
                f"{gpu.spec.name}, virtual, does not say its power limit: give `power` in a card of your own"
            )
        return round(1000 * gpu.spec.power * self.busy.fraction(gpu.index, "power_draw"))

    def rows(self, kind: type) -> list:
        """GPUtil's objects, as nvidia-smi lists them: memory in MiB, reserved and context counted as used."""
        rows = []
        for gpu in self.machine.gpus:
            memory, uuid = gpu.settled(), environment.uuid(gpu.physical)
            total, free = float(memory.capacity // MIB), float(memory.free_on_gpu // MIB)
            known = total, total - free, free, DRIVER, gpu.spec.name, "", "Disabled", "Disabled", float("nan")
            rows.append(kind(gpu.physical, uuid, self.busy.fraction(gpu.index, "GPUtil"), *known))
        return rows


def _replace_list(figures: CudaFigures, patches: "Patches", package: ModuleType) -> None:
    for owner in (package, package.GPUtil):
        patches.replace(owner, "getGPUs", lambda: figures.rows(package.GPU))


# -- what NVML tells


def of_the_runner() -> "Library":
    """The library for a process that the runner's program started: it sees what every process holds."""
    settings = environment.settings()
    assert settings is not None, "a process of the runner has its settings"
    return Library(Board(settings))


class Library:
    """Where `pynvml` expects a ctypes.CDLL: its attributes are NVML's C functions. `board`: a `ledger.Board`, or alike."""

    def __init__(self, board: Any):
        self._board = board
        self._users = 0  # nvmlInit less nvmlShutdown
        self._busy = SinceAsked(board.busy)
        self._lock = threading.Lock()

    def __getattr__(self, name: str):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return functools.partial(self._call, re.sub(r"_v\d+$", "", name))  # a partial: pynvml sets its restype

    def _call(self, name: str, *arguments) -> Any:
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
            if name in SYSTEM:
                return SYSTEM[name](self._board, *arguments)
            return self._of_device(name.removeprefix("nvmlDeviceGet"), *arguments)

    def _of_device(self, name: str, handle=None, *arguments) -> int:
        if name not in {*TEXTS, *NUMBERS, *STRUCTURES, "UtilizationRates"}:
            return NOT_SUPPORTED
        gpu = (ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1
        if not 0 <= gpu < len(self._board.cards):
            return INVALID_ARGUMENT
        if name in TEXTS:
            buffer, length = arguments
            return _text(buffer, length, TEXTS[name](self._board, gpu))
        if name in STRUCTURES:
            return STRUCTURES[name](self._board, gpu, *arguments)
        if name == "UtilizationRates":
            (rates,) = map(_target, arguments)
            rates.gpu = rates.memory = round(100 * self._busy.fraction(gpu))
            return SUCCESS
        for pointer, value in zip(arguments, NUMBERS[name](self._board, gpu), strict=False):
            _target(pointer).value = value
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


def _index(board, name, texts: Callable[[int], Container[str]]) -> int | None:
    wanted = name.value.decode().upper()
    return next((index for index in range(len(board.cards)) if wanted in texts(index)), None)


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
    for info, (pid, used) in zip(infos, processes, strict=False):
        info.pid, info.usedGpuMemory = pid, used
        for name in ("gpuInstanceId", "computeInstanceId"):
            if hasattr(info, name):
                setattr(info, name, none)
    return SUCCESS


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


# C functions by name, without the version at its end; the arguments are C's.
SYSTEM: dict[str, Callable[..., int]] = {
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
# Those of a device, without nvmlDeviceGet: what goes into (buffer, length), the numbers for a pointer each, and what fills a structure
TEXTS: dict[str, Callable[[Any, int], str]] = {
    "Name": lambda board, gpu: board.cards[gpu].name,
    "UUID": lambda board, gpu: environment.uuid(gpu),
}
NUMBERS: dict[str, Callable[[Any, int], tuple[int, ...]]] = {
    "Index": lambda board, gpu: (gpu,),
    "MinorNumber": lambda board, gpu: (gpu,),
    "CudaComputeCapability": lambda board, gpu: board.cards[gpu].capability,
    # NVML_COMPUTEMODE_DEFAULT, disabled, and no process
    **dict.fromkeys(("ComputeMode", "PersistenceMode", "DisplayMode", "DisplayActive"), lambda board, gpu: (0,)),
    **dict.fromkeys(("GraphicsRunningProcesses", "MPSComputeRunningProcesses"), lambda board, gpu: (0,)),
}
STRUCTURES: dict[str, Callable[..., int]] = {
    "PciInfo": _pci,
    "MemoryInfo": _memory,
    "ComputeRunningProcesses": _processes,
}
