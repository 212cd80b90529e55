"""What is said of one model of GPU: `Spec`, with its `Link`s. Figures as the makers print them, in base units.

Real kernels reach less than the peak, and not all the same share: data/achieved.toml has what others measured.
"""

import functools
import math
from dataclasses import dataclass
from statistics import median

from virtualgpu.hardware import units

# -- What follows from a card's compute capability alone: NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities".
#
# Cores are the guide's results per clock and multiprocessor of 32-bit floating-point additions. Read back from real cards
# (OpenXLA's xla/backends/gpu/target_config/specs, 2026): P100, V100, A100, A6000, H100 and B200 say the same.


KIB = 1 << 10


@dataclass(frozen=True)
class Capability:
    """Limits of one multiprocessor; memory in bytes. Warps of 32, 65,536 registers, blocks of 1,024 threads: all of these."""

    architecture: str
    cores: int  # for float32
    threads: int
    shared: int  # shared memory of a multiprocessor
    optin: int  # what one block may have of it, where a kernel asks (cudaFuncAttributeMaxDynamicSharedMemorySize)


CAPABILITIES = {
    (6, 0): Capability("Pascal", 64, 2048, 64 * KIB, 48 * KIB),
    (6, 1): Capability("Pascal", 128, 2048, 96 * KIB, 48 * KIB),
    (7, 0): Capability("Volta", 64, 2048, 96 * KIB, 96 * KIB),
    (7, 5): Capability("Turing", 64, 1024, 64 * KIB, 64 * KIB),
    (8, 0): Capability("Ampere", 64, 2048, 164 * KIB, 163 * KIB),
    (8, 6): Capability("Ampere", 128, 1536, 100 * KIB, 99 * KIB),
    (8, 9): Capability("Ada", 128, 1536, 100 * KIB, 99 * KIB),
    (9, 0): Capability("Hopper", 128, 2048, 228 * KIB, 227 * KIB),
    (10, 0): Capability("Blackwell", 128, 2048, 228 * KIB, 227 * KIB),
    (10, 3): Capability("Blackwell", 128, 2048, 228 * KIB, 227 * KIB),
    (12, 0): Capability("Blackwell", 128, 1536, 100 * KIB, 99 * KIB),
    (12, 1): Capability("Blackwell", 128, 1536, 100 * KIB, 99 * KIB),
}


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
    """The NVLinks that leave one GPU. Bridges, which are sold apart and join two cards, are in `specs`.

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
    bridge: NVLink | None = None  # sold apart, for two of them: `specs`

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


# -- What the ways to the host give, and those between GPUs, as others measured them (data/links.toml).
#
# Between two GPUs that do not reach each other's memory the host matters more than the lanes and the card: an all-reduce of two or four RTX 4090
# was measured at 0.9 to 18 GB/s. Copies take the median of what was measured with the card's own compute capability; NCCL's ring takes it
# where there are two figures or more, for one is no more than a host; else the median of all with that PCI Express.
#
# A copy says little of a ring: the driver copies with an engine, and NCCL's kernels load from the host's memory (3 to 6 times as slow on one machine).

GENERATIONS = {3: PCIE3, 4: PCIE4, 5: PCIE5}
LATENCY = 12e-6  # of such a copy: two RTX 4090, 11.4 to 13.1 us (p2pBandwidthLatencyTest)


@functools.cache
def to_host(link: Link, way: str, pinned: bool) -> Link:
    """What copies from the host's memory ("in") or to it ("out") reach of that link: the median of its PCI Express generation, whatever the
    card. Faster links than these are taken at their word.

    Memory that a copy to the host is the first to touch takes longer, up to eight times (1.1 and 1.4 GB/s were measured): not modelled.
    """
    if link.bandwidth > 1.5 * PCIE5.bandwidth:
        return link
    generation = _generation(link)
    rows = [row for row in units.rows("links")["host"] if row["pcie"] == generation]
    own = [row for row in rows if row["memory"] == ("pinned" if pinned else "pageable")]
    rate = median(row["rate"] for row in [row for row in own if row["way"] == way] or own) * 1e9
    lanes = min(link.bandwidth / GENERATIONS[generation].bandwidth, 1.0)
    return Link(rate * lanes if pinned else min(rate, to_host(link, way, True).bandwidth), link.latency)


def between(one: Spec, other: Spec, promised: bool = False) -> Link:
    """What copies from one GPU to another reach: over NVLink, if they are of one kind that has it; over PCI Express, where both cards have peer
    access; else through the host's memory. promised: as data sheets say it, not as others measured it.
    """
    if not (one.peer_access and other.peer_access):  # `peer` is measured as it is
        return min((card.host if card.peer_access else card.peer for card in (one, other)), key=_bandwidth)
    alike = (one.peer, one.nvlink) == (other.peer, other.nvlink)
    link = one.peer if alike else min(one.host, other.host, key=_bandwidth)
    return link if promised else to_peer(link, one.capability, alike and one.nvlink is not None)


def _bandwidth(link: Link) -> float:
    return link.bandwidth


@functools.cache
def to_peer(link: Link, capability: tuple[int, int], nvlink: bool) -> Link:
    """What copies reach of a link between GPUs that reach each other's memory: the share that others measured of NVLink in that generation,
    or in the last one before it that anybody measured; of PCI Express in any.
    """
    rows = [row for row in units.rows("links")["peer"] if row["nvlink"] == nvlink]
    if nvlink:
        generations = sorted({tuple(map(int, row["capability"].split("."))) for row in rows})
        generation = max((one for one in generations if one <= capability), default=generations[0])
        rows = [row for row in rows if row["capability"] == "{}.{}".format(*generation)]
    return Link(link.bandwidth * median(row["rate"] / row["promised"] for row in rows), link.latency)


def copies(capability: tuple[int, int], host: Link) -> Link:
    """Of a card with that way to the host, to another one like it."""
    rate = _measured("copy", capability, host) or 0.0
    return Link(min(rate * 1e9, _largest_share("copy") * host.bandwidth), LATENCY)


def ring(capability: tuple[int, int], host: Link) -> float:
    """What NCCL's ring sends from each GPU to the next, in bytes/s."""
    rate = _measured("all_reduce", capability, host, least=2) or 0.0
    return min(rate * 1e9, _largest_share("all_reduce") * host.bandwidth)


def _measured(what: str, capability: tuple[int, int], host: Link, least: int = 1) -> float | None:
    """GB/s; None where nobody measured it over that PCI Express. least: figures for a median of the card's own capability."""
    generation = _generation(host)
    rows = [row for row in units.rows("links")["measured"] if row["what"] == what and row["pcie"] == generation]
    own = [row for row in rows if row["capability"] == "{}.{}".format(*capability)]
    enough = len(own) >= least
    return median(row["rate"] for row in (own if enough else rows)) if rows else None


def _generation(host: Link) -> int:
    return min(GENERATIONS, key=lambda number: abs(GENERATIONS[number].bandwidth - host.bandwidth))


@functools.cache
def _largest_share(what: str) -> float:
    """The largest share of PCI Express that anybody reached: what a narrower slot is taken to give at most."""
    rows = units.rows("links")["measured"]
    return max(row["rate"] * 1e9 / GENERATIONS[row["pcie"]].bandwidth for row in rows if row["what"] == what)
