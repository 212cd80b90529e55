"""How long NCCL's collectives last (PyTorch's analytic model), and what they take of a GPU beside other kernels."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from virtualgpu.hardware.machine import TABLE, VOLTA, Fabric
from virtualgpu.timing.streams import Engine, Queue, Span

# -- How long a collective of NCCL lasts: PyTorch's own analytic model (torch/_inductor/comm_analysis.py), for any card of the table.
#
# NCCL knows two algorithms and three protocols, estimates each, and takes the fastest (src/graph/tuning.cc). Written again because importing
# PyTorch's takes two seconds a process, older versions have another one, and it knows four models of GPU; a test compares both. What it has no
# formula for (broadcast, reduce, gather, scatter) follows tuning.cc, or counts the bytes that leave the root. Where we depart from it:
#
# - It takes 24 GB/s for all that is no NVLink. NCCL goes through the host's memory unless a switch or NCCL_P2P_LEVEL lets cards reach each other
#   (`Fabric.of`); what was measured there is in hardware/data/links.toml.
# - It has all of a GPU's NVLinks for any group (of a V100's six, two lead to one neighbour, so that a pair has 40 GB/s and not 120).
# - Between nodes it gives a ring one network card, and a power of the bytes for more. NCCL's rings leave a node by all cards that its members have
#   (src/graph/search.cc), and so do ours: 32 H100 reach 320 to 365 GB/s in tables of nccl-tests and 32 A100 190, for 370 and 192 here (PyTorch: 43
#   and 22 up to 50 MB, 93 and 46 at 4 GiB). On two nodes a tree crosses the network half as often as a ring, and has up to twice its bandwidth
#   (search.cc and tuning.cc: bwIntra).
#   Messages, and what is made of messages (all_to_all, gather, scatter), have one card, at PyTorch's share of it.
# - It has an all_to_all pass a ring twice. Here each GPU sends the others their parts once: so counted two RTX 2080 Ti reach 4.6 GB/s, for 4.0 in
#   an all_reduce, and four RTX 4090 18 in both (NVIDIA/nccl#1603).
# - Broadcast and reduce of a pair through the host's memory go one way, at what PCI Express carries: 11.1 GB/s on the 2080 Ti, whose ring has
#   4.0 (10 and 3.9 in NVIDIA/nccl#384; but on a slow host 0.96 and 0.89). No table of single messages was found: they have the ring's.
#
# It knows no NVLS: eight H200 reach 482 GB/s in a large all-reduce, and 366 without it, for 370 here. Against tables of nccl-tests on eight A100 and
# H200 it takes a third to a half of the time below 1 MiB, 0.7 to 0.95 of it at 16 to 128 MiB, and 0.98 above 1 GiB; through the host's memory, given
# a machine's own bandwidth, 0.9 to 1.1 from 1 MiB on for 2 and 4 GPUs. Several nodes: `python -m tests.accuracy.collectives`.
#
# Bandwidths in GB/s and latencies in us, as in hardware/data/nccl.toml; `seconds` takes bytes and returns seconds.

TREE, RING = "tree", "ring"
LL, LL128, SIMPLE = "LL", "LL128", "simple"
PROTOCOLS = LL, LL128, SIMPLE
MESSAGES = "p2p", "all_to_all", "gather", "scatter"  # each goes by its GPU's card, and no ring


@functools.lru_cache(maxsize=4096)
def seconds(kind: str, nbytes: int, ranks: int, fabric: Fabric, nodes: int = 1) -> float:
    """The time of one collective.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, barrier or p2p (one message).
    nbytes: of the whole, as NCCL counts: all that an all_gather or a gather returns, all that a reduce_scatter or a scatter is given.
    nodes: over how many the ranks are spread. A group of one takes no time.
    """
    if ranks <= 1:
        return 0.0
    if kind == "barrier":
        kind, nbytes = "all_reduce", 1
    # LL128's figures are NVLink's: none between nodes
    ways = itertools.product(
        (TREE, RING) if kind == "all_reduce" else (RING,), PROTOCOLS if nodes == 1 else (LL, SIMPLE)
    )
    return min(_microseconds(kind, nbytes, ranks, fabric, nodes, *way) for way in ways) * 1e-6


def _microseconds(kind, nbytes, ranks, fabric, nodes, algorithm, protocol) -> float:
    """By one algorithm and protocol."""
    if kind in ("broadcast", "reduce") and ranks == 2:
        fabric = replace(fabric, inside=max(fabric.inside, fabric.one_way))
    bandwidth, steps = _bus_bandwidth(kind, ranks, fabric, nodes, algorithm, protocol), _steps(kind, ranks)
    if algorithm == TREE:
        size, share = int(math.log2(nbytes >> 6)) if nbytes >= 128 else 0, TABLE["tree_share"][protocol]
        bandwidth *= 0.5 * (share[size] if size < len(share) else 1.0)
    elif kind in ("gather", "scatter"):
        bandwidth *= ranks / (ranks - 1)  # all but the root's own part pass one link
    elif kind != "p2p":
        bandwidth *= ranks / steps
    return _latency(kind, ranks, fabric, nodes, algorithm, protocol, steps) + nbytes / (1000.0 * bandwidth)


def _steps(kind: str, ranks: int) -> int:
    around = {
        "p2p": 1,
        "all_reduce": 2 * (ranks - 1),
        "broadcast": ranks,
        "reduce": ranks,
        "gather": ranks,
        "scatter": ranks,
    }
    return around.get(kind, ranks - 1)


def _between_nodes(kind: str, ranks: int, fabric: Fabric, nodes: int, algorithm: str) -> float:
    """Bandwidth on the bus of a group on several nodes."""
    members = fabric.members or ranks // nodes
    if kind in MESSAGES:
        if not fabric.shared:  # calibrated by PyTorch against H100s over RoCE
            return fabric.between * (0.77 + 0.23 * min(1.0, (nodes - 1) / 7))
        if kind == "all_to_all":  # the members' parts for other nodes pass one card
            return fabric.between / members * (ranks - 1) / (ranks - members)
        return fabric.between
    bus = fabric.between if fabric.shared else members * fabric.between * TABLE["network_share"]
    if algorithm == TREE and nodes == 2:  # no node passes on what another sent it
        bus *= 2
    return bus if members == 1 else min(bus, fabric.inside)


def _bus_bandwidth(kind: str, ranks: int, fabric: Fabric, nodes: int, algorithm: str, protocol: str) -> float:
    bus = min(fabric.inside, fabric.neighbour) if kind == "p2p" else fabric.inside
    if nodes > 1:
        bus = _between_nodes(kind, ranks, fabric, nodes, algorithm)
    if protocol == SIMPLE and algorithm == RING:
        return bus
    generation = VOLTA if protocol == LL and nodes > 1 else fabric.generation
    bound = TABLE["bound"]["ll" if protocol == LL else f"{algorithm}_{protocol}".lower()][str(generation)]
    way = "tree_in_a_node" if algorithm == TREE and nodes == 1 else algorithm
    share, channels = TABLE["share"][way][PROTOCOLS.index(protocol)], 1 if protocol == LL else fabric.blocks
    return min(bus * share, channels * bound[min(nodes, 3) - 1])


def _latency(kind: str, ranks: int, fabric: Fabric, nodes: int, algorithm: str, protocol: str, steps: int) -> float:
    index = PROTOCOLS.index(protocol)
    # where several nodes take part, PyTorch's model has no PCI Express inside of them
    link = "nvlink" if fabric.nvlink or nodes > 1 else "host" if fabric.staged else "pcie"
    base, inside, between = (
        table[algorithm][index] for table in (TABLE["base"], TABLE["step"][link], TABLE["step"]["network"])
    )
    if nodes > 1:
        inside = max(inside, TABLE["step"]["of_several_nodes"][index])
    if algorithm == TREE:
        return base + 2 * ((ranks // nodes - 1) * inside + int(math.log2(nodes)) * between)
    crossing = 0 if nodes == 1 else (2 if kind == "all_reduce" else 1) * (nodes - 1)
    return base + (steps - crossing) * inside + crossing * between


# -- Collectives on one process's clock: when its streams come to one, who waits for it, and what NCCL's kernels take of a GPU.
#
# When the other ranks come, and how long it lasts, is `virtualgpu.distributed`'s to say.
#
# A kernel of NCCL is there from the moment at which its rank has come to it, also while it waits for the last rank (it polls), so that
# nvidia-smi counts all of it as busy. It holds a multiprocessor for each of its blocks, and the kernels beside it have the rest. When it ends is
# known only after other ranks have come, and by then the kernels beside it are queued. So they stay where they are, and what they lose is made up
# for in one piece: a delay of the stream that next waits for a collective, comes to one, or is waited for by the host (`charge`). A collective
# that was launched behind slowed kernels is that much later itself (`lateness`).


COMMUNICATION = 1 << 16  # ids from here on are streams of communicators, of which torch.cuda knows nothing


@dataclass(slots=True)
class _Stretch:
    """One kernel of NCCL. share: of the GPU's processors that it holds. charged: of the delay that it makes, so far."""

    start: float
    end: float
    share: float
    charged: float = 0.0

    def shared(self, kernels: Engine, until: float = float("inf")) -> float:
        """For how long kernels run beside it, slowed as they are: by `share` of that."""
        if not kernels.ends or kernels.ends[-1] <= self.start:
            return 0.0
        end = max(self.start, min(self.end, until))
        return min(end - self.start, kernels.overlap(self.start, end) / (1 - self.share))


