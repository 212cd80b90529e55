"""What is said of one model of GPU: `Spec`, with its `Link`s. Figures as the makers print them, in base units.

Real kernels reach less than the peak, and not all the same share: `achieved` has what others measured.
"""

import math
from dataclasses import dataclass

from virtualgpu.hardware.capabilities import CAPABILITIES, Capability

# Types by PyTorch's names, as text: the runner looks cards up without PyTorch. TF32 is no torch.dtype, but what convolutions of float32
# run in from Ampere on (torch.backends.cudnn.allow_tf32)
FLOAT64, FLOAT32, TF32, FLOAT16, BFLOAT16 = "float64", "float32", "tf32", "float16", "bfloat16"
FLOAT8, FLOAT8_E5M2 = "float8_e4m3fn", "float8_e5m2"
DTYPES = (FLOAT64, FLOAT32, TF32, FLOAT16, BFLOAT16, FLOAT8, FLOAT8_E5M2)


@dataclass(frozen=True)
class Link:
    """A way to another GPU or to the host: bytes per second in one direction, and seconds before the first byte."""

    bandwidth: float
    latency: float

    def seconds(self, nbytes: int) -> float:
        """Of one transfer of that many bytes, one way."""
        return self.latency + nbytes / self.bandwidth


# A PCI Express 3.0 lane carries 8 GT/s with 128 bits in 130 (PCI-SIG): 15.75 GB/s for 16 lanes; 4.0 twice, 5.0 four times that.
# Latencies: what NVIDIA's sample p2pBandwidthLatencyTest prints, some 10 us where copies pass through the host's memory and 2 us
# over NVLink.
PCIE3, PCIE4, PCIE5 = Link(15.75e9, 10e-6), Link(31.5e9, 10e-6), Link(63e9, 10e-6)
NVLINK_LATENCY = 2e-6


@dataclass(frozen=True)
class NVLink:
    """The NVLinks that leave one GPU. Bridges, which are sold apart and join two cards, are `bridges`.

    PyTorch's model of NCCL (torch/_inductor/comm_analysis.py) knows NVLink of V100, A100, H100 and B200, and PCI Express; it
    goes by the first number of the compute capability: 7, 8, 9, and 10 or more.
    """

    links: int
    bandwidth: float  # bytes/s of one link in one direction
    switch: bool  # NVSwitch: all links lead to every other GPU of the machine; otherwise they are shared out among neighbours
    bridge: bool = False  # all links lead to one other card, and no further


@dataclass(frozen=True)
class Spec:
    """One model of GPU. Rates in FLOP/s per dtype, bandwidth in bytes/s, memory in bytes, times in seconds, clocks in Hz.

    Of your own: Spec(name, memory, capability, processors, rates, bandwidth, peer, host), where `rates` has torch.float32 or
    "float32" at least (it is kept by the names in DTYPES); a dtype that is not there runs at that rate. Raises ValueError for
    an invalid figure.

    The figures below `kernel` move no simulated time; programs read them. What is left None is not known: 0 to PyTorch.
    """

    name: str  # as torch.cuda.get_device_name prints it
    memory: int  # torch.cuda.get_device_properties().total_memory: what the driver leaves of the nominal size
    capability: tuple[int, int]
    processors: int  # streaming multiprocessors
    rates: dict[str, float]
    bandwidth: float
    peer: Link
    host: Link
    kernel: float = 2e-6

    clock: float | None = None  # highest of the multiprocessors
    memory_clock: float | None = None  # as CUDA counts it: two transfers a cycle
    bus: int | None = None  # bits of the way to the memory
    l2: int | None = None  # bytes
    power: float | None = None  # watts: the limit that nvidia-smi shows
    peer_access: bool = True  # torch.cuda.can_device_access_peer; where False, `peer` leads through the host's memory
    nvlink: NVLink | None = None
    bridge: NVLink | None = None  # sold apart, for two of them: `bridges`

    def __post_init__(self) -> None:
        def wrong(what: str) -> ValueError:
            return ValueError(f"Spec({self.name!r}): {what}")

        if not (isinstance(self.capability, tuple) and self.capability in CAPABILITIES):
            known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
            raise wrong(f"compute capability {self.capability} is not known here; give a tuple, the nearest of {known}")
        if isinstance(self.rates, dict):
            rates = {str(dtype).removeprefix("torch."): rate for dtype, rate in self.rates.items()}
            object.__setattr__(self, "rates", rates)
        if not isinstance(self.rates, dict) or FLOAT32 not in self.rates:
            raise wrong("rates is a dict from dtype to FLOP/s, with torch.float32 at least")
        if not (isinstance(self.peer, Link) and isinstance(self.host, Link)):
            raise wrong("peer and host are a Link(bandwidth, latency) each")
        figures = {name: getattr(self, name) for name in ("memory", "processors", "bandwidth", "kernel")}
        figures |= {f"the rate of {dtype}": rate for dtype, rate in self.rates.items()}
        for what, figure in figures.items():
            if isinstance(figure, bool) or not isinstance(figure, (int, float)) or not 0 < figure < math.inf:
                raise wrong(f"{what} is {figure!r}, and must be a number above 0")

    @property
    def limits(self) -> Capability:
        """What follows from the compute capability; memory in bytes."""
        return CAPABILITIES[self.capability]

    @property
    def architecture(self) -> str:
        """Pascal, Volta, Turing, Ampere, Ada, Hopper or Blackwell."""
        return self.limits.architecture

    # The rest under the names, and in the units, of torch.cuda.get_device_properties().

    total_memory = property(lambda self: self.memory)
    major = property(lambda self: self.capability[0])
    minor = property(lambda self: self.capability[1])
    multi_processor_count = property(lambda self: self.processors)
    max_threads_per_multi_processor = property(lambda self: self.limits.threads)
    shared_memory_per_multiprocessor = property(lambda self: self.limits.shared)
    shared_memory_per_block_optin = property(lambda self: self.limits.optin)
    memory_clock_rate = property(lambda self: round((self.memory_clock or 0) / 1e3), doc="kHz")
    memory_bus_width = property(lambda self: self.bus or 0, doc="bits")
    L2_cache_size = property(lambda self: self.l2 or 0, doc="bytes")
    warp_size = property(lambda self: 32)
    max_threads_per_block = property(lambda self: 1024)
    regs_per_multiprocessor = property(lambda self: 65536)
    shared_memory_per_block = property(lambda self: 48 << 10)

    @property
    def clock_rate(self) -> int:
        """kHz; where `clock` is not given, the one at which the float32 rate is reached (a core does two FLOPs a cycle)."""
        clock = self.clock or self.rates[FLOAT32] / (2 * self.processors * self.limits.cores)
        return round(clock / 1e3)
