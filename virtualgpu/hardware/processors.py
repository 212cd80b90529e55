"""The host: what PyTorch costs a processor for each operation that it gives to a GPU, forward, in autograd's thread and in an optimizer.

A program whose kernels are shorter than that is bound by the host, whatever card it has.
"""

from typing import NamedTuple


class Processor(NamedTuple):
    """Seconds an operation. forward: called from Python, through modules, with autograd's notes. backward: in autograd's own thread,
    without Python. optimizer: called from Python, without modules and notes."""

    name: str
    forward: float
    backward: float
    optimizer: float


PROCESSORS = {
    "2020": Processor("2020", 50e-6, 25e-6, 20e-6),
    "2024": Processor("2024", 20e-6, 12e-6, 10e-6),
}
DEFAULT = PROCESSORS["2024"]
