"""A collective of one rank, in one form (`Call`), and how the arguments of c10d's operations are read into it.

Python's functions, DDP's C++ reducer, FSDP and DTensor all pass through the dispatcher's operations `c10d::...`, whose names
and arguments change least from version to version. `collectives` has the table of which reader goes with which.

    read(collective, args, size)      args: the operation's, by name; size: of the group
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from virtualgpu._compat import distributed as _compat


@dataclass(frozen=True, eq=False)
class Collective:
    """What there is to know of one kind of collective: a row of the table in `collectives`.

    operations: those of c10d, and how to read each. functions: those of _c10d_functional, and what each makes. carry: how gloo carries
    the numbers. cost: its name in `timing.nccl`. checks: what NCCL refuses of this kind. splits: what a rank gives each of the others,
    and takes, where that may differ. scatters: this rank's own part is the output, not the input. root: "from" or "to" one rank.
    pairwise: what one rank gives must be what another takes. alike: what comes out where all ranks give what this one gives,
    and whether that is known; None: no rank knows what comes out in a dry run.
    """

    kind: str
    operations: Mapping[str, Callable]
    carry: Callable
    cost: str
    functions: Mapping[str, Callable] = field(default_factory=dict)
    checks: tuple[Callable, ...] = ()
    splits: Callable | None = None
    scatters: bool = False
    root: str = ""
    pairwise: bool = False
    alike: Callable | None = None


class Call:
    """One collective of this rank.

    pairs: (outputs, inputs) of each tensor that takes part; one list where an operation works in place. nbytes: of the whole, as NCCL
    counts. reduction: a ReduceOp's name, and the factor of a PREMUL_SUM. root: the rank within the group. splits: rows of each rank,
    in what is received and what is sent. tensors: all that take part. outputs: those that are written to.
    """

    def __init__(self, collective: Collective, pairs=(), nbytes: int = 0, op=None, root: int = 0, splits=None):
        self.collective, self.kind = collective, collective.kind
        self.pairs, self.nbytes, self.root, self.splits = pairs, nbytes, root, splits
        self.reduction: tuple[str, float | None] = ("", None) if op is None else _compat.reduction(op)
        self.outputs: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        for outputs, inputs in pairs:
            self.outputs += outputs
            self.tensors += outputs if outputs is inputs else (*outputs, *inputs)

    def uses(self, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those that `rank` gets numbers in, and those that it only reads: where one rank gives, or takes, it in place."""
        filled, read = [], []
        for outputs, inputs in self.pairs:
            one_way = outputs is inputs and self.collective.root
            keeps = one_way and (rank == self.root) == (self.collective.root == "from")
            (read if keeps else filled).extend(outputs)
            if outputs is not inputs:
                read.extend(inputs)
        return filled, read

    def release(self) -> None:
        """It is over: its tensors are not held."""
        self.pairs, self.outputs, self.tensors = (), [], []

    def with_values(self, values: Callable[[torch.Tensor], torch.Tensor]) -> "Call":
        """The same of other tensors: values(tensor) in the place of each."""
        call = Call(self.collective, [tuple([values(t) for t in side] for side in pair) for pair in self.pairs])
        call.nbytes, call.reduction, call.root, call.splits = self.nbytes, self.reduction, self.root, self.splits
        return call


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements together, also of those that share memory (expand)."""
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.numel() * tensor.element_size()
    return nbytes


# -- readers


def in_place(collective: Collective, args: Mapping, size: int) -> Call:
    """Of tensors that are read and written."""
    tensors, pairs = args["tensors"], []
    for tensor in tensors:
        pairs.append(([tensor],) * 2)
    return Call(collective, pairs, size_of(tensors), args.get("reduce_op"), args.get("root_rank", 0))


def parts(collective: Collective, pairs: Iterable, args: Mapping, size: int) -> Call:
    """Of what has a part for each rank on one side, and this rank's part on the other; nbytes counts all ranks' parts."""
    pairs = [(list(outputs), list(inputs)) for outputs, inputs in pairs]
    nbytes = size * sum(size_of(pair[0 if collective.scatters else 1]) for pair in pairs)
    return Call(collective, pairs, nbytes, args.get("reduce_op"), args.get("root_rank", 0))


def one_tensor(collective: Collective, args: Mapping, size: int) -> Call:
    """All ranks' parts in one tensor."""
    return parts(collective, [([args["output_tensor"]], [args["input_tensor"]])], args, size)


