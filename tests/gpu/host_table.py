"""`virtualgpu/timing/data/host_weights.csv`: what each operation costs a host beside the average one, from the chains of h100_host.csv.

    python -m tests.gpu.host_table      writes the table

A chain is 40 modules alike on a few numbers, from an empty queue (an H100's virtual machine with 16 processors of a Xeon of Sapphire Rapids,
PyTorch 2.11, 2026-11, two visits): a weight is the mean of its rows over UNIT, what the average chain takes, as a program's time is
a sum. No program's step is an input.
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
CASTS = {
    "linear": 2,
    "linear no bias": 1,
    "matmul": 1,
    "conv3x3": 1,
    "conv1x1": 1,
    "depthwise": 1,
    "conv3x3 bias": 0,
    "conv bias": 0,
    "grucell": 0,
    "sdpa": 0,
}


class Chain(NamedTuple):
    """Microseconds that a row of `name` has beside the operation, and of how many such operations it is."""

    name: str
    beside: float = 0.0
    count: int = 1


def _chains(names: str, beside: float = 0.0, count: int = 1) -> list[Chain]:
    return [Chain(name, beside, count) for name in names.split(", ")]


PRODUCTS = [*_chains("linear no bias, matmul, mm", 0, 2), Chain("linear", 8, 2)]  # two products; with a bias, a sum
CONVOLUTIONS, BIASED = _chains("conv3x3, conv1x1, depthwise"), _chains("conv3x3 bias, conv bias")
NORM = _chains("batch_norm, batch_norm1d")
POINTWISE = _chains("relu, gelu, silu, add, mul scalar, exp, sigmoid, tanh, rsub, neg, leaky_relu, hardswish, softplus")
VIEWS = [Chain("views", 0, 3), *_chains("transpose pair, permute pair, unsqueeze pair", 0, 2), *_chains("t, mT")]
CALLED = "transpose, permute, unsqueeze, squeeze, select, split, split_with_sizes, unbind"  # by programs, not by C++
SDPA = [Chain("sdpa", 10), Chain("sdpa causal 4d")]  # two views
SDPA_BACKWARD = [Chain("sdpa", 43), Chain("sdpa causal 4d", 32)]  # and two sums of gradients
FORWARD = {
    "elementwise": POINTWISE,
    CALLED: VIEWS,
    "mm, addmm, bmm, baddbmm": _chains("linear, linear no bias, matmul, mm"),
    "convolution, _convolution": CONVOLUTIONS,
    "convolution with bias": BIASED,
    "native_batch_norm, _native_batch_norm_legit, _batch_norm_with_update": [
        Chain(c.name, 16) for c in NORM
    ],  # its counter
    "native_layer_norm": _chains("layer_norm"),
    "_fused_rms_norm": _chains("rms_norm"),
    "native_group_norm": _chains("group_norm"),
    "_scaled_dot_product_flash_attention, _scaled_dot_product_efficient_attention, _scaled_dot_product_cudnn_attention": SDPA,
    "_thnn_fused_gru_cell": [Chain("grucell", 60)],  # two products
    "_thnn_fused_lstm_cell": [Chain("lstmcell", 60)],
    "_softmax": _chains("softmax"),
    "_log_softmax": _chains("log_softmax"),
    "native_dropout": _chains("dropout"),
    "max_pool2d_with_indices": _chains("max_pool"),
    "sort": _chains("sort"),
    "topk": _chains("topk"),
    "multinomial": _chains("multinomial"),
    "randperm": _chains("randperm"),
    "index_select": _chains("index_select"),
    "index_add": _chains("index_add"),
    "scatter_add": _chains("scatter_add"),
}
BACKWARD = {
    "elementwise": POINTWISE[1:],
    CALLED: VIEWS,
    "mm, addmm, bmm, baddbmm": PRODUCTS,
    "convolution, _convolution, convolution_backward": CONVOLUTIONS,
    "convolution with bias": BIASED,
    "native_batch_norm_backward": NORM,
    "native_layer_norm_backward": _chains("layer_norm"),
    "_fused_rms_norm_backward": _chains("rms_norm"),
    "native_group_norm_backward": _chains("group_norm"),
    "_scaled_dot_product_flash_attention_backward, _scaled_dot_product_efficient_attention_backward, "
    "_scaled_dot_product_cudnn_attention_backward": SDPA_BACKWARD,
    "_thnn_fused_gru_cell_backward": [Chain("grucell", 195)],  # four products, and sums of gradients
    "_thnn_fused_lstm_cell_backward_impl": [Chain("lstmcell", 203)],
    "_softmax_backward_data": _chains("softmax"),
    "_log_softmax_backward_data": _chains("log_softmax"),
    "max_pool2d_with_indices_backward": _chains("max_pool"),
    "threshold_backward": _chains("relu, leaky_relu"),
}
# Of neither visit, or of what no chain has alone; microseconds are those of chains
KEPT = [
    ("average", 1.0, 1.0, "by definition: any other operation"),
    ("list", 0.5, 0.5, "a list of tensors: h100_host.csv, _foreach_add_ and others of 10, 10 us"),
    ("_cudnn_rnn", 7.5, 1.0, "h100_host.csv, gru and lstm: a layer of eight steps, 127 to 190 us"),
    ("_cudnn_rnn_backward", 23.2, 29.0, "h100_host.csv, gru and lstm: 406 to 531 us"),
    ("logsumexp", 5.0, 5.0, "eight more operations, that C++ calls one after the other: half as much each"),
    (
        "binary_cross_entropy_with_logits",
        3.0,
        1.0,
        "four more operations, that C++ calls one after the other: half as much each",
    ),
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
    with open(HERE / "h100_host.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
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
    for pass_, table in (("forward", FORWARD), ("backward", BACKWARD)):
        for names, chains in table.items():
            for name in names.split(", "):
                found.setdefault(name, {})[pass_] = weight(pass_, chains)
                source[name] = "h100_host.csv: " + " and ".join(chain.name for chain in chains)
    found["_to_copy"] = {"forward": cast("forward"), "backward": cast("backward")}
    source["_to_copy"] = "h100_host.csv: chains under autocast beside the same without, and to half"
    found["evaluated batch norm"] = {"forward": weight("evaluation", NORM), "backward": 1.0}
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
