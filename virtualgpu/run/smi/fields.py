"""The fields that `nvidia-smi --query-gpu` and `--query-compute-apps` know, by the names of --help-query-gpu."""

import time

from virtualgpu import environment
from virtualgpu.torch_api.nvml import DRIVER

NONE = "[N/A]"
MIB = 1 << 20
# Field: its unit, and its value for a GPU.
FIELDS = {
    "timestamp": ("", lambda gpu: time.strftime("%Y/%m/%d %H:%M:%S") + f".{time.time_ns() // 10**6 % 1000:03d}"),
    "driver_version": ("", lambda gpu: DRIVER),
    "count": ("", lambda gpu: str(gpu.count)),
    "name": ("", lambda gpu: gpu.card.name),
    "uuid": ("", lambda gpu: environment.uuid(gpu.index)),
    "index": ("", lambda gpu: str(gpu.index)),
    "pci.bus_id": ("", lambda gpu: environment.bus_id(gpu.index)),
    "pci.domain": ("", lambda gpu: "0x0000"),
    "pci.bus": ("", lambda gpu: f"0x{gpu.index + 1:02X}"),
    "pci.device": ("", lambda gpu: "0x00"),
    "display_mode": ("", lambda gpu: "Disabled"),
    "display_active": ("", lambda gpu: "Disabled"),
    "persistence_mode": ("", lambda gpu: "Disabled"),
    "compute_mode": ("", lambda gpu: "Default"),
    "compute_cap": ("", lambda gpu: "{}.{}".format(*gpu.card.capability)),
    "memory.total": ("MiB", lambda gpu: str(gpu.card.memory // MIB)),
    "memory.reserved": ("MiB", lambda gpu: "0"),
    "memory.used": ("MiB", lambda gpu: str(gpu.used // MIB)),
    "memory.free": ("MiB", lambda gpu: str((gpu.card.memory - gpu.used) // MIB)),
    "utilization.gpu": ("%", lambda gpu: str(gpu.busy)),
    "utilization.memory": ("%", lambda gpu: str(gpu.busy)),
}
ALIASES = {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id", "gpu_serial": "serial"}
# Real fields that a virtual GPU cannot fill.
UNKNOWN = frozenset(
    """
    serial vbios_version inforom.img inforom.oem inforom.ecc inforom.pwr pci.device_id pci.sub_device_id
    pcie.link.gen.current pcie.link.gen.gpucurrent pcie.link.gen.max pcie.link.gen.gpumax pcie.link.gen.hostmax
    pcie.link.width.current pcie.link.width.max pstate fan.speed temperature.gpu temperature.memory
    temperature.gpu.tlimit power.management power.draw power.draw.average power.draw.instant power.limit
    enforced.power.limit power.default_limit power.min_limit power.max_limit clocks.current.graphics clocks.gr
    clocks.current.sm clocks.sm clocks.current.memory clocks.mem clocks.current.video clocks.video
    clocks.applications.graphics clocks.applications.gr clocks.applications.memory clocks.applications.mem
    clocks.default_applications.graphics clocks.default_applications.memory clocks.max.graphics clocks.max.gr
    clocks.max.sm clocks.max.memory clocks.max.mem utilization.encoder utilization.decoder utilization.jpeg
    utilization.ofa encoder.stats.sessionCount encoder.stats.averageFps encoder.stats.averageLatency
    ecc.mode.current ecc.mode.pending ecc.errors.corrected.volatile.total ecc.errors.corrected.aggregate.total
    ecc.errors.uncorrected.volatile.total ecc.errors.uncorrected.aggregate.total retired_pages.pending
    mig.mode.current mig.mode.pending accounting.mode accounting.buffer_size driver_model.current
    driver_model.pending gom.current gom.pending clocks_throttle_reasons.active clocks_throttle_reasons.gpu_idle
    clocks_throttle_reasons.sw_power_cap clocks_throttle_reasons.hw_slowdown
    clocks_throttle_reasons.sw_thermal_slowdown clocks_event_reasons.active display_attached addressing_mode
    """.split()  # noqa: SIM905
)
# Of one process on one GPU.
APPS = {
    "timestamp": ("", lambda app: FIELDS["timestamp"][1](app.gpu)),
    "gpu_name": ("", lambda app: app.gpu.card.name),
    "gpu_bus_id": ("", lambda app: environment.bus_id(app.gpu.index)),
    "gpu_serial": ("", lambda app: NONE),
    "gpu_uuid": ("", lambda app: environment.uuid(app.gpu.index)),
    "pid": ("", lambda app: str(app.pid)),
    "process_name": ("", lambda app: app.name()),
    "used_gpu_memory": ("MiB", lambda app: str(app.used // MIB)),
}
APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}
UNITS = {"power.": "W", "clocks.": "MHz", "fan.": "%", "utilization.": "%"}


def columns_of(kind: str, fields: list[str]) -> list[tuple]:
    """Title, unit and value of each field; `kind`: "gpu" or "compute-apps". Raises KeyError for one that is none."""
    known, aliases = (FIELDS, ALIASES) if kind == "gpu" else (APPS, APP_ALIASES)
    columns = []
    for field in fields:
        name = aliases.get(field, field)
        if kind == "gpu" and name in UNKNOWN:
            unit = next((unit for start, unit in UNITS.items() if name.startswith(start)), "")
            columns.append((name, unit, lambda gpu: NONE))
        elif name in known:
            columns.append((name, *known[name]))
        else:
            raise KeyError(field)
    return columns
