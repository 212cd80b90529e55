"""Do ranks mean the same collective? What each says of its call, in four whole numbers, and in which words two that differ are named.

NCCL compares nothing: ranks whose calls differ hang, write past a tensor's end, or get wrong numbers without a word; and gloo would
end the process. Here a rank says what it has come to before its numbers travel, and looks at what others have said. Of two ranks
whose calls differ at least one sees that in time and sends nothing; the other learns of it when it asks for the end.

How many elements a rank gives each of the others, and takes from each, may differ between them (all_to_all, lists of all_gather). A
call in which these are not all alike says so, and they stand behind the tapes of the group's file.
"""

import os
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from virtualgpu.distributed import transport
from virtualgpu.distributed.arrivals import SLOTS, Arrivals, Words
from virtualgpu.distributed.calls import Call
from virtualgpu.distributed.message_log import ROOM

KINDS = tuple(transport.CARRIERS)
DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
OPERATIONS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
ROOTED = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}
PAIRWISE = (
    "all_to_all",
    "all_gather",
)  # what one rank gives must be what another takes; elsewhere both lists are alike
_kind = {name: number for number, name in enumerate(KINDS)}
_dtype = {dtype: number for number, dtype in enumerate(DTYPES)}
_operation = {name: number for number, name in enumerate(OPERATIONS)}


class Splits(NamedTuple):
    """Elements that a rank gives to each rank, and takes from each."""

    gives: list[int]
    takes: list[int]


def words_of(call: Call, splits: Splits | None) -> Words:
    """What a rank says of its call. Equal words without splits are equal calls."""
    first = call.pairs[0] if call.pairs else ([], [])
    one = first[0] if call.kind in ("reduce_scatter", "scatter") else first[1]
    dtype, count, several = _dtype[one[0].dtype] if one else 0, one[0].numel() if one else 0, 0
    if len(call.pairs) > 1 or len(one) > 1:
        tensors = [t for pair in call.pairs for t in (pair[0] if one is first[0] else pair[1])]
        count = sum(tensor.numel() for tensor in tensors)
        if call.kind != "all_to_all":  # there it is all the same which rank has a tensor for each, and which a part
            several = zlib.crc32(repr([(tensor.numel(), _dtype[tensor.dtype]) for tensor in tensors]).encode())
    operation = _operation[call.reduction[0]] if call.op is not None else 0
    tensors = len(call.pairs)
    details = ((((tensors << 20 | call.root & 0xFFFFF) << 8 | operation) << 8 | dtype) << 1) | (splits is not None)
    return call.nbytes * len(KINDS) + _kind[call.kind], count, details, several


def kind_of(words: Words) -> str:
    """The kind of collective that a rank said."""
    return KINDS[words[0] % len(KINDS)]


def bytes_of(words: Words) -> int:
    """The bytes of the whole that a rank said."""
    return words[0] // len(KINDS)


def has_splits(words: Words) -> bool:
    """Has a rank said how much it gives each of the others?"""
    return bool(words[2] & 1)


