"""Do ranks mean the same collective? What each says of its call, in four whole numbers, and in which words two that differ are named.

NCCL compares nothing: ranks whose calls differ hang, write past a tensor's end, or get wrong numbers without a word; and gloo would
end the process. Here a rank says what it has come to before its numbers travel, and looks at what others have said. Of two ranks
whose calls differ at least one sees that in time and sends nothing; the other learns of it when it asks for the end.

How many elements a rank gives each of the others, and takes from each, may differ between them (all_to_all, lists of all_gather). A
call in which these are not all alike says so, and they stand behind the message logs in the group's file.
"""

import os
import struct
import zlib
from collections.abc import Sequence

import torch

from virtualgpu.distributed.arrivals import SLOTS, Arrivals, SingleRankArrivals, Words
from virtualgpu.distributed.calls import Call, Collective, Splits
from virtualgpu.distributed.collectives import TABLE
from virtualgpu.distributed.message_log import ROOM

KINDS = tuple(row.kind for row in TABLE)
DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
REDUCTIONS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_kind = {name: number for number, name in enumerate(KINDS)}
_dtype = {dtype: number for number, dtype in enumerate(DTYPES)}
_reduction = {name: number for number, name in enumerate(REDUCTIONS)}


def words_of(call: Call, splits: Splits | None) -> Words:
    """What a rank says of its call: its bytes and kind, its elements, bits (pairs, root, reduction, dtype, and are there splits?), and a
    checksum of several tensors. Equal words without splits are equal calls.
    """
    side = 0 if call.collective.scatters else 1
    own = call.pairs[0][side] if call.pairs else ()
    dtype, count, several = (_dtype[own[0].dtype], own[0].numel(), 0) if own else (0, 0, 0)
    if len(call.pairs) > 1 or len(own) > 1:
        tensors = [tensor for pair in call.pairs for tensor in pair[side]]
        count = sum(tensor.numel() for tensor in tensors)
        if call.kind != "all_to_all":  # there it is all the same which rank has a tensor for each, and which a part
            several = zlib.crc32(repr([(tensor.numel(), _dtype[tensor.dtype]) for tensor in tensors]).encode())
    bits = (len(call.pairs) << 20 | call.root & 0xFFFFF) << 8 | _reduction[call.reduction[0]]
    return (
        call.nbytes * len(KINDS) + _kind[call.kind],
        count,
        (bits << 8 | dtype) << 1 | (splits is not None),
        several,
    )


def bytes_of(words: Words) -> int:
    """The bytes of the whole that a rank said."""
    return words[0] // len(KINDS)


def _collective(words: Words) -> Collective:
    return TABLE[words[0] % len(KINDS)]


def _has_splits(words: Words) -> bool:
    return bool(words[2] & 1)


def _dtype_name(words: Words) -> str:
    return str(DTYPES[words[2] >> 1 & 0xFF]).removeprefix("torch.")


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

    def difference(self, number: int, words: Words, other: int, other_words: Words) -> str | None:
        """Where this rank and another member do not mean the same by collective `number`, or that one's two sides do not fit: what each
        came to. None where they do.
        """
        if isinstance(self.arrivals, SingleRankArrivals):
            return None
        message = self._difference(number, self.arrivals.rank, words, other, other_words)
        if message is None and _has_splits(other_words):
            message = self._difference(number, other, other_words, other, other_words)
        return message

    def _difference(self, number: int, rank: int, words: Words, other: int, other_words: Words) -> str | None:
        if words == other_words and not _has_splits(words):
            return None
        collective, uneven = _collective(words), _has_splits(words) or _has_splits(other_words)
        if uneven and collective is _collective(other_words) and words[2] >> 1 == other_words[2] >> 1:
            splits, other_splits = self._read(rank, number, words), self._read(other, number, other_words)
            return self._of_splits(collective, _dtype_name(words), rank, splits, other, other_splits)
        first, second = self._text(words), self._text(other_words)
        if first == second:
            second += " in other sizes or dtypes"
        return f"rank {self.ranks[rank]} came to {first} where rank {self.ranks[other]} came to {second}"

    def _of_splits(
        self, collective: Collective, dtype: str, rank: int, splits: Splits, other: int, other_splits: Splits
    ) -> str | None:
        """The same of two calls that are alike but for what each rank gives and takes."""
        here, there = (f"rank {self.ranks[member]} came to {collective.kind}" for member in (rank, other))
        if rank == other:
            gives, takes = splits.gives[rank], splits.takes[rank]
            return f"{here} and gives itself {gives} {dtype}, but takes {takes}" if gives != takes else None
        if not collective.pairwise:
            if splits.gives == other_splits.gives:
                return None
            return f"{here} of {splits.gives} {dtype} where {there} of {other_splits.gives}"
        gives, taken = splits.gives[other], other_splits.takes[rank]
        if gives != taken:
            return f"{here} and gives rank {self.ranks[other]} {gives} {dtype} where {there} and takes {taken} from it"
        takes, sent = splits.takes[other], other_splits.gives[rank]
        if takes != sent:
            return f"{here} and takes {takes} {dtype} from rank {self.ranks[other]} where {there} and gives it {sent}"
        return None

    def _read(self, rank: int, number: int, words: Words) -> Splits:
        """The splits of a rank that said these words."""
        if not _has_splits(words):
            each = words[1] // self.size if _collective(words).kind == "all_to_all" else words[1]
            return Splits([each] * self.size, [each] * self.size)
        if rank == self.arrivals.rank:
            return self._mine[number]
        data = os.pread(self.arrivals.file, self._record.size, self._offset(rank, number))
        counts = list(self._record.unpack(data))
        return Splits(counts[: self.size], counts[self.size :])

    def _offset(self, rank: int, number: int) -> int:
        return self.arrivals.nbytes + self.size * ROOM + (rank * SLOTS + number % SLOTS) * self._record.size

    def _text(self, words: Words) -> str:
        """As people say it: all_reduce of 4 float32 (sum)."""
        collective, (_, count, details, _) = _collective(words), words
        if collective.kind == "barrier":
            return "barrier"
        pairs, root, reduction = details >> 37, details >> 17 & 0xFFFFF, REDUCTIONS[details >> 9 & 0xFF]
        several = f"{pairs} tensors with " if pairs > 1 else ""
        text = f"{collective.kind} of {several}{count} {_dtype_name(words)}"
        if reduction:
            text += f" ({reduction.lower()})"
        if collective.root:
            text += f" {collective.root} rank {self.ranks[root] if root < len(self.ranks) else root}"
        return text
