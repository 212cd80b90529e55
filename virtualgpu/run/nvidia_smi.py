"""The program's `nvidia-smi`: what people and tools ask of the real one, answered for the virtual GPUs.

Known: the plain table, -L, --query-gpu and --query-compute-apps with --format=csv[,noheader][,nounits], --help-query-gpu, -i, -l,
--version, topo -m. What a virtual GPU does not have is [N/A], a field that nvidia-smi does not have is refused in its words, and all
else in a sentence. It runs without `site`, and imports neither PyTorch nor the package's session.

Utilization is the share of simulated time in which kernels ran since the same process last asked.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # a script: the package without its __init__
    from types import ModuleType

    package = sys.modules["virtualgpu"] = ModuleType("virtualgpu")
    package.__path__ = [str(Path(__file__).parents[1])]

from virtualgpu import environment
from virtualgpu.hardware import specs
from virtualgpu.hardware.datasheet import Spec
from virtualgpu.hardware.units import MIB
from virtualgpu.memory.ledger import Board, share
from virtualgpu.torch_api import nvml

DRIVER, CUDA = nvml.DRIVER, f"{nvml.CUDA // 1000}.{nvml.CUDA % 1000 // 10}"
ANSWERS = "-L, --query-gpu=... --format=csv (repeated by -l 1), --query-compute-apps, topo -m and the plain table are"
LOOP = 5  # seconds: -l without a number
NONE = "[N/A]"


class Refused(Exception):
    """The words for stdout, and the exit status."""

    def __init__(self, words: str, status: int):
        self.words, self.status = words, status


class GPU:
    """One GPU as it is now."""

    def __init__(self, board: Board, index: int, busy: float):
        self.index, self.card, self.count = index, board.cards[index], len(board.cards)
        self.apps = [App(self, pid, used) for pid, used in board.processes(index)]
        self.used = min(self.card.memory, sum(app.used for app in self.apps))
        self.busy = round(100 * busy)


class App(NamedTuple):
    """One process on one GPU, which holds so many bytes."""

    gpu: GPU
    pid: int
    used: int

    @property
    def name(self) -> str:
        """The program that it runs, or [N/A] where the system does not tell."""
        return nvml.process_name(self.pid) or NONE


# -- What can be asked, by the names of --help-query-gpu: of a GPU, and of a process on one.

Value = Callable[[Any], object]
FIELDS: dict[str, Value] = {
    "timestamp": lambda gpu: time.strftime("%Y/%m/%d %H:%M:%S") + f".{time.time_ns() // 10**6 % 1000:03d}",
    "driver_version": lambda gpu: DRIVER,
    "count": lambda gpu: gpu.count,
    "name": lambda gpu: gpu.card.name,
    "uuid": lambda gpu: environment.uuid(gpu.index),
    "index": lambda gpu: gpu.index,
    "pci.bus_id": lambda gpu: environment.bus_id(gpu.index),
    "pci.domain": lambda gpu: "0x0000",
    "pci.bus": lambda gpu: f"0x{gpu.index + 1:02X}",
    "pci.device": lambda gpu: "0x00",
    "display_mode": lambda gpu: "Disabled",
    "display_active": lambda gpu: "Disabled",
    "persistence_mode": lambda gpu: "Disabled",
    "compute_mode": lambda gpu: "Default",
    "compute_cap": lambda gpu: "{}.{}".format(*gpu.card.capability),
    "memory.total": lambda gpu: gpu.card.memory // MIB,
    "memory.reserved": lambda gpu: 0,
    "memory.used": lambda gpu: gpu.used // MIB,
    "memory.free": lambda gpu: (gpu.card.memory - gpu.used) // MIB,
    "utilization.gpu": lambda gpu: gpu.busy,
    "utilization.memory": lambda gpu: gpu.busy,
}
APPS: dict[str, Value] = {
    "timestamp": FIELDS["timestamp"],
    "gpu_name": lambda app: app.gpu.card.name,
    "gpu_bus_id": lambda app: environment.bus_id(app.gpu.index),
    "gpu_serial": lambda app: NONE,
    "gpu_uuid": lambda app: environment.uuid(app.gpu.index),
    "pid": lambda app: app.pid,
    "process_name": lambda app: app.name,
    "used_gpu_memory": lambda app: app.used // MIB,
}
ALIASES = {
    "gpu": {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id", "gpu_serial": "serial"},
    "compute-apps": {"name": "process_name", "used_memory": "used_gpu_memory"},
}
# Fields of the real one that a virtual GPU cannot fill
UNKNOWN = re.compile(
    r"serial|vbios_version|pstate|(driver_model|gom|display_attached|addressing_mode|retired_pages)\b.*"
    r"|(inforom|pci|pcie|fan|temperature|power|enforced|clocks\w*|utilization|encoder|ecc|mig|accounting)\..+"
)
UNITS = {"memory.": "MiB", "used_gpu_memory": "MiB", "power.": "W", "clocks.": "MHz", "fan.": "%", "utilization.": "%"}


def columns_of(kind: str, fields: list[str]) -> list[tuple[str, str, Value]]:
    """Title, unit and value of each field; `kind`: "gpu" or "compute-apps". Raises Refused for one that is none."""
    known = FIELDS if kind == "gpu" else APPS
    columns = []
    for field in fields:
        name = ALIASES[kind].get(field, field)
        if name not in known and (kind != "gpu" or not UNKNOWN.fullmatch(name)):
            raise Refused(f'Field "{field}" is not a valid field to query.\n\n', 2)
        unit = next((unit for start, unit in UNITS.items() if name.startswith(start)), "")
        columns.append((name, unit, known.get(name, lambda gpu: NONE)))
    return columns


# -- The command line and its answers.


class Parser(argparse.ArgumentParser):
    """The command line. Raises Refused."""

    def __init__(self):
        super().__init__(add_help=False, allow_abbrev=False)
        self.set_defaults(what="table", fields=[])
        option = self.add_argument
        for what, names in (("help", ["-h", "--help"]), ("list", ["-L", "--list-gpus"]), ("version", ["--version"])):
            option(*names, dest="what", action="store_const", const=what)
        for what, known in (("gpu", FIELDS), ("compute-apps", APPS)):
            option(f"--help-query-{what}", dest="known", action="store_const", const=known)
            option(f"--query-{what}", type=lambda text, what=what: (what, self.words(text)), dest="query")
        option("--format", type=self.words)
        option("-i", "--id", type=self.words)
        option("-l", "--loop", nargs="?", const=LOOP, type=self.seconds)
        option("-lms", "--loop-ms")  # refused; not -l with the value ms

    def error(self, message):
        """Of a value that is not there, or is none."""
        raise Refused("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n", 1)

    @staticmethod
    def words(text: str) -> list[str]:
        """With commas between them."""
        return [word.strip() for word in text.split(",")]

    @staticmethod
    def seconds(text: str) -> float:
        """Raises ValueError for what is no whole number above 0."""
        if not text.isdigit() or not int(text):
            raise ValueError(text)
        return int(text)

    def read(self, arguments: list[str]) -> argparse.Namespace:
        """what: the answer that is asked for."""
        if arguments in (["topo", "-m"], ["topo", "--matrix"]):
            return argparse.Namespace(**vars(self.parse_args([])) | {"what": "topology"})
        options, unknown = self.parse_known_args(arguments)
        if unknown or options.loop_ms:
            words = arguments if options.loop_ms or arguments[0] in unknown else unknown
            raise Refused(f"nvidia-smi {' '.join(words)} is not modelled by virtual GPUs: {ANSWERS}.\n", 2)
        if options.query:
            options.what, options.fields = options.query
        if options.known:
            options.what, options.fields = "fields", list(options.known)
        return options


def main(arguments: list[str]) -> int:
    """Print what was asked for; the exit status. Loops for ever with -l, as the real one."""
    try:
        options = Parser().read(arguments)
        settings = environment.settings()
        if settings is None:
            raise Refused("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9)
        while True:
            sys.stdout.write(answer(options, Board(settings), settings.gpus_per_node))
            sys.stdout.flush()
            if options.loop is None:
                return 0
            time.sleep(options.loop)
    except Refused as refused:
        sys.stdout.write(refused.words)
        return refused.status
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # a full disk
        print(f"nvidia-smi: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes again at its end
        return 1


def answer(options: argparse.Namespace, board: Board, gpus_per_node: int | None = None) -> str:
    """The text. Raises Refused."""
    if options.what == "help":
        return __doc__.split("\n\n")[1] + "\n"
    if options.what == "version":
        return (
            f"NVIDIA-SMI version  : {DRIVER} (virtual)\nDRIVER version      : {DRIVER}\nCUDA Version        : {CUDA}\n"
        )
    if options.what == "fields":
        return "".join(f"{name}\n" for name in options.fields)
    chosen = _chosen(options.id, len(board.cards))
    if options.what == "list":
        return "".join(f"GPU {i}: {board.cards[i].name} (UUID: {environment.uuid(i)})\n" for i in chosen)
    if options.what == "topology":
        nodes = [i // (gpus_per_node or len(board.cards)) for i in chosen]
        return topology([specs.find_spec(card.like) for card in board.cards], nodes)
    before = _asked(board, options.fields)
    gpus = [GPU(board, index, before[index]) for index in chosen]
    if options.what == "table":
        return table(gpus)
    columns = columns_of(options.what, options.fields)
    if not options.format or "csv" not in options.format:
        raise Refused('"--format=" argument missing, needs "csv" at least.\n', 1)
    rows = gpus if options.what == "gpu" else [app for gpu in gpus for app in gpu.apps]
    return _csv(columns, rows, "noheader" not in options.format, "nounits" not in options.format)


def _csv(columns: list, rows: list, header: bool, units: bool) -> str:
    lines = [", ".join(f"{title} [{unit}]" if unit else title for title, unit, _ in columns)] if header else []
    for row in rows:
        cells = [(unit, str(value(row))) for _, unit, value in columns]
        lines.append(", ".join(f"{cell} {unit}" if unit and units and cell != NONE else cell for unit, cell in cells))
    return "".join(f"{line}\n" for line in lines)


def _chosen(ids: list[str] | None, count: int) -> list[int]:
    """GPUs by index, UUID or bus id. Raises Refused where one is not there."""
    if ids is None:
        return list(range(count))
    names = {
        name.upper(): i
        for i in range(count)
        for name in (str(i), environment.uuid(i), environment.bus_id(i), environment.bus_id(i)[4:])
    }
    if any(name.upper() not in names for name in ids):
        raise Refused("No devices were found\n", 6)  # nvidia-smi(1), return value 6
    return sorted({names[name.upper()] for name in ids})


def _asked(board: Board, fields: list[str]) -> list[float]:
    """How busy each GPU was since the process that started us last asked; remembered in the runner's folder."""
    now = [board.busy(index) for index in range(len(board.cards))]
    if not board.folder:
        return [0.0] * len(now)
    mark = os.path.join(board.folder, f"{os.getppid()}.asked")
    try:
        with open(mark, encoding="utf-8") as file:
            before = [tuple(pair) for pair in json.load(file)]
    except (OSError, ValueError):
        before = [(0.0, 0.0)] * len(now)
    if not fields or any(field.startswith("utilization") for field in fields):
        with contextlib.suppress(OSError), open(mark, "w", encoding="utf-8") as file:
            json.dump(now, file)
    return [share(*pair) for pair in zip(now, before, strict=True)]


