"""`nvidia-smi topo -m`, `topo -p2p` and `nvlink -s`: how the virtual GPUs reach each other, as the cards' data sheets say.

Cards with NVLink are NV#: by # links lead a copy from one to the other (`hardware.datasheet.NVLink`). All others are PHB, the way
over PCI Express that the machines of cloud and Kaggle print. GPUs of two nodes have no way but the network.
"""

import os

from virtualgpu.hardware.datasheet import Spec

TOPOLOGY = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
NETWORK = "  N/A  = On another node: reached over the network (virtual GPUs alone)\n"
PEERS = """
Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


def read(arguments: list[str]) -> str | None:
    """What is asked: "topo -m", "topo -p2p r", ... None for what is not modelled."""
    short = {"--matrix": "-m", "--p2p": "-p2p", "--status": "-s"}
    asked = " ".join(short.get(word, word) for word in arguments)
    return asked if asked in ("topo -m", "topo -p2p r", "topo -p2p w", "topo -p2p n", "nvlink -s") else None


def answer(what: str, cards: list[Spec], nodes: list[int], titles: list[str]) -> str:
    """The text. nodes: of each GPU. titles: as -L prints each GPU."""
    if what == "nvlink -s":
        return "".join(f"{title}\n{_status(card)}" for title, card in zip(titles, cards, strict=True))
    if what == "topo -m":
        return _matrix(cards, nodes)
    return _peers(cards, nodes, nvlink=what.endswith("n"))


def _status(card: Spec) -> str:
    if card.nvlink is None:
        return "\t NVML: Unable to retrieve NVLink information as all links are inActive\n"
    rate = card.nvlink.bandwidth / 1e9
    return "".join(f"\t Link {number}: {rate:g} GB/s\n" for number in range(card.nvlink.links))


def _matrix(cards: list[Spec], nodes: list[int]) -> str:
    def way(one: int, other: int) -> str:
        if one == other:
            return " X "
        if nodes[one] != nodes[other]:
            return "N/A"
        together = [
            round(card.peer.bandwidth / card.nvlink.bandwidth) for card in (cards[one], cards[other]) if card.nvlink
        ]
        return f"NV{min(together)}" if len(together) == 2 else "PHB"  # so many links lead a copy from one to the other

    gpus = range(len(cards))
    lines = ["\t".join(["", *(f"GPU{i}" for i in gpus), "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    # this machine's processors, of which each GPU is as near as the other; virtual GPUs have no memory node
    lines += ["\t".join([f"GPU{i}", *(way(i, j) for j in gpus), _processors(), "N/A", "", "N/A"]) for i in gpus]
    return "\n".join(lines) + "\n" + TOPOLOGY + (NETWORK if len(set(nodes)) > 1 else "")


def _peers(cards: list[Spec], nodes: list[int], nvlink: bool) -> str:
    """May one read and write the other's memory (or: is there NVLink between them)?"""

    def status(one: int, other: int) -> str:
        if one == other:
            return "X"
        if nodes[one] != nodes[other]:
            return "TNS"
        pair = (cards[one], cards[other])
        if nvlink:
            return "OK" if all(card.nvlink for card in pair) else "NS"
        return "OK" if all(card.peer_access for card in pair) else "CNS"

    gpus = range(len(cards))
    lines = ["\t".join([" ", *(f"GPU{i}" for i in gpus)])]
    lines += ["\t".join([f" GPU{i}", *(status(i, j) for j in gpus)]) for i in gpus]
    return "\n".join(lines) + "\n" + PEERS


def _processors() -> str:
    """As nvidia-smi lists them: 0-3,8."""
    here = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    runs: list[list[int]] = []
    for number in here:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
