"""The collectives that there are, a row of the table for each with all that the engine knows of it; and whether ranks mean the same one.

A new one is a row here, with its functions beside those that are there: readers and checks in `calls`, what makes the tensors of functional
ones above the table, carriers in `transport`, and its time in `timing.nccl`.
"""

import os
import struct
from collections.abc import Mapping, Sequence

import torch

from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import transport
from virtualgpu.distributed.calls import (
    DTYPES_BY_NUMBER,
    KINDS,
    REDUCTIONS,
    Call,
    Collective,
    Splits,
    a_tensor_each,
    check_contiguous,
    check_parts,
    check_reduction,
    check_rooted,
    in_place,
    parts,
    parts_by_rank,
    rows,
    splits_of_parts,
    splits_of_rows,
)
from virtualgpu.distributed.shared_clock import ROOM, SLOTS, Arrivals, Signature, SingleRankArrivals

# -- Functional collectives (`_c10d_functional`), which DTensor and clip_grad_norm_ use: new tensors, made on the GPU, and a wait later.
#
# PyTorch's C++ would make the results on what it takes for their device, the CPU. Here they are made by ordinary operations, so that
# each has its place, its bytes and its time: make(collective, tensor, args, size) gives the result and the Call that fills it.

Filled = tuple[torch.Tensor, Call]


def functional_copy(collective: Collective, tensor: torch.Tensor, args: Mapping, size: int) -> Filled:
    """Of a copy, in place."""
    return functional_in_place(collective, tensor.clone(memory_format=torch.contiguous_format), args, size)


def functional_in_place(collective: Collective, tensor: torch.Tensor, args: Mapping, size: int) -> Filled:
    """Of the tensor itself."""
    of_c10d = {"tensors": [tensor], "reduce_op": _reduce_op(args), "root_rank": args.get("src", 0)}
    return tensor, in_place(collective, of_c10d, size)


def functional_parts(collective: Collective, tensor: torch.Tensor, args: Mapping, size: int) -> Filled:
    """Into a tensor of all ranks' parts, or of one."""
    out = args.get("out")
    if out is None:
        count = tensor.shape[0] // size if collective.scatters else tensor.shape[0] * size
        out = tensor.new_empty((count, *tensor.shape[1:]))
    return out, parts(collective, {"output": out, "input": tensor.contiguous(), "reduce_op": _reduce_op(args)}, size)


def functional_rows(collective: Collective, tensor: torch.Tensor, args: Mapping, size: int) -> Filled:
    """Rows from each rank."""
    out = tensor.new_empty((sum(args["output_split_sizes"]), *tensor.shape[1:]))
    return out, rows(collective, {**args, "output": out, "input": tensor.contiguous()}, size)


def _reduce_op(args: Mapping):
    """A name, or (from 2.15 on) an operation."""
    op = args.get("reduce_op")
    return getattr(_compat.ReduceOp, op.upper()) if isinstance(op, str) else op


# -- the table


TABLE = (
    Collective(
        "all_reduce",
        operations=dict.fromkeys(("allreduce_", "allreduce_coalesced_"), in_place),
        functions={
            "all_reduce": functional_copy,
            "all_reduce_": functional_in_place,
            "all_reduce_coalesced": functional_copy,
            "all_reduce_coalesced_": functional_in_place,
        },
        carry=transport.all_reduce,
        checks=(check_reduction,),
        alike=transport.all_reduce_alike,
    ),
    Collective(
        "all_gather",
        operations={
            **dict.fromkeys(("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"), parts),
            "allgather_coalesced_": parts_by_rank,
        },
        functions={f"all_gather_into_tensor{form}": functional_parts for form in ("", "_out", "_coalesced")},
        carry=transport.all_gather,
        checks=(check_parts,),
        splits=splits_of_parts,
        pairwise=True,
        alike=transport.all_gather_alike,
    ),
    Collective(
        "reduce_scatter",
        operations=dict.fromkeys(
            ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"), parts
        ),
        functions={f"reduce_scatter_tensor{form}": functional_parts for form in ("", "_out", "_coalesced")},
        carry=transport.reduce_scatter,
        checks=(check_reduction, check_parts),
        splits=splits_of_parts,
        scatters=True,
        alike=transport.reduce_scatter_alike,
    ),
    Collective(
        "all_to_all",
        operations={"alltoall_base_": rows, "alltoall_": a_tensor_each},
        functions={"all_to_all_single": functional_rows},
        carry=transport.all_to_all,
        checks=(check_contiguous,),
        splits=splits_of_rows,
        pairwise=True,
    ),
    Collective(
        "broadcast",
        operations={"broadcast_": in_place},
        functions={"broadcast": functional_copy, "broadcast_": functional_in_place},
        carry=transport.broadcast,
        root="from",
        alike=transport.broadcast_alike,
    ),
    Collective(
        "reduce",
        operations={"reduce_": in_place},
        carry=transport.reduce,
        checks=(check_reduction,),
        root="to",
        alike=transport.reduce_alike,
    ),
    Collective(
        "gather",
        operations={"gather_": parts, "gather_into_tensor_": parts},
        carry=transport.gather,
        checks=(check_rooted,),
        root="to",
        alike=transport.all_gather_alike,
    ),
    Collective(
        "scatter",
        operations={"scatter_": parts},
        carry=transport.scatter,
        checks=(check_rooted,),
        scatters=True,
        root="from",
        alike=transport.scatter_alike,
    ),
    Collective("barrier", operations={"barrier": lambda row, args, size: Call(row)}, carry=transport.barrier),
)

