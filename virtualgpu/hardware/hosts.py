"""The host: what PyTorch costs a processor for each operation that it gives to a GPU: data/hosts.toml, each with its source.

A program whose kernels are shorter than that is bound by the host, whatever card it has.
"""

from typing import Any, NamedTuple

from virtualgpu.hardware import tables
from virtualgpu.hardware.units import quantity


class Host(NamedTuple):
    """Seconds an operation. forward: called from Python, through modules, with autograd's notes. backward: in autograd's own thread,
    without Python. optimizer: called from Python, without modules and notes. launch: of what is no kernel (a copy, an event), and of
    each further kernel of one operation. entry: of a list of tensors, for
    each of its lists of a fused optimizer (foreach and fused steps of 100 and 160 tensors beside an H100: 0.6 us)."""

    name: str
    forward: float
    backward: float
    optimizer: float
    source: str
    launch: float = 4e-6
    entry: float = 0.6e-6


def _host(name: str, values: dict[str, Any]) -> Host:
    tables.check_keys(values, Host._fields[1:])
    seconds = {key: quantity(value, "s", key) for key, value in values.items() if key != "source"}
    return Host(name, **seconds, source=values["source"])


HOSTS = tables.read("hosts", _host)
DEFAULT = "2024"
FREE = Host("free", 0.0, 0.0, 0.0, "no cost at all: what CUDA graphs come near to", 0.0, 0.0)  # for run.explain
