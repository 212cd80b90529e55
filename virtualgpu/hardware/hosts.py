"""The host, and how the clock takes cards: what `host=` and `clock=` choose.

What PyTorch costs a processor for each operation that it gives to a GPU: data/hosts.toml, each with its source. A program whose kernels
are shorter than that is bound by the host, whatever card it has.
"""

from typing import Any, NamedTuple

from virtualgpu.hardware import tables
from virtualgpu.hardware.units import quantity

MEASURED, DATASHEET = "measured", "datasheet"  # clock=: what kernels reach of a card, or what its maker promises


class Host(NamedTuple):
    """Seconds an operation. forward: called from Python, through modules, with autograd's notes. backward: in autograd's own thread,
    without Python. optimizer: called from Python, without modules and notes. launch: of what is no kernel (a copy, an event), and of
    each further kernel of one operation. entry: of a list of tensors (0.3 us, as a list of small CPU tensors shows; tests/bench prints it)."""

    name: str
    forward: float
    backward: float
    optimizer: float
    source: str
    launch: float = 4e-6
    entry: float = 0.3e-6


def _host(name: str, values: dict[str, Any]) -> Host:
    tables.check_keys(values, Host._fields[1:])
    seconds = {key: quantity(value, "s", key) for key, value in values.items() if key != "source"}
    return Host(name, **seconds, source=values["source"])


HOSTS = tables.read("hosts", _host)
DEFAULT = "2024"
FREE = Host("free", 0.0, 0.0, 0.0, "no cost at all: what CUDA graphs come near to", 0.0, 0.0)  # for run.explain


class ClockSettings(NamedTuple):
    """How simulated time is taken. rates: MEASURED or DATASHEET. host: a key of HOSTS."""

    rates: str = MEASURED
    host: str = DEFAULT


def settings(clock: str | None = None, host: str | None = None) -> ClockSettings:
    """Those of these names; None: as ever. Raises ValueError, naming what there is."""
    clock, host = clock or MEASURED, host or DEFAULT
    if clock not in (MEASURED, DATASHEET):
        raise ValueError(
            f"clock={clock!r}: choose {MEASURED} (what kernels reach) or {DATASHEET} (what the maker promises, a lower bound)"
        )
    if host not in HOSTS:
        raise ValueError(f"host={host!r}: choose one of {', '.join(HOSTS)}")
    return ClockSettings(clock, host)
