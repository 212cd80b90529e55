"""What a machine is beside its cards: its host, its clock, its network, and how many GPUs a node has."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from virtualgpu.hardware import units
from virtualgpu.hardware.network import Network, find_network
from virtualgpu.hardware.units import quantity

# -- The host: what PyTorch costs a processor for each operation that it gives to a GPU: data/hosts.toml, each with its source.
#
# A program whose kernels are shorter than that is bound by the host, whatever card it has.


class Host(NamedTuple):
    """Seconds an operation. forward: called from Python, through modules, with autograd's notes. backward: in autograd's own thread,
    without Python. optimizer: called from Python, without modules and notes. launch: of what is no kernel (a copy, an event), and of
    each further kernel of one operation. entry: each tensor of a list, for each list that an operation takes (`_foreach_add_` of 10 to 400
    tensors and three others beside an H100: 0.18 to 0.2 us). made: each tensor that such an operation makes (`_foreach_mul`,
    `_foreach_sqrt`: 2.3 to 2.7 us)."""

    name: str
    forward: float
    backward: float
    optimizer: float
    source: str
    launch: float = 4e-6
    entry: float = 0.2e-6
    made: float = 2.3e-6


def _host(name: str, values: dict[str, Any]) -> Host:
    units.check_keys(values, Host._fields[1:])
    seconds = {key: quantity(value, "s", key) for key, value in values.items() if key != "source"}
    return Host(name, **seconds, source=values["source"])


HOSTS = units.read("hosts", _host)
DEFAULT = "2026"
FREE = Host("free", 0.0, 0.0, 0.0, "no cost at all: what CUDA graphs come near to", 0.0, 0.0)  # for run.explain


# -- What a machine is beside its cards: what `clock=`, `host=`, `network=` and `gpus_per_node=` choose, in `gpus`, `dry_run` and the runner.


MEASURED, DATASHEET = "measured", "datasheet"


@dataclass(frozen=True)
class MachineSettings:
    """clock: MEASURED (kernels take what others measured on such cards) or DATASHEET (what the maker promises: a lower bound).
    host: what an operation costs the processor, a key of HOSTS. gpus_per_node: how the GPUs are divided into nodes; None: they
    are one. network: what joins nodes; None: what PyTorch's model of NCCL has for the card.
    """

    clock: str = MEASURED
    host: str = DEFAULT
    gpus_per_node: int | None = None
    network: Network | None = None


def find_settings(
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    network: str | Network | None = None,
    clock: str | None = None,
    host: str | None = None,
) -> MachineSettings:
    """Those of these names, for so many GPUs; None: as ever. Raises ValueError, naming what there is."""
    clock, host = clock or MEASURED, host or DEFAULT
    if clock not in (MEASURED, DATASHEET):
        raise ValueError(
            f"clock={clock!r}: choose {MEASURED} (what kernels reach) or {DATASHEET} (what the maker promises, a lower bound)"
        )
    if host not in HOSTS:
        raise ValueError(f"host={host!r}: choose one of {', '.join(HOSTS)}")
    if gpus is not None and gpus_per_node is not None:
        nodes(gpus, gpus_per_node)
    return MachineSettings(clock, host, gpus_per_node, None if network is None else find_network(network))


def nodes(gpus: int, gpus_per_node: int) -> int:
    """How many nodes a machine's GPUs make. Raises ValueError where that is no whole number."""
    check_number("gpus_per_node", gpus_per_node, 1)
    if gpus % gpus_per_node:
        raise ValueError(
            f"gpus_per_node={gpus_per_node} does not divide {gpus} GPUs into nodes: ask for a multiple of it"
        )
    return gpus // gpus_per_node


def check_number(name: str, value, least: int) -> None:
    """Raises ValueError for what is no whole number, or less than that."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, {least} at least")