class Beside:
    """Of one GPU. kernels: when its kernels ran. Moments in seconds."""

    def __init__(self, kernels: Engine):
        self.kernels = kernels
        self._covered = Engine()  # by kernels of NCCL
        self._open: list[_Stretch] = []  # parts of it, beside which kernels may still be queued
        self._alone = 0.0  # in the other parts, for how long nothing else ran
        self.slowing: list[_Stretch] = []  # beside which kernels may still be queued, and lose their share
        self._past = 0.0  # delays of those that are over
        self.charged = 0.0  # delays so far

    def add(self, came: float, end: float, share: float) -> None:
        """A kernel of NCCL is there then."""
        for part in tuple(self._open):
            if part.end <= came:  # kernels begin no earlier than this from now on
                self._alone += part.end - part.start - part.shared(self.kernels)
                self._open.remove(part)
        for start, until in self._covered.cover(came, end):
            self._open.append(_Stretch(start, until, share))
        for one in tuple(self.slowing):
            if one.end <= came and one.share * one.shared(self.kernels) <= one.charged:
                self._past += one.charged
                self.slowing.remove(one)
        if share:
            self.slowing.append(_Stretch(came, end, share))

    def alone(self) -> float:
        """For how long kernels of NCCL ran and no others, as far as is known."""
        return self._alone + sum(part.end - part.start - part.shared(self.kernels) for part in self._open)

    def charge(self) -> float:
        """What the kernels queued so far lose, and have not been charged yet."""
        more = 0.0
        for one in self.slowing:
            delay = max(one.charged, one.share * one.shared(self.kernels))
            more, one.charged = more + delay - one.charged, delay
        self.charged += more
        return more

    def lateness(self, issued: float, charged: float) -> float:
        """Of a kernel of NCCL that was put behind kernels at `issued`, when so much had been charged."""
        lost = self._past
        for one in self.slowing:
            lost += one.share * one.shared(self.kernels, issued)
        return max(0.0, lost - charged)


