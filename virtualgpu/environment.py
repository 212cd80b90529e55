"""Environment variables that virtual GPUs read, all in one place.

VIRTUALGPU            which virtual GPUs a process has: JSON, which the runner (`python -m virtualgpu`) and the pytest plugin set
                      and every process that they start reads. For instance, by hand:
                      {"gpus": [{"like": "H100", "count": 2, "memory": 17179869184}], "dry": false}
                      gpus: groups of equal cards. like: a card's name, or the path of a card's file. count: 1 unless given.
                      memory: bytes, or text such as "16 GB"; the card's own unless given. name, capability: what tools print
                      that ask the driver; looked up where missing. dry: shapes alone. folder: where the runner's processes
                      leave their figures. trace, report: what each process writes there when it ends. single_rank: world_size,
                      rank and gpus_per_node of a dry run in which one process plays one rank of many. gpus_per_node: how
                      the GPUs are divided into nodes. network: what joins nodes, as hardware.machine.find_network reads it.
                      sanitize: races raise an error. timers: what the program's time.time() tells, real unless given, or simulated. clock, host: how time is taken, as hardware.machine.find_settings reads them.
                      steps: end after so many steps of the optimizer (run/steps.py). explain: what a run of --explain
                      changes (run/explain/watch.py), {} for nothing.
CUDA_VISIBLE_DEVICES  which of them a program sees, and in which order: `visible_gpus`.
CUDA_LAUNCH_BLOCKING  1: the host waits for each kernel: `launch_blocking`.
RANK                  the number that a launcher gave this process: `rank`.
GROUP_RANK and others what torchrun says of nodes: `node`, `has_several_nodes`, `local_world_size`.
VIRTUALGPU_CROSSCHECK 1: a dry run works out again all that it remembers, and compares (engine/dry_run.py): `crosscheck`.
NCCL_P2P_DISABLE, NCCL_P2P_LEVEL   how far apart NCCL lets GPUs reach each other's memory: `peer_to_peer`.
CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE   how much memory cuBLAS works in: `cublas_workspace`, `cublaslt_workspace`.
TORCH_CUBLAS_WORKSPACE_CACHE, TORCH_CUBLASLT_UNIFIED_WORKSPACE   does PyTorch keep it, and do both libraries share it? `flag`.
DISABLE_ADDMM_CUDA_LT 1: no product with a bias goes to cuBLASLt: `engine.gpu`.

HELPERS_GPUS (real or virtual GPUs for a notebook) is read by `session.gpus` alone. Only the standard library is imported with this.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

VARIABLE, CROSSCHECK = "VIRTUALGPU", "VIRTUALGPU_CROSSCHECK"
DRY_HAS_NO_VALUES = (
    "a dry run computes shapes, no values"  # a warning's beginning, by which `fit` knows it among what a program prints
)
PYTORCH = (2, 11), (2, 15)  # the oldest version that has what is used of it, and the newest that was tried
MAX_GPUS = 64  # more than any one machine has: a slip, rather


class UnsupportedPyTorch(ImportError):
    """It is too old, or lacks a name. Its text is one sentence, with the version that is installed and those that will do."""

    def __init__(self, wrong: str):
        (oldest, first), (newest, last) = PYTORCH
        super().__init__(
            f"virtual GPUs work with PyTorch {oldest}.{first} to {newest}.{last}, and {_pytorch()}, which is installed, {wrong}: "
            f"pip install 'torch>={oldest}.{first},<{newest}.{last + 1}'"
        )


def _pytorch() -> str:
    """The version of what is imported, or would be. Raises ImportError where there is none."""
    return getattr(sys.modules.get("torch"), "__version__", None) or importlib.metadata.version("torch")


def check_pytorch() -> None:
    """Raises UnsupportedPyTorch where PyTorch is too old; imports nothing. A newer one than was tried may have all that is needed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # its import will say so
        if tuple(int(part) for part in _pytorch().split(".")[:2]) < PYTORCH[0]:
            raise UnsupportedPyTorch("is older")


@contextlib.contextmanager
def names_of_pytorch() -> Iterator[None]:
    """For imports of what uses PyTorch's names, after PyTorch's own: UnsupportedPyTorch where it is too old, or one is not there."""
    importlib.import_module("torch")
    check_pytorch()
    try:
        yield
    except UnsupportedPyTorch:
        raise
    except (ImportError, AttributeError) as error:
        raise UnsupportedPyTorch(f"lacks what they use of it ({error})") from error


