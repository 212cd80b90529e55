"""What a collective returns, whether all ranks mean the same one, and what all of them came to at the end of a run."""

import os
import struct
import zlib
from collections.abc import Sequence

import torch

from virtualgpu._compat import current_node, graph_task
from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import transport
from virtualgpu.distributed.calls import Call, Collective, Splits
from virtualgpu.distributed.collectives import TABLE
from virtualgpu.distributed.objects import Told
from virtualgpu.distributed.shared_clock import ROOM, SLOTS, Arrivals, SingleRankArrivals, Words
from virtualgpu.distributed.transport import Transfer
from virtualgpu.engine.machine import GPU
from virtualgpu.memory.ledger import Communication
from virtualgpu.timing.clock import Clock
from virtualgpu.timing.streams import Queue

# -- Do ranks mean the same collective? What each says of its call, in four whole numbers, and in which words two that differ are named.
#
# NCCL compares nothing: ranks whose calls differ hang, write past a tensor's end, or get wrong numbers without a word; and gloo would
# end the process. Here a rank says what it has come to before its numbers travel, and looks at what others have said. Of two ranks
# whose calls differ at least one sees that in time and sends nothing; the other learns of it when it asks for the end.
#
# How many elements a rank gives each of the others, and takes from each, may differ between them (all_to_all, lists of all_gather). A
# call in which these are not all alike says so, and they stand behind the message logs in the group's file.

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


# -- What an asynchronous collective returns: a Work whose wait() makes the current stream wait, as NCCL's does.


class SimulatedWork(_compat.Work):
    """What a program waits for. late: when it ends for this rank's streams; `finish` makes that known."""

    def __init__(self, communicator, gpu: GPU):
        super().__init__()
        self.communicator, self.gpu = communicator, gpu
        self.late: float | None = None

    def finish(self) -> None:
        """The numbers are there, and the end is known; no stream waits for it yet. Blocks this process, not the simulated host."""
        raise NotImplementedError

    def join(self) -> None:
        """As wait(), before whoever called has got it."""
        raise NotImplementedError

    def wait(self, timeout=None) -> bool:
        """The current stream of its GPU waits for it; after a barrier the host does, too. Always True; `timeout` is not heeded."""
        with self.communicator.clock.ours():
            self.join()
            self.communicator.arrived(self)
        return True

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def block_current_stream(self) -> None:
        """As wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Has the host's clock passed its end? Asking takes a moment of it."""
        self.finish()
        return self.communicator.clock.collectives.over(self.late)