OPERATIONS = {name: (row, read) for row in TABLE for name, read in row.operations.items()}  # of c10d
FUNCTIONS = {name: (row, make) for row in TABLE for name, make in row.functions.items()}  # of _c10d_functional


# -- Do ranks mean the same collective, and how are two that differ named?
#
# NCCL compares nothing: ranks whose calls differ hang, write past a tensor's end, or get wrong numbers without a word; and gloo would
# end the process. Here a rank says what it has come to before its numbers travel, and looks at what others have said. Of two ranks
# whose calls differ at least one sees that in time and sends nothing; the other learns of it when it asks for the end.
#
# How many elements a rank gives each of the others, and takes from each, may differ between them (all_to_all, lists of all_gather). A
# call in which these are not all alike says so, and they stand behind the message logs in the group's file.


def _has_splits(signature: Signature) -> bool:
    return bool(signature[2] & 1)


class Agreement:
    """Of one group; ranks: the global rank of each member. What ranks have said of splits is there as long as a page of arrival times
    remembers a collective."""

    def __init__(self, arrivals: Arrivals, ranks: Sequence[int]):
        self.arrivals, self.size, self.ranks = arrivals, arrivals.size, ranks
        self._record = struct.Struct(f"{2 * arrivals.size}q")
        self._mine: dict[int, Splits] = {}

    def write(self, number: int, splits: Splits) -> None:
        """This rank says its splits, before it says that it has come to collective `number`."""
        self._mine[number] = splits
        self._mine.pop(number - SLOTS, None)
        if self.arrivals.file is not None:
            data = self._record.pack(*splits.gives, *splits.takes)
            os.pwrite(self.arrivals.file, data, self._offset(self.arrivals.rank, number))

    def difference(self, number: int, signature: Signature, other: int, other_signature: Signature) -> str | None:
        """Where this rank and another member do not mean the same by collective `number`, or that one's two sides do not fit: what each
        came to. None where they do.
        """
        if isinstance(self.arrivals, SingleRankArrivals):
            return None
        message = self._difference(number, self.arrivals.rank, signature, other, other_signature)
        if message is None and _has_splits(other_signature):
            message = self._difference(number, other, other_signature, other, other_signature)
        return message

    def _difference(
        self, number: int, rank: int, signature: Signature, other: int, other_signature: Signature
    ) -> str | None:
        if signature == other_signature and not _has_splits(signature):
            return None
        row, dtype = self._row_and_dtype(signature)
        here, there = f"rank {self.ranks[rank]} came to", f"rank {self.ranks[other]} came to"
        uneven = _has_splits(signature) or _has_splits(other_signature)
        if (
            not uneven
            or row is not self._row_and_dtype(other_signature)[0]
            or signature[2] >> 1 != other_signature[2] >> 1
        ):
            first, second = self._text(signature), self._text(other_signature)
            return f"{here} {first} where {there} {second}{' in other sizes or dtypes' * (first == second)}"
        # alike but for what each rank gives and takes
        splits, others = self._read(rank, number, signature), self._read(other, number, other_signature)
        here, there = f"{here} {row.kind}", f"{there} {row.kind}"
        if rank == other:
            gives, takes = splits.gives[rank], splits.takes[rank]
            return f"{here} and gives itself {gives} {dtype}, but takes {takes}" if gives != takes else None
        if not row.pairwise:
            same = splits.gives == others.gives
            return None if same else f"{here} of {splits.gives} {dtype} where {there} of {others.gives}"
        gives, taken = splits.gives[other], others.takes[rank]
        if gives != taken:
            return f"{here} and gives rank {self.ranks[other]} {gives} {dtype} where {there} and takes {taken} from it"
        takes, sent = splits.takes[other], others.gives[rank]
        if takes != sent:
            return f"{here} and takes {takes} {dtype} from rank {self.ranks[other]} where {there} and gives it {sent}"
        return None

    @staticmethod
    def _row_and_dtype(signature: Signature) -> tuple[Collective, str]:
        return TABLE[signature[0] % KINDS], str(DTYPES_BY_NUMBER[signature[2] >> 1 & 0xFF]).removeprefix("torch.")

    def _read(self, rank: int, number: int, signature: Signature) -> Splits:
        """The splits of a rank that said this signature."""
        if not _has_splits(signature):
            whole = self._row_and_dtype(signature)[0].kind == "all_to_all"
            each = signature[1] // self.size if whole else signature[1]
            return Splits([each] * self.size, [each] * self.size)
        if rank == self.arrivals.rank:
            return self._mine[number]
        assert self.arrivals.file is not None
        data = os.pread(self.arrivals.file, self._record.size, self._offset(rank, number))
        counts = list(self._record.unpack(data))
        return Splits(counts[: self.size], counts[self.size :])

    def _offset(self, rank: int, number: int) -> int:
        return self.arrivals.nbytes + self.size * ROOM + (rank * SLOTS + number % SLOTS) * self._record.size

    def _text(self, signature: Signature) -> str:
        """As people say it: all_reduce of 4 float32 (sum)."""
        (collective, dtype), (_, count, details, _) = self._row_and_dtype(signature), signature
        if collective.kind == "barrier":
            return "barrier"
        pairs, root, reduction = details >> 37, details >> 17 & 0xFFFFF, REDUCTIONS[details >> 9 & 0xFF]
        several = f"{pairs} tensors with " if pairs > 1 else ""
        reduced = f" ({reduction.lower()})" if reduction else ""
        at = f" {collective.root} rank {self.ranks[root] if root < self.size else root}" if collective.root else ""
        return f"{collective.kind} of {several}{count} {dtype}{reduced}{at}"