class Card(NamedTuple):
    """One GPU, as far as a process without PyTorch has to know it."""

    like: str  # for hardware.specs.find
    name: str  # as the driver prints it
    memory: int  # bytes
    capability: tuple[int, int]


class Settings(NamedTuple):
    """What VIRTUALGPU says."""

    cards: tuple[Card, ...]
    dry: bool = False
    folder: str | None = None
    trace: bool = False
    report: bool = False
    sanitize: bool = False
    single_rank: tuple[int, int, int] | None = (
        None  # world_size, rank, gpus_per_node: this process plays one rank of many
    )
    gpus_per_node: int | None = None
    network: str | None = None
    clock: str | None = None
    host: str | None = None
    steps: int | None = None  # end after so many optimizer steps, and note each; 0: to the program's end
    explain: dict | None = None  # note where they go, with this change
    timers: str = "real"  # what time.time() and its kind tell the program (session.timers)

    def text(self) -> str:
        """The value for VIRTUALGPU; `settings` reads it."""
        groups = []
        for card, same in groupby(self.cards):
            groups.append({"count": len(list(same)), **card._asdict()})
        return json.dumps({"gpus": groups, **{name: getattr(self, name) for name in self._fields[1:]}})


def settings(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """The virtual GPUs that this process was given; None where it was given none.

    Raises ValueError, in one sentence, where VIRTUALGPU cannot be read.
    """
    text = environ.get(VARIABLE)
    if not text:
        return None
    try:
        values = json.loads(text)
        cards = tuple(card for group in values["gpus"] for card in [_card(group)] * group.get("count", 1))
        return Settings(cards, **{name: values[name] for name in Settings._fields[1:] if name in values})
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{VARIABLE}={text!r} cannot be read ({error!r}): unset it, or see virtualgpu/environment.py"
        ) from None


def restore(before: Mapping[str, str | None]) -> None:
    """This process's variables are again as they were `before`; None: not there."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _card(group: dict) -> Card:
    if not {"name", "memory", "capability"} <= group.keys():  # written by hand
        from virtualgpu.hardware import specs

        spec = specs.find_spec(group["like"], group.get("memory"))
        group = {"name": spec.name, "capability": spec.capability, **group, "memory": spec.memory}
    return Card(group["like"], group["name"], group["memory"], tuple(group["capability"]))


def uuid(index: int) -> str:
    """A GPU's UUID as the driver prints it: the same in every run. Its last digits spell "virtualg"."""
    return f"GPU-{index:08x}-0000-4000-{b'vi'.hex()}-{b'rtual'.hex()}67"


def bus_id(index: int) -> str:
    """Where on the PCI bus a GPU is, as the driver prints it."""
    return f"00000000:{index + 1:02X}:00.0"


def visible(uuids: list[str], wanted: str | None) -> list[int]:
    """Which of a machine's GPUs, by index, CUDA calls 0, 1, ...: CUDA_VISIBLE_DEVICES as the CUDA guide describes it.

    `wanted`, its value, lists indices or the beginnings of UUIDs; the first one that names no GPU ends the list. A number may
    be followed by other characters, and one GPU named twice hides all (`torch.cuda._parse_visible_devices` says so of CUDA).
    """
    if wanted is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for name in (part.strip() for part in wanted.split(",")):
        matches = [i for i, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)]
        digits = name[: len(name) - len(name.lstrip("0123456789"))]
        if digits and int(digits) < len(uuids):
            matches = [int(digits)]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen += matches
    return chosen


def visible_gpus(count: int, environ: Mapping[str, str] = os.environ, gpus_per_node: int | None = None) -> list[int]:
    """Which of `count` virtual GPUs, by index, this process sees now.

    Where the GPUs are divided into nodes and torchrun has several agents, each agent's processes see those of its node, and
    CUDA_VISIBLE_DEVICES counts among these. Raises ValueError for a node that has none.
    """
    here = list(range(count))
    if gpus_per_node is not None and has_several_nodes(environ):
        here = here[node(environ) * gpus_per_node :][:gpus_per_node]
        if not here:
            raise ValueError(
                f"{count} GPUs make {count // gpus_per_node} nodes of {gpus_per_node}, and this process is on node {node(environ)} "
                "(counted from 0): ask for as many GPUs as all nodes have together"
            )
    return [here[index] for index in visible([uuid(index) for index in here], environ.get("CUDA_VISIBLE_DEVICES"))]