def splits_of(call: Call, rank: int, size: int) -> Splits | None:
    """None where each rank gives each of the others as much as it takes from it, as nearly always."""
    if call.kind == "all_to_all":
        (outputs, inputs) = call.pairs[0]
        if call.splits is None:
            sides = [[tensor.numel() for tensor in side] for side in (inputs, outputs)]
        else:
            rows = [tensor.numel() // tensor.shape[0] if tensor.numel() else 0 for tensor in (inputs[0], outputs[0])]
            sides = [[row * part for part in side] for row, side in zip(rows, reversed(call.splits), strict=True)]
        return None if len({*sides[0], *sides[1]}) <= 1 else Splits(*sides)
    if call.kind not in ("all_gather", "reduce_scatter"):
        return None
    gathers = call.kind == "all_gather"
    if size > 1 and all(len(outputs if gathers else inputs) == 1 for outputs, inputs in call.pairs):
        return None  # in one tensor, whose size `check` knows
    sums: list[list[int]] = [[0] * size, [0] * size]
    uneven = False
    for outputs, inputs in call.pairs:
        (one,), many = (inputs, outputs) if gathers else (outputs, inputs)
        count = one.numel()
        parts = [count] * size if len(many) == 1 else [tensor.numel() for tensor in many]
        uneven = uneven or any(part != count for part in parts)
        for other, part in enumerate(parts):
            sums[0][other] += count
            sums[1][other] += part
    if not uneven:
        return None
    return Splits(*sums) if gathers else Splits(sums[1], [sums[0][rank]] * size)


class SplitsOfRanks:
    """What ranks have said of splits, as long as a page of moments remembers a collective."""

    def __init__(self, arrivals: Arrivals):
        self.arrivals, self.size = arrivals, arrivals.size
        self.record = struct.Struct(f"{2 * arrivals.size}q")
        self.mine: dict[int, Splits] = {}

    def write(self, number: int, splits: Splits) -> None:
        """This rank says them, before it says that it has come to collective `number`."""
        self.mine[number] = splits
        self.mine.pop(number - SLOTS, None)
        if self.arrivals.file is not None:
            os.pwrite(
                self.arrivals.file, self.record.pack(*splits.gives, *splits.takes), self._at(self.arrivals.rank, number)
            )

    def read(self, rank: int, number: int, words: Words) -> Splits:
        """Those of a rank that said these words of it."""
        if not has_splits(words):
            each = words[1] // self.size if kind_of(words) == "all_to_all" else words[1]
            return Splits([each] * self.size, [each] * self.size)
        if rank == self.arrivals.rank:
            return self.mine[number]
        read = self.record.unpack(os.pread(self.arrivals.file, self.record.size, self._at(rank, number)))
        return Splits(list(read[: self.size]), list(read[self.size :]))

    def _at(self, rank: int, number: int) -> int:
        return self.arrivals.nbytes + self.size * ROOM + (rank * SLOTS + number % SLOTS) * self.record.size


def difference(
    number: int, one: tuple[int, Words], other: tuple[int, Words], splits: SplitsOfRanks, ranks: Sequence[int]
) -> str | None:
    """Where two ranks of a group (its members' global ranks: `ranks`) do not mean the same by collective `number`: what each came to,
    in words. None where they do.
    """
    (mine, said), (theirs, heard) = one, other
    if said == heard and not has_splits(said):
        return None
    here, there = ranks[mine], ranks[theirs]
    if _alike(said, heard):
        ours, others = splits.read(mine, number, said), splits.read(theirs, number, heard)
        return _of_parts(kind_of(said), _name(said), (mine, ours), (theirs, others), ranks)
    first, second = told(said, ranks), told(heard, ranks)
    if first == second:
        second += " in other sizes or dtypes"
    return f"rank {here} came to {first} where rank {there} came to {second}"


def _of_parts(kind: str, dtype: str, one: tuple[int, Splits], other: tuple[int, Splits], ranks) -> str | None:
    """The same of two calls that are alike but for what each rank gives and takes."""
    (mine, ours), (theirs, others) = one, other
    here, there = (f"rank {ranks[rank]} came to {kind}" for rank in (mine, theirs))
    if mine == theirs:
        given, taken = ours.gives[mine], ours.takes[mine]
        return f"{here} and gives itself {given} {dtype}, but takes {taken}" if given != taken else None
    if kind not in PAIRWISE:
        if ours.gives == others.gives:
            return None
        return f"{here} of {ours.gives} {dtype} where {there} of {others.gives}"
    if ours.gives[theirs] != others.takes[mine]:
        given, taken = ours.gives[theirs], others.takes[mine]
        return f"{here} and gives rank {ranks[theirs]} {given} {dtype} where {there} and takes {taken} from it"
    if ours.takes[theirs] != others.gives[mine]:
        taken, given = ours.takes[theirs], others.gives[mine]
        return f"{here} and takes {taken} {dtype} from rank {ranks[theirs]} where {there} and gives it {given}"
    return None


def _alike(said: Words, heard: Words) -> bool:
    """But for splits, and what depends on them."""
    if kind_of(said) != kind_of(heard) or said[2] >> 1 != heard[2] >> 1:
        return False
    return has_splits(said) or has_splits(heard)


def told(words: Words, ranks: Sequence[int]) -> str:
    """As people say it: all_reduce of 4 float32 (sum)."""
    kind, (_, count, details, _) = kind_of(words), words
    if kind == "barrier":
        return kind
    tensors, root, operation = details >> 37, details >> 17 & 0xFFFFF, OPERATIONS[details >> 9 & 0xFF]
    text = f"{kind} of {f'{tensors} tensors with ' if tensors > 1 else ''}{count} {_name(words)}"
    text += f" ({operation.lower()})" if operation else ""
    return text + (f" {ROOTED[kind]} rank {ranks[root] if root < len(ranks) else root}" if kind in ROOTED else "")


def _name(words: Words) -> str:
    return str(DTYPES[words[2] >> 1 & 0xFF]).removeprefix("torch.")
