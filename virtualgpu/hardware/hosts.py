"""The host: what PyTorch costs a processor for each operation that it gives to a GPU: data/hosts.toml, each with its source.

A program whose kernels are shorter than that is bound by the host, whatever card it has.
"""

from typing import Any, NamedTuple

from virtualgpu.hardware import tables
from virtualgpu.hardware.units import quantity


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
    tables.check_keys(values, Host._fields[1:])
    seconds = {key: quantity(value, "s", key) for key, value in values.items() if key != "source"}
    return Host(name, **seconds, source=values["source"])


HOSTS = tables.read("hosts", _host)
DEFAULT = "2026"
FREE = Host("free", 0.0, 0.0, 0.0, "no cost at all: what CUDA graphs come near to", 0.0, 0.0)  # for run.explain