class Collectives:
    """Those of one clock, whose GPUs have a stream for each communicator beside their own."""

    def __init__(self, clock):
        self.clock, self.settle = clock, lambda: None
        self.reset(0)

    def reset(self, gpus: int) -> None:
        """As new, with so many GPUs."""
        self.streams: list[list[Queue]] = [[] for _ in range(gpus)]
        self.beside = [Beside(self.clock.compute[gpu]) for gpu in range(gpus)]

    def settle_by(self, settle: Callable[[], None]) -> None:
        """`settle` makes the ends of all collectives known, for a host that waits for everything."""
        self.settle = settle

    def come_to(self, gpu: int) -> tuple[float, Queue]:
        """The host launches a collective: the moment at which its stream has come to it, and that stream."""
        if not self.clock.watched:
            self.clock.set(watched=True)
        self.charge(gpu)
        now, queue = self.clock.launched(gpu), self.clock.current(gpu)
        return max(now, queue.ready), queue

    def new_stream(self, gpu: int) -> Queue:
        """A stream for a communicator, which runs beside the kernels."""
        queue = Queue(gpu, COMMUNICATION + len(self.streams[gpu]))
        self.streams[gpu].append(queue)
        return queue

    def run(self, queue: Queue, came: float, start: float, end: float, name: str, share: float = 0.0) -> None:
        """A collective runs then, on that stream. came: this rank, which waits for the others until `start`. share: of the GPU's
        processors, which kernels beside it do without.
        """
        queue.ready = max(queue.ready, end)
        self.beside[queue.gpu].add(came, end, share)
        if self.clock.spans is not None:
            if start > came:
                self.clock.spans.append(Span(queue.gpu, came, start, "waiting", f"{name} (waiting)", queue.id))
            self.clock.spans.append(Span(queue.gpu, start, end, "communication", name, queue.id))

    def together(self, gpus: Sequence[int], seconds: float, name: str, share: float) -> None:
        """One of a single process, which launches a kernel on the current stream of each of these GPUs: these begin when all have come."""
        clock, local, came = self.clock, self.clock.local, []
        clock.set(watched=True)
        now = max(clock.launched(gpu) for gpu in gpus)
        for gpu in gpus:
            self.charge(gpu)
            if local.backward is not None:  # its thread comes to its next work only now
                local.backward[gpu] = max(local.backward[gpu], now)
            came.append(max(now, clock.current(gpu).ready))
        start = max(came)
        for gpu, moment in zip(gpus, came, strict=True):
            self.run(clock.current(gpu), moment, start, start + seconds, name, share)

    def charge(self, gpu: int) -> None:
        """The current stream is as much later as kernels have lost beside collectives whose end is known."""
        beside = self.beside[gpu]
        if beside.slowing and (delay := beside.charge()):
            self.clock.delay(gpu, delay)

    def wait(self, gpu: int, end: float) -> None:
        """The current stream waits for a moment; the host goes on."""
        self.charge(gpu)
        queue = self.clock.current(gpu)
        queue.ready = max(queue.ready, end)

    def over(self, end: float) -> bool:
        """Has the host's time passed that moment? Asking takes a moment of it."""
        self.clock.pass_time()
        return end <= self.clock.host