def launch_blocking(environ: Mapping[str, str] = os.environ) -> bool:
    """Does the host wait for each kernel?"""
    return environ.get("CUDA_LAUNCH_BLOCKING") == "1"


def crosscheck(environ: Mapping[str, str] = os.environ) -> bool:
    """Is what a dry run remembers of an operation compared with what it works out anew, at each call?"""
    return environ.get(CROSSCHECK) == "1"


def node(environ: Mapping[str, str] = os.environ) -> int:
    """Which node of the run this process is on, as torchrun says it: of several agents on one machine each is a node."""
    for name in ("GROUP_RANK", "NODE_RANK"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    local = local_world_size(environ)
    return max(0, rank(environ)) // local if local else 0


def has_several_nodes(environ: Mapping[str, str] = os.environ) -> bool:
    """Does the launcher say that the ranks are on more than one node?"""
    agents = environ.get("GROUP_WORLD_SIZE", "")
    if agents.isdigit():
        return int(agents) > 1
    world, local = environ.get("WORLD_SIZE", ""), local_world_size(environ)
    return world.isdigit() and 0 < local < int(world)


def local_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks the launcher says this node has; 0 where it says nothing."""
    value = environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() else 0


def peer_to_peer(environ: Mapping[str, str] = os.environ) -> str:
    """How far apart NCCL lets GPUs reach each other's memory, in its words: "LOC" not at all, "PXB" over NVLink and switches of PCI Express, as by
    default, "SYS" through processors as well.

    NCCL's src/graph/paths.cc, ncclGetLevel: NVL and PIX are nearer than PXB and PHB nearer than SYS, which is all one where no switch is told of;
    0 to 5 are older words for LOC, PIX, PXB, PHB and SYS. Others (nvidia-smi's NODE) it does not know and passes over.
    """
    if environ.get("NCCL_P2P_DISABLE", "").strip() == "1":
        return "LOC"
    level = environ.get("NCCL_P2P_LEVEL", "")
    if level in ("LOC", "0"):
        return "LOC"
    return "SYS" if level in ("PHB", "SYS") or (level.isdigit() and int(level) >= 3) else "PXB"


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """The rank that torchrun and its kind gave this process; -1 where there is none."""
    value = environ.get("RANK", "")
    return int(value) if value.isdigit() else -1


def cublas_workspace(default: int, environ: Mapping[str, str] = os.environ) -> int:
    """Bytes of cuBLAS's workspace: CUBLAS_WORKSPACE_CONFIG lists ":KiB:count". Warns in PyTorch's words where it cannot be read.

    Source: parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    text = environ.get("CUBLAS_WORKSPACE_CONFIG")
    if text is None:
        return default
    parts = re.findall(r":([0-9]+):([0-9]+)", text)
    if not parts:
        warnings.warn(
            f"Could not parse CUBLAS_WORKSPACE_CONFIG, using default workspace size of {default} bytes.", stacklevel=2
        )
        return default
    return sum(int(kib) * 1024 * int(count) for kib, count in parts)


def cublaslt_workspace(environ: Mapping[str, str] = os.environ) -> int:
    """Bytes of cuBLASLt's workspace: CUBLASLT_WORKSPACE_SIZE in KiB, or 1 MiB. Warns in PyTorch's words where it cannot be read.

    Source: parseCUDABlasLtWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp, which reads as C's stoi does.
    """
    text, kib = environ.get("CUBLASLT_WORKSPACE_SIZE"), 1024
    if text is not None:
        number = re.match(r"\s*([+-]?[0-9]+)", text)
        if number is None:
            warnings.warn(f"invalid CUBLASLT_WORKSPACE_SIZE, using default workspace size of {kib} KiB.", stacklevel=2)
        elif not -(1 << 31) <= int(number[1]) < 1 << 31:
            warnings.warn(
                f"CUBLASLT_WORKSPACE_SIZE out of range, using default workspace size of {kib} KiB.", stacklevel=2
            )
        else:
            kib = int(number[1])
    return kib * 1024 % (1 << 64)


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool | None:
    """A variable of PyTorch that is 1 or 0; None where it is neither. Warns in PyTorch's words of any other value.

    Source: check_env in c10/util/env.cpp.
    """
    text = environ.get(name)
    if text in (None, "0", "1"):
        return None if text is None else text == "1"
    warnings.warn(f"Ignoring invalid value for boolean flag {name}: {text} valid values are 0 or 1.", stacklevel=2)
    return None