class VirtualWork(SimulatedWork):
    """One collective of this rank. words: what the rank says of it. issued: when the rank came to it. late: after the kernels that were
    slowed by the collectives before it (timing.collectives).

    Its tensors are held until somebody waits, as ProcessGroupNCCL holds them.
    """

    def __init__(self, communicator, number: int, call: Call, words: Words, gpu: GPU, stream: Queue, issued: float):
        super().__init__(communicator, gpu)
        self.number, self.call, self.words, self.stream, self.issued = number, call, words, stream, issued
        self.charged = communicator.clock.collectives.beside[gpu.index].charged
        self._transfer: Transfer | None = None
        self._outputs = call.outputs
        self._future: torch.futures.Future | None = None
        self._failed: RuntimeError | None = None
        self._joined = False  # has somebody waited?

    def carry(self) -> None:
        """Begin to carry the numbers; in a dry run those that are known."""
        comm = self.communicator
        with comm.machine.untracked():
            told = Told(self.call, comm.rank) if comm.machine.dry else None
            call = self.call if told is None else told.call
            if call is None:
                return
            if comm.gloo is not None:
                self._transfer = Transfer(comm.gloo, call, comm.rank, comm.size, comm.timeout)
                if told is not None:
                    told.by(self._transfer)
                filled, read = self.call.uses(comm.rank)
                comm.machine.in_flight.add(self, filled, read)
            elif told is not None:
                told.alone(comm.rank, comm.size)

    def resolve(self, late: float) -> None:
        """Its end is known."""
        self.late = late

    def finish(self) -> None:
        """The numbers are there, and the end is known. Raises what it failed with."""
        if self._failed is not None:
            raise self._failed
        try:
            if self.late is None:
                self.communicator.resolve(self)  # first: it knows who does not come, and who came to something else
            if self._transfer is not None:
                self._receive(self._transfer)
        except RuntimeError as error:
            self._failed = error
            self.communicator.fail(self, error)
            if self._transfer is not None:
                transport.LOST.append(self.call)
                self._arrived()
            raise

    def _receive(self, transfer: Transfer) -> None:
        try:
            with self.communicator.machine.untracked():
                transfer.wait()
        except RuntimeError as error:
            self.communicator.explain(error, self.call.kind)
            raise
        self._arrived()

    def _arrived(self) -> None:
        self._transfer = None
        self.communicator.machine.in_flight.remove(self, self.call.tensors)

    def join(self) -> None:
        """The current stream waits for it; after a barrier the host does, too."""
        self.finish()
        clock = self.communicator.clock
        clock.collectives.wait(self.gpu.index, self.late)
        if self.call.kind == "barrier":
            clock.wait_until(self.late)
        if not self._joined:
            self._joined = True
            self.communicator.forget(self)
            self.call.release()
        if self._future is not None and not self._future.done():
            self._future.set_result(self._outputs)

    def is_success(self) -> bool:
        """False once it has failed; True also while nobody has asked for its end."""
        return self._failed is None

    def exception(self):
        """What it failed with, as far as is known; or None."""
        return self._failed

    def result(self) -> list[torch.Tensor]:
        """The outputs; [] after `release`."""
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Holds the outputs. In a backward pass it is complete at the pass's end, or when somebody in Python asks for it; at once after wait()."""
        if self._future is None:
            self._future = torch.futures.Future()
            # outside of a backward pass, or in its last callbacks
            outside = graph_task() == -1 or current_node() is None
            if outside or self._joined:
                self.wait()
            else:
                _asking_completes(self._future, self.wait)
                self.communicator.at_end_of_backward(self)
        return self._future

    def release(self) -> None:
        """Who called waits no more, and asks for no result: its tensors are not held."""
        self._outputs = []


class CoalescedWork(_compat.Work):
    """Several collectives that are waited for as one."""

    def __init__(self, works: list[VirtualWork]):
        super().__init__()
        self.works = works

    def wait(self, timeout=None) -> bool:
        """The current stream waits for all of them. Always True; `timeout` is not heeded."""
        for work in self.works:
            work.wait()
        return True

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Has the host's clock passed the ends of all?"""
        return all(work.is_completed() for work in self.works)


def _asking_completes(future: torch.futures.Future, complete) -> None:
    """wait() and value() of this future, and of those made from it by then(), first wait for the collective."""
    wait, value = future.wait, future.value

    def asked(method):
        def ask():
            if not future.done():
                complete()
            return method()

        return ask

    def then(callback):
        child = torch.futures.Future()  # PyTorch's own could not be told how to wait

        def run(done) -> None:
            try:
                child.set_result(callback(done))
            except Exception as error:
                child.set_exception(error)

        _asking_completes(child, complete)
        future.add_done_callback(run)
        return child

    future.wait, future.value, future.then = asked(wait), asked(value), then

    def forget(done) -> None:
        """Or future and functions would hold each other, and a bucket's memory, until Python looks for such."""
        for name in ("wait", "value", "then"):
            vars(future).pop(name, None)

    future.add_done_callback(forget)


# -- What this process's collectives came to, for the table at the end of a run.


class Statistics:
    """Of all communicators of a process together."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.count = self.nbytes = 0
        self.seconds = self.waited = self._hidden = 0.0
        self._open: list[tuple[int, float, float]] = []  # (gpu, begin, end): kernels beside it may still be queued

    def add(self, gpu: int, begin: float, end: float, nbytes: int, waited: float, count: int = 1) -> None:
        """A collective, or `count` messages. waited: for how long after this rank the last one came."""
        self.count += count
        self.nbytes += nbytes
        self.seconds += end - begin
        self.waited += waited
        self._open.append((gpu, begin, end))
        self._look(self.clock.host)

    def total(self) -> Communication:
        """So far; the rest of the kernels is taken to be queued."""
        self._look(float("inf"))
        return Communication(self.count, self.nbytes, self.seconds, self._hidden, self.waited)

    def _look(self, now: float) -> None:
        """What kernels hid of the collectives that were over by then."""
        for gpu, begin, end in self._open:
            if end <= now:
                self._hidden += self.clock.compute[gpu].overlap(begin, end)
        self._open = [entry for entry in self._open if entry[2] > now]
