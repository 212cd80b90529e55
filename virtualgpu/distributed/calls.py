"""What a collective is asked to do: the operations of c10d, brought to one form.

Python's functions, DDP's C++ reducer, FSDP and DTensor all pass through the dispatcher's operations `c10d::...`, whose names
and arguments change least from version to version.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from virtualgpu._compat import distributed as _compat


@dataclass
class Call:
    """One collective of this rank.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter or barrier. pairs: (outputs, inputs)
    of each tensor that takes part; where an operation works in place, both are the same. nbytes: of the whole, as NCCL counts. op: a
    ReduceOp. root: the rank within the group. splits: rows of each rank, in what is received and what is sent.
    """

    kind: str
    pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)
    nbytes: int = 0
    op: object = None
    root: int = 0
    splits: tuple[list[int], list[int]] | None = None

    @functools.cached_property
    def reduction(self) -> tuple[str, float | None]:
        """The name of `op`, and the factor of a PREMUL_SUM."""
        return _compat.reduction(self.op)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that take part, pair by pair, outputs first; one that works in place comes twice."""
        return [tensor for pair in self.pairs for side in pair for tensor in side]

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The tensors that are written to, in the order of `pairs`."""
        return [tensor for outputs, _ in self.pairs for tensor in outputs]


def size_of(tensors) -> int:
    """Bytes of all elements together, also of those that share memory (expand)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _in_place(kind: str, tensors: Sequence[torch.Tensor], **options) -> Call:
    return Call(kind, [([tensor], [tensor]) for tensor in tensors], size_of(tensors), **options)


def _gathered(kind: str, pairs, size: int, **options) -> Call:
    """nbytes counts all ranks' parts, where this rank may have only its own."""
    pairs = [(list(outputs), list(inputs)) for outputs, inputs in pairs]
    return Call(kind, pairs, size * sum(size_of(inputs) for _, inputs in pairs), **options)


def _scattered(kind: str, pairs, size: int, **options) -> Call:
    pairs = [(list(outputs), list(inputs)) for outputs, inputs in pairs]
    return Call(kind, pairs, size * sum(size_of(outputs) for outputs, _ in pairs), **options)


def _allreduce(a, size):
    return _in_place("all_reduce", a["tensors"], op=a["reduce_op"])


def _all_gather_base(a, size):
    return _gathered("all_gather", [([a["output_tensor"]], [a["input_tensor"]])], size)


def _all_gather(a, size):
    return _gathered("all_gather", zip(a["output_tensors"], ([t] for t in a["input_tensors"]), strict=True), size)


def _all_gather_lists(a, size):
    """Of the coalesced form: a list for each rank, with an output for each input."""
    return _gathered(
        "all_gather", zip(zip(*a["output_lists"], strict=True), ([t] for t in a["input_list"]), strict=True), size
    )


def _all_gather_many(a, size):
    return _gathered("all_gather", (([o], [i]) for o, i in zip(a["outputs"], a["inputs"], strict=True)), size)


def _reduce_scatter_base(a, size):
    return _scattered("reduce_scatter", [([a["output_tensor"]], [a["input_tensor"]])], size, op=a["reduce_op"])


def _reduce_scatter(a, size):
    pairs = (([o], i) for o, i in zip(a["output_tensors"], a["input_tensors"], strict=True))
    return _scattered("reduce_scatter", pairs, size, op=a["reduce_op"])


def _reduce_scatter_many(a, size):
    pairs = (([o], [i]) for o, i in zip(a["outputs"], a["inputs"], strict=True))
    return _scattered("reduce_scatter", pairs, size, op=a["reduce_op"])


def _gather(a, size):
    outputs = a["output_tensors"] or [[] for _ in a["input_tensors"]]  # at the root alone
    pairs = zip(outputs, ([tensor] for tensor in a["input_tensors"]), strict=True)
    return _gathered("gather", pairs, size, root=a["root_rank"])


def _gather_base(a, size):
    return _gathered("gather", [([a["output_tensor"]], [a["input_tensor"]])], size, root=a["root_rank"])


def _scatter(a, size):
    inputs = a["input_tensors"] or [[] for _ in a["output_tensors"]]
    pairs = (([o], i) for o, i in zip(a["output_tensors"], inputs, strict=True))
    return _scattered("scatter", pairs, size, root=a["root_rank"])


def _all_to_all_base(a, size):
    output, given = a["output"], a["input"]
    equal = [[tensor.shape[0] // size] * size if tensor.dim() else [0] * size for tensor in (output, given)]
    splits = (list(a["output_split_sizes"]) or equal[0], list(a["input_split_sizes"]) or equal[1])
    for name, sizes, tensor in zip(("output", "input"), splits, (output, given), strict=True):
        rows = tensor.shape[0] if tensor.dim() else 0
        if len(sizes) != size or sum(sizes) != rows:
            raise RuntimeError(
                f"Split sizes doesn't match total dim 0 size: {name} has {rows} rows, and splits {sizes}"
            )
    return Call("all_to_all", [([output], [given])], size_of([given]), splits=splits)


def _all_to_all(a, size):
    return Call("all_to_all", [(list(a["output_tensors"]), list(a["input_tensors"]))], size_of(a["input_tensors"]))


def _barrier(a, size):
    return Call("barrier")


# the operation's name: how to read it, and does it return its outputs beside the work?
OPERATIONS = {
    "allreduce_": (_allreduce, True),
    "allreduce_coalesced_": (_allreduce, False),
    "_allgather_base_": (_all_gather_base, True),
    "allgather_": (_all_gather, True),
    "allgather_coalesced_": (_all_gather_lists, False),
    "allgather_into_tensor_coalesced_": (_all_gather_many, False),
    "_reduce_scatter_base_": (_reduce_scatter_base, True),
    "reduce_scatter_": (_reduce_scatter, True),
    "reduce_scatter_tensor_coalesced_": (_reduce_scatter_many, False),
    "broadcast_": (lambda a, size: _in_place("broadcast", a["tensors"], root=a["root_rank"]), True),
    "reduce_": (lambda a, size: _in_place("reduce", a["tensors"], op=a["reduce_op"], root=a["root_rank"]), False),
    "gather_": (_gather, False),
    "gather_into_tensor_": (_gather_base, True),
    "scatter_": (_scatter, True),
    "alltoall_base_": (_all_to_all_base, False),
    "alltoall_": (_all_to_all, True),
    "barrier": (_barrier, False),
}