def table(gpus: list[GPU]) -> str:
    """The plain table."""
    line, whole_line = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 20 + "+", "+" + "-" * 87 + "+"

    def row(*cells: str) -> str:
        padded = (cell[:width].ljust(width) for cell, width in zip(cells, (39, 22, 18), strict=True))
        return f"| {' | '.join(padded)} |"

    lines = [
        time.strftime("%a %b %d %H:%M:%S %Y"),
        whole_line,
        f"| {f'NVIDIA-SMI {DRIVER} (virtual)    Driver Version: {DRIVER}    CUDA Version: {CUDA}':<85} |",
        line,
        row("GPU  Name", "Bus-Id", "GPU-Util"),
        row("Fan  Temp   Perf          Pwr:Usage/Cap", "          Memory-Usage", "Compute M."),
        line,
    ]
    for gpu in gpus:
        memory = f"{gpu.used // MIB:>7}MiB / {gpu.card.memory // MIB:>6}MiB"
        lines.append(row(f"{gpu.index:>3}  {gpu.card.name}", environment.bus_id(gpu.index), f"{gpu.busy:>6} %"))
        lines += [row("N/A   N/A    N/A              N/A / N/A", memory, "Default"), line]
    title = f"{'GPU        PID   Type   Process name':<69}{'GPU Memory':>16}"
    lines += ["", whole_line, f"| {'Processes:':<85} |", f"| {title} |", whole_line]
    apps = [app for gpu in gpus for app in gpu.apps]
    for app in apps:
        left = f"{app.gpu.index:>3} {app.pid:>10}      C   {app.name}"
        lines.append(f"| {left[:69]:<69}{f'{app.used // MIB}MiB':>16} |")
    if not apps:
        lines.append(f"| {'No running processes found':<85} |")
    return "\n".join([*lines, whole_line, ""])


