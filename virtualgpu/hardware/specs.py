"""What a virtual GPU is made of: data-sheet figures of four well-known cards, each with its source.

Peak figures, as the makers print them. Real kernels reach less of them, and not all the same share: a step simulated here
is a lower bound, and comparisons between two ways to run the same model mean more than seconds.
"""

import re
from dataclasses import dataclass, replace

import torch

TF32 = "tf32"  # not a torch.dtype: what convolutions of float32 run in from Ampere on (torch.backends.cudnn.allow_tf32)
MIB = 1 << 20


@dataclass(frozen=True)
class Link:
    """A way to another GPU or to the host: bytes per second in one direction, and seconds before the first byte."""

    bandwidth: float
    latency: float

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Spec:
    """One model of GPU. Rates in FLOP/s per dtype, bandwidth in bytes/s, memory in bytes, times in seconds."""

    name: str  # as torch.cuda.get_device_name prints it
    memory: int  # torch.cuda.get_device_properties().total_memory: what the driver leaves of the nominal size
    capability: tuple[int, int]
    processors: int  # streaming multiprocessors
    rates: dict
    bandwidth: float
    peer: Link
    host: Link
    kernel: float = 2e-6

    def seconds(self, flops: float, nbytes: int, dtype) -> float:
        """How long one kernel lasts: bound by arithmetic or by memory, whichever is slower, and never less than `kernel`."""
        return self.kernel + max(flops / self.rates.get(dtype, self.rates[torch.float32]), nbytes / self.bandwidth)


# A PCI Express 3.0 lane carries 8 GT/s with 128 bits in 130 (PCI-SIG): 15.75 GB/s for 16 lanes; 4.0 twice, 5.0 four times that.
# Latencies: what NVIDIA's sample p2pBandwidthLatencyTest prints, some 10 us where copies pass through the host's memory and 2 us
# over NVLink.
PCIE3, PCIE4, PCIE5 = Link(15.75e9, 10e-6), Link(31.5e9, 10e-6), Link(63e9, 10e-6)

SPECS = {
    # NVIDIA T4 data sheet (2019): 8.1 TFLOPS float32, 65 float16, 320 GB/s, PCIe 3.0. float64 1/32 of float32 (Turing
    # white paper). total_memory as PyTorch prints it on Colab.
    "T4": Spec(
        "Tesla T4",
        15095 * MIB,
        (7, 5),
        40,
        {torch.float64: 0.25e12, torch.float32: 8.1e12, torch.float16: 65e12},
        320e9,
        peer=PCIE3,
        host=PCIE3,
    ),
    # NVIDIA V100 data sheet (2020), SXM2: 7.8 TFLOPS float64, 15.7 float32, 125 with tensor cores, 900 GB/s. Two of its six
    # NVLinks of 25 GB/s lead to one neighbour (DGX-1 white paper).
    "V100": Spec(
        "Tesla V100-SXM2-16GB",
        16160 * MIB,
        (7, 0),
        80,
        {torch.float64: 7.8e12, torch.float32: 15.7e12, torch.float16: 125e12},
        900e9,
        peer=Link(50e9, 2e-6),
        host=PCIE3,
    ),
    # NVIDIA A100 data sheet (2021), SXM 40 GB, dense: 9.7 TFLOPS float64, 19.5 float32, 156 TF32, 312 float16 and bfloat16,
    # 1,555 GB/s, NVLink 600 GB/s both ways, PCIe 4.0.
    "A100": Spec(
        "NVIDIA A100-SXM4-40GB",
        40326 * MIB,
        (8, 0),
        108,
        {
            torch.float64: 9.7e12,
            torch.float32: 19.5e12,
            TF32: 156e12,
            torch.float16: 312e12,
            torch.bfloat16: 312e12,
        },
        1555e9,
        peer=Link(300e9, 2e-6),
        host=PCIE4,
    ),
    # NVIDIA H100 data sheet (2023), SXM, dense (half of the figures printed with sparsity): 34 TFLOPS float64, 67 float32,
    # 494.5 TF32, 989.5 float16 and bfloat16, 3.35 TB/s, NVLink 900 GB/s both ways, PCIe 5.0.
    "H100": Spec(
        "NVIDIA H100 80GB HBM3",
        81079 * MIB,
        (9, 0),
        132,
        {
            torch.float64: 34e12,
            torch.float32: 67e12,
            TF32: 494.5e12,
            torch.float16: 989.5e12,
            torch.bfloat16: 989.5e12,
        },
        3350e9,
        peer=Link(450e9, 2e-6),
        host=PCIE5,
    ),
}


def find(like: str | Spec, memory: int | str | None = None) -> Spec:
    """The spec of that name, with another memory size where one is given (bytes, or "16 GB").

    Raises ValueError, naming what there is, for an unknown name or a size that cannot be read.
    """
    spec = like if isinstance(like, Spec) else SPECS.get(str(like).upper())
    if spec is None:
        raise ValueError(f"there is no GPU called {like!r} here; choose one of {', '.join(SPECS)}")
    return spec if memory is None else replace(spec, memory=parse_size(memory))


def parse_size(size: int | float | str) -> int:
    """Bytes from 256_000_000, "256 MB", "16 GB", "1.5 GiB". As for GPUs, a kB here is 1,024 bytes, and so on."""
    cure = 'give bytes, or text like "256 MB" or "16 GB"'
    if isinstance(size, str):
        found = re.fullmatch(r"\s*([\d_.]+)\s*([kmgt]?)i?b?\s*", size, re.IGNORECASE)
        try:
            number = float(found[1])
        except (TypeError, ValueError):
            raise ValueError(f"memory={size!r} is not a size: {cure}") from None
        size = number * 1024 ** " kmgt".index(found[2].lower() or " ")
    if isinstance(size, bool) or not isinstance(size, (int, float)):
        raise ValueError(f"memory={size!r} is not a size: {cure}")
    if not 2 * MIB <= size < 1 << 50:
        raise ValueError(
            f"memory={size!r} is {size:,.0f} bytes, and a GPU needs at least 2 MiB (PyTorch's smallest segment): {cure}"
        )
    return int(size)
