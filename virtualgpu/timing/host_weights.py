"""What an operation costs the host beside the average one: some look for an algorithm, ask for workspaces or start several kernels.

data/host_weights.csv, which tests/gpu/host_table.py writes. What autograd does with a parameter's gradient is in the weight of the operation that
makes it; views that C++ calls by the thousand (`view`, `t`, `expand`, `slice`, `detach`: linear, matmul, autograd, DDP) in that of their caller.
"""

from typing import NamedTuple

from virtualgpu.timing import measured


class Weight(NamedTuple):
    """Of an operation in a forward and in a backward pass: shares of `hardware.hosts.Host.forward` and `.backward`."""

    forward: float
    backward: float


WEIGHTS = {
    row["operation"]: Weight(float(row["forward"]), float(row["backward"])) for row in measured.read("host_weights")
}
AVERAGE, ELEMENTWISE, OF_LIST = (WEIGHTS[name] for name in ("average", "elementwise", "list"))
EVALUATED, BIASED = WEIGHTS["evaluated batch norm"], WEIGHTS["convolution with bias"]
BEGUN = WEIGHTS["backward pass"].backward  # another thread wakes, and this one at the end
BIASES = {
    "convolution": 2,
    "_convolution": 2,
    "convolution_backward": 3,
}  # arguments that say so; of the last its sizes

# What a simple operation costs after a node's first: nodes of two to six took 0.45 to 0.55 of as many nodes. A second product costs as the first.
FURTHER, SIMPLE = 0.5, ELEMENTWISE.backward
UNRECORDED = 0.8  # without autograd's notes: the median of 146 chains, 0.73 to 0.89 for half of them
# An optimizer's step in Python on lists, in operations of an optimizer: once, for each parameter, and for each count of steps that it keeps
# on the CPU. SGD and AdamW, foreach and fused, of 10 to 400 tensors: 45 to 130 us, 2 to 3 for each, and 5 more for a count.
STEP = 5.0, 0.25, 0.4
# nn.DataParallel, in operations: the share for which Python's lock is held, a tensor that is broadcast, a module that is replicated. By least
# squares of 15 networks of torchvision without gradients, float16, 12 images a GPU, one GPU against two to four of an A100-SXM4, a TITAN RTX
# and an RTX 2080 Ti (ryujaehun/pytorch-gpu-benchmark, 2020-21): half of 135 within 5 %, 98 % within 15.
LOCKED, BROADCAST, REPLICATED = 0.52, 0.87, 0.80


def of(name: str, pointwise: bool, launches: int = 1) -> Weight:
    """Of the operation of that name. launches: its kernels; of what was not measured, each beyond the first costs a bare launch (4 us)."""
    if name in WEIGHTS:
        return WEIGHTS[name]
    first, more = ELEMENTWISE if pointwise else AVERAGE, launches - 1
    return first if not more else Weight(first.forward + 0.2 * more, first.backward + 0.25 * more)


def in_call(op, args) -> Weight:
    """Of the operation with these arguments. op: an engine's, with its name, weight and kind."""
    if op.kind.evaluates(args):
        return EVALUATED
    at = BIASES.get(op.name)
    return op.weight if at is None or args[at] is None or (at == 3 and not args[at][0]) else BIASED
