"""The host, and how the clock takes cards: what `host=` and `clock=` choose.

What PyTorch costs a processor for each operation that it gives to a GPU. A program whose kernels are shorter than that is bound by the
host, whatever card it has.
"""

from typing import NamedTuple

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


# Forward: milliseconds of a pass that is bound by its host, over its operations. Optimizer: an operation of AdamW on single tensors, 5.4
# us on the host of an A100 (pytorch/pytorch#120308, 2024), and in proportion for others. Backward: 0.6 of the forward pass; nobody
# published it. Here autograd takes some 6 us for each of its operations on the CPU where they have nothing to compute (tests/bench
# prints it), and a launch some 4.
HOSTS = {
    "2024": Host("2024", 20e-6, 12e-6, 5.4e-6, "Llama 3.2 1B on the host of a B200: 17 to 20 us (pytorch 2.13)"),
    "2023": Host(
        "2023",
        36e-6,
        22e-6,
        8e-6,
        "ResNet-50, batch 1, cloud hosts of A100, V100 and T4: 34 to 38 us (transformers' docs, pytorch 2.0)",
    ),
    "2021": Host(
        "2021",
        60e-6,
        36e-6,
        12e-6,
        "ResNet-50, batch 1, DGX-1 with Xeon E5-2698 v4, and a T4's: 59 to 61 us (NVIDIA, pytorch 1.9)",
    ),
    "launch": Host(
        "launch",
        4e-6,
        4e-6,
        4e-6,
        "a bare launch, without PyTorch: 3.8 us (NVIDIA, Getting Started with CUDA Graphs, 2019)",
    ),
}
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
