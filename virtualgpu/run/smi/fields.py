"""What `nvidia-smi` answers: the fields of its queries, and how GPUs reach each other (topo, nvlink)."""

import os
import time

from virtualgpu import environment
from virtualgpu.hardware.datasheet import Spec
from virtualgpu.torch_api.nvml import DRIVER

# -- `nvidia-smi topo -m`, `topo -p2p` and `nvlink -s`: how the virtual GPUs reach each other, as the cards' data sheets say.
#
# Cards with NVLink are NV#: by # links lead a copy from one to the other (`hardware.datasheet.NVLink`). All others are PHB, the way
# over PCI Express that the machines of cloud and Kaggle print. GPUs of two nodes have no way but the network.

TOPOLOGY = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
NETWORK = "  N/A  = On another node: reached over the network (virtual GPUs alone)\n"
PEERS = """
Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


def read(arguments: list[str]) -> str | None:
    """What is asked: "topo -m", "topo -p2p r", ... None for what is not modelled."""
    short = {"--matrix": "-m", "--p2p": "-p2p", "--status": "-s"}
    asked = " ".join(short.get(word, word) for word in arguments)
    return asked if asked in ("topo -m", "topo -p2p r", "topo -p2p w", "topo -p2p n", "nvlink -s") else None


def answer(what: str, cards: list[Spec], nodes: list[int], titles: list[str]) -> str:
    """The text. nodes: of each GPU. titles: as -L prints each GPU."""
    if what == "nvlink -s":
        return "".join(f"{title}\n{_status(card)}" for title, card in zip(titles, cards, strict=True))
    if what == "topo -m":
        return _matrix(cards, nodes)
    return _peers(cards, nodes, nvlink=what.endswith("n"))


def _status(card: Spec) -> str:
    if card.nvlink is None:
        return "\t NVML: Unable to retrieve NVLink information as all links are inActive\n"
    rate = card.nvlink.bandwidth / 1e9
    return "".join(f"\t Link {number}: {rate:g} GB/s\n" for number in range(card.nvlink.links))


def _matrix(cards: list[Spec], nodes: list[int]) -> str:
    def way(one: int, other: int) -> str:
        if one == other:
            return " X "
        if nodes[one] != nodes[other]:
            return "N/A"
        together = [
            round(card.peer.bandwidth / card.nvlink.bandwidth) for card in (cards[one], cards[other]) if card.nvlink
        ]
        return f"NV{min(together)}" if len(together) == 2 else "PHB"  # so many links lead a copy from one to the other

    gpus = range(len(cards))
    lines = ["\t".join(["", *(f"GPU{i}" for i in gpus), "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    # this machine's processors, of which each GPU is as near as the other; virtual GPUs have no memory node
    lines += ["\t".join([f"GPU{i}", *(way(i, j) for j in gpus), _processors(), "N/A", "", "N/A"]) for i in gpus]
    return "\n".join(lines) + "\n" + TOPOLOGY + (NETWORK if len(set(nodes)) > 1 else "")


def _peers(cards: list[Spec], nodes: list[int], nvlink: bool) -> str:
    """May one read and write the other's memory (or: is there NVLink between them)?"""

    def status(one: int, other: int) -> str:
        if one == other:
            return "X"
        if nodes[one] != nodes[other]:
            return "TNS"
        pair = (cards[one], cards[other])
        if nvlink:
            return "OK" if all(card.nvlink for card in pair) else "NS"
        return "OK" if all(card.peer_access for card in pair) else "CNS"

    gpus = range(len(cards))
    lines = ["\t".join([" ", *(f"GPU{i}" for i in gpus)])]
    lines += ["\t".join([f" GPU{i}", *(status(i, j) for j in gpus)]) for i in gpus]
    return "\n".join(lines) + "\n" + PEERS


def _processors() -> str:
    """As nvidia-smi lists them: 0-3,8."""
    here = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    runs: list[list[int]] = []
    for number in here:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


# -- The fields that `nvidia-smi --query-gpu` and `--query-compute-apps` know, by the names of --help-query-gpu.


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
