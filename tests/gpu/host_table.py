"""`virtualgpu/timing/data/host_weights.csv`: what each operation costs a host beside the average one, from the chains of h100_host.csv.

    python -m tests.gpu.host_table      writes the table

A chain is 40 modules alike on a few numbers, from an empty queue (an H100's virtual machine with 16 processors of a Xeon of Sapphire Rapids,
PyTorch 2.11, 2026-11, two visits): a weight is the mean of its rows over UNIT, what the average chain takes, as a program's time is
a sum. host_chains.csv has which chains are of which operations. No program's step is an input.
"""

import csv
import io
from pathlib import Path
from statistics import mean
from typing import NamedTuple

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "virtualgpu" / "timing" / "data" / "host_weights.csv"
FIELDS = "operation", "forward", "backward", "source"
UNIT = {"evaluation": 16.0, "forward": 20.0, "backward": 16.0}  # microseconds
AUTOCAST = "AMP", "AMP bfloat16"
# Conversions in a module of these chains under autocast (0: not counted): its rows cost these, too
CASTS = {"linear": 2} | dict.fromkeys(("linear no bias", "matmul", "conv3x3", "conv1x1", "depthwise"), 1)
CASTS |= dict.fromkeys(("conv3x3 bias", "conv bias", "grucell", "sdpa"), 0)


class Chain(NamedTuple):
    """Microseconds that a row of `name` has beside the operation, and of how many such operations it is."""

    name: str
    beside: float
    count: int


def chain(text: str) -> Chain:
    """As host_chains.csv has it: name - microseconds / number, of which the last two may be missing."""
    text, _, count = text.partition(" / ")
    name, _, beside = text.partition(" - ")
    return Chain(name, float(beside or 0), int(count or 1))


def table(name: str) -> list[dict[str, str]]:
    with open(HERE / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


MORE = "more operations, that C++ calls one after the other: half as much each"
# Of neither visit, or of what no chain has alone; microseconds are those of chains
KEPT = [
    ("average", 1.0, 1.0, "by definition: any other operation"),
    ("list", 0.5, 0.5, "a list of tensors: h100_host.csv, _foreach_add_ and others of 10, 10 us"),
    ("_cudnn_rnn", 7.5, 1.0, "h100_host.csv, gru and lstm: a layer of eight steps, 127 to 190 us"),
    ("_cudnn_rnn_backward", 23.2, 29.0, "h100_host.csv, gru and lstm: 406 to 531 us"),
    ("logsumexp", 5.0, 5.0, f"eight {MORE}"),
    ("binary_cross_entropy_with_logits", 3.0, 1.0, f"four {MORE}"),
    (
        "without autograd",
        0.8,
        0.0,
        "of the same with its notes: the median of 146 chains, 0.73 to 0.89 for half of them",
    ),
    ("further in a node", 0.0, 0.5, "of the first: nodes of two to six took 0.45 to 0.55 of as many nodes"),
    # of an optimizer's operations; SGD and AdamW, foreach and fused, of 10 to 400 tensors
    ("step", 5.0, 0.0, "an optimizer's Python, on lists: 45 to 130 us"),
    ("step, a parameter", 0.25, 0.0, "2 to 3 us"),
    ("step, a count of steps on the CPU", 0.4, 0.0, "5 us"),
    # nn.DataParallel: by least squares of 15 networks of torchvision without gradients, float16, 12 images a GPU, one GPU against two to four of
    # an A100-SXM4, a TITAN RTX and an RTX 2080 Ti; half of 135 within 5 %, 98 % within 15
    ("replicas, Python's lock", 0.52, 0.0, "ryujaehun/pytorch-gpu-benchmark, 2020-21: the share for which it is held"),
    ("replicas, a tensor", 0.87, 0.0, "ryujaehun/pytorch-gpu-benchmark, 2020-21: that is broadcast"),
    ("replicas, a module", 0.8, 0.0, "ryujaehun/pytorch-gpu-benchmark, 2020-21: that is made again"),
]


def measured() -> dict[tuple[str, str], list[tuple[str, float]]]:
    """(precision, microseconds) of each chain and pass."""
    found: dict = {}
    for row in table("h100_host"):
        found.setdefault((row["chain"], row["pass"]), []).append((row["precision"], float(row["us"])))
    return found


FOUND = measured()


def times(chain: str, pass_: str, autocast: bool | None = None) -> list[float]:
    """Microseconds of the chain's rows; of those under autocast, or of the others alone, where asked for."""
    rows = FOUND.get((chain, pass_), [])
    return [us for precision, us in rows if autocast in (None, precision in AUTOCAST)]


def weight(pass_: str, chains: list[Chain]) -> float:
    each = [
        (us - chain.beside) / chain.count
        for chain in chains
        for us in times(chain.name, pass_, False if chain.name in CASTS else None)
    ]
    return mean(each) / UNIT[pass_]


def cast(pass_: str) -> float:
    """One conversion: what autocast adds to the chains that it converts for, and one of two in "to half"."""
    added = [
        (mean(times(chain, pass_, True)) - mean(times(chain, pass_, False))) / casts
        for chain, casts in CASTS.items()
        if casts
    ]
    return mean([*added, times("to half", pass_)[0] / 2]) / UNIT[pass_]


def rows() -> list[dict]:
    """The table's rows. A derivative that autograd takes notes of (create_graph) is timed as forward, of 20 us for 16."""
    found: dict[str, dict[str, float]] = {}
    source = {}
    for row in table("host_chains"):
        chains = [chain(text) for text in row["chains"].split("; ")]
        for name in row["operations"].split("; "):
            found.setdefault(name, {})[row["pass"]] = weight(row["pass"], chains)
            source[name] = "h100_host.csv: " + " and ".join(chain.name for chain in chains)
    found["_to_copy"] = {"forward": cast("forward"), "backward": cast("backward")}
    source["_to_copy"] = "h100_host.csv: chains under autocast beside the same without, and to half"
    found["evaluated batch norm"] = {
        "forward": weight("evaluation", [chain("batch_norm"), chain("batch_norm1d")]),
        "backward": 1.0,
    }
    source["evaluated batch norm"] = "h100_host.csv: batch_norm and batch_norm1d, evaluation"
    # not by UNIT: neither is in the order that makes operations dearer
    found["backward pass"] = {"forward": 0.0, "backward": times("waking a thread and back", "whole")[0] / 21}
    source["backward pass"] = "h100_host.csv: waking a thread and back, of hosts.toml's 21 us"
    for values in found.values():
        if "forward" not in values:
            values["forward"] = 0.8 * values["backward"]
    fitted = [(name, v["forward"], v.get("backward", 1.0), source[name]) for name, v in found.items()]
    return [
        dict(zip(FIELDS, (name, round(f, 2), round(b, 2), said), strict=True)) for name, f, b, said in KEPT + fitted
    ]


def written() -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows())
    return file.getvalue()


def main() -> None:
    TABLE.write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