def one_tensor_each(collective: Collective, args: Mapping, size: int) -> Call:
    """The same of several tensors at once."""
    pairs = (([output], [part]) for output, part in zip(args["outputs"], args["inputs"], strict=True))
    return parts(collective, pairs, args, size)


def lists(collective: Collective, args: Mapping, size: int) -> Call:
    """A list with a tensor for each rank; none where only the root has one."""
    outputs, inputs = args["output_tensors"], args["input_tensors"]
    if collective.scatters:
        outputs, inputs = [[tensor] for tensor in outputs], inputs or [[] for _ in outputs]
    else:
        outputs, inputs = outputs or [[] for _ in inputs], [[tensor] for tensor in inputs]
    return parts(collective, zip(outputs, inputs, strict=True), args, size)


def lists_by_rank(collective: Collective, args: Mapping, size: int) -> Call:
    """A list for each rank, with an output for each input."""
    outputs, inputs = zip(*args["output_lists"], strict=True), ([tensor] for tensor in args["input_list"])
    return parts(collective, zip(outputs, inputs, strict=True), args, size)


def rows(collective: Collective, args: Mapping, size: int) -> Call:
    """One tensor on each side, of which each rank has some rows. Raises RuntimeError for splits that are not all of them."""
    tensors, splits = (args["output"], args["input"]), []
    for name, tensor in zip(("output", "input"), tensors, strict=True):
        count = tensor.shape[0] if tensor.dim() else 0
        sizes = list(args[f"{name}_split_sizes"]) or [count // size] * size
        if len(sizes) != size or sum(sizes) != count:
            raise RuntimeError(
                f"Split sizes doesn't match total dim 0 size: {name} has {count} rows, and splits {sizes}"
            )
        splits.append(sizes)
    output, source = tensors
    return Call(collective, [([output], [source])], size_of([source]), splits=tuple(splits))


def a_tensor_each(collective: Collective, args: Mapping, size: int) -> Call:
    """A tensor for each rank on both sides."""
    inputs = list(args["input_tensors"])
    return Call(collective, [(list(args["output_tensors"]), inputs)], size_of(inputs))


def nothing(collective: Collective, args: Mapping, size: int) -> Call:
    """Without tensors that count."""
    return Call(collective)


# -- what a rank gives and takes


class Splits(NamedTuple):
    """Elements that a rank gives to each rank, and takes from each."""

    gives: list[int]
    takes: list[int]


def splits_of_rows(call: Call, rank: int, size: int) -> Splits | None:
    """Of an all_to_all; None where each rank gives each of the others as much as it takes from it, as nearly always."""
    outputs, inputs = call.pairs[0]
    if call.splits is None:
        gives, takes = ([tensor.numel() for tensor in side] for side in (inputs, outputs))
    else:
        width = [tensor.numel() // tensor.shape[0] if tensor.numel() else 0 for tensor in (inputs[0], outputs[0])]
        gives, takes = ([row * part for part in side] for row, side in zip(width, reversed(call.splits), strict=True))
    return None if len({*gives, *takes}) <= 1 else Splits(gives, takes)


def splits_of_parts(call: Call, rank: int, size: int) -> Splits | None:
    """Of lists with a tensor for each rank; None where all are alike."""
    scatters = call.collective.scatters
    if size > 1 and all(len(inputs if scatters else outputs) == 1 for outputs, inputs in call.pairs):
        return None  # in one tensor, whose size `checks` knows
    own, all_parts, uneven = 0, [0] * size, False
    for outputs, inputs in call.pairs:
        (one,), many = (outputs, inputs) if scatters else (inputs, outputs)
        count = one.numel()
        counts = [count] * size if len(many) == 1 else [tensor.numel() for tensor in many]
        uneven = uneven or any(other != count for other in counts)
        own += count
        all_parts = [total + other for total, other in zip(all_parts, counts, strict=True)]
    if not uneven:
        return None
    return Splits(all_parts, [all_parts[rank]] * size) if scatters else Splits([own] * size, all_parts)