# -- `nvidia-smi topo -m`: how the virtual GPUs reach each other, as the cards' data sheets say.
#
# Cards with NVLink are NV#: by # links lead a copy from one to the other (`hardware.datasheet.NVLink`). All others are PHB, the way
# over PCI Express that the machines of cloud and Kaggle print. GPUs of two nodes have no way but the network.

LEGEND = """
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


def topology(cards: list[Spec], nodes: list[int]) -> str:
    """The matrix. nodes: of each GPU."""
    gpus = range(len(cards))
    lines = ["\t".join(["", *(f"GPU{i}" for i in gpus), "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for i in gpus:
        ways = [" X " if i == j else _way(cards[i], cards[j]) if nodes[i] == nodes[j] else "N/A" for j in gpus]
        # this machine's processors, of which each GPU is as near as the other; virtual GPUs have no memory node
        lines.append("\t".join([f"GPU{i}", *ways, _processors(), "N/A", "", "N/A"]))
    return "\n".join(lines) + "\n" + LEGEND + (NETWORK if len(set(nodes)) > 1 else "")


def _way(one: Spec, other: Spec) -> str:
    links = [round(card.peer.bandwidth / card.nvlink.bandwidth) for card in (one, other) if card.nvlink]
    return f"NV{min(links)}" if len(links) == 2 else "PHB"


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


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head -1: it ends without a word, as a program in C does
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - nvidia-smi >&-
    sys.exit(main(sys.argv[1:]))
