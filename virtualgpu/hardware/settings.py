"""What a machine is beside its cards: what `clock=`, `host=`, `network=` and `gpus_per_node=` choose, in `gpus`, `dry_run` and the runner."""

from dataclasses import dataclass

from virtualgpu.hardware import networks
from virtualgpu.hardware.hosts import DEFAULT, HOSTS
from virtualgpu.hardware.networks import Network

MEASURED, DATASHEET = "measured", "datasheet"


@dataclass(frozen=True)
class MachineSettings:
    """clock: MEASURED (kernels take what others measured on such cards) or DATASHEET (what the maker promises: a lower bound).
    host: what an operation costs the processor, a key of `hosts.HOSTS`. gpus_per_node: how the GPUs are divided into nodes; None: they
    are one. network: what joins nodes; None: what PyTorch's model of NCCL has for the card.
    """

    clock: str = MEASURED
    host: str = DEFAULT
    gpus_per_node: int | None = None
    network: Network | None = None


def find(
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
    return MachineSettings(clock, host, gpus_per_node, None if network is None else networks.find(network))


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
