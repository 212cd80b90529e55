"""Point to point: send, recv, and batches of them, with time on both sides.

A message to or from one peer runs on a stream for that pair, as ProcessGroupNCCL has it; a batch (batch_isend_irecv) is one kernel
on the communicator's own stream, whose messages do not wait for each other. A message begins when both sides have come to it. One
that fits NCCL's buffer (NCCL_BUFFSIZE: 4 MiB) leaves its sender as soon as it has come to it.

Ends are worked out at `wait()`, from what all ranks have written on their tapes, so that two ranks that isend first do not block
each other. What would wait for itself on a GPU, and hang, raises DistBackendError. A rank that is played alone (`alone`) finds the
other side of each message there, and says so once.
"""

import time
import warnings

import torch
from torch import distributed as dist

from virtualgpu.distributed import _compat
from virtualgpu.distributed.arrivals import SingleRankArrivals
from virtualgpu.distributed.counts import message_of
from virtualgpu.distributed.message_log import RECV, SEND, Message, MessageLog
from virtualgpu.distributed.transport import flat
from virtualgpu.engine.values import invalidate
from virtualgpu.timing.queues import Queue

BUFFER = 4 << 20  # NCCL's documentation, NCCL_BUFFSIZE: the default is 4 MiB

NEIGHBOURS = (
    "send and recv of a rank that is played alone: the other side is taken to be there as soon as this rank is. Memory and the work "
    "of a pipeline's stage are as they would be; its waiting for other stages is not seen, so that the step has no bubble: for that, "
    "start all ranks in a dry run (python -m virtualgpu --dry --gpus N -m torch.distributed.run ...)"
)


class Hang(RuntimeError):
    """Messages that wait for each other."""


class Messages:
    """The messages of one communicator. `ends[rank][batch]`: as far as they are known."""

    def __init__(self, communicator):
        self.of = communicator
        self.log = MessageLog(communicator.arrivals)
        self.alone = isinstance(communicator.arrivals, SingleRankArrivals)
        if self.alone:
            warnings.warn(NEIGHBOURS, stacklevel=2)
        self.ends: list[dict[int, float]] = [{} for _ in range(communicator.size)]
        self.begins: dict[int, float] = {}  # of this rank's batches: when the other sides had come to all of it
        self.open: list[Exchange] = []  # that nobody has waited for
        self.last: dict[int, int] = {}  # this rank's latest batch on each pair's stream, and the communicator's (-1)
        self.streams: dict[int, Queue] = {}
        self.to_itself: dict[
            int, torch.Tensor
        ] = {}  # what this rank has sent to itself, by its number, and not yet received

    def start(self, exchange: "Exchange") -> None:
        """This rank has come to these messages."""
        of, gpu = self.of, exchange.gpu
        key = exchange.messages[0][1] if not exchange.batched else -1
        issued, _ = of.clock.collectives.come_to(gpu.index)
        if exchange.batched:
            of.settle_collectives()  # on the same stream
            issued = max(issued, of.end)
        if key not in self.streams:
            self.streams[key] = of.clock.collectives.new_stream(gpu.index)
        exchange.stream = self.streams[key]
        messages = [(way, peer, tensor.nbytes) for way, peer, tensor in exchange.messages]
        exchange.number = self.last[key] = self.log.write(issued, self.last.get(key, -1), messages)
        if not self.alone and of.gloo is not None:
            with of.machine.untracked():
                self._carry(exchange)
        elif of.machine.dry:
            invalidate(tensor for way, _, tensor in exchange.messages if way == RECV)
        self.open.append(exchange)

    def _carry(self, exchange: "Exchange") -> None:
        gloo, written = self.of.gloo, self.log.batches[self.of.rank][exchange.number].messages
        for (way, peer, tensor), message in zip(exchange.messages, written, strict=True):
            carried = message_of(tensor) if self.of.machine.dry else tensor
            if carried is None or not carried.numel():
                continue
            exchange.held.append(carried)
            memory = flat(carried).view(torch.uint8)[: _extent(tensor)]
            if peer == self.of.rank:  # gloo has no way to oneself
                if way == SEND:
                    self.to_itself[message.index] = memory.clone()
                else:
                    exchange.from_itself.append((memory, message.index))
                continue
            scratch = memory.clone() if way == SEND else torch.empty_like(memory)
            exchange.works.append((gloo.send if way == SEND else gloo.recv)([scratch], peer, _tag(message)))
            if way == RECV:
                exchange.arrived.append((memory, scratch))
            else:
                exchange.held.append(scratch)

    def end(self, rank: int, number: int, deadline: float, path: tuple = ()) -> float:
        """When does that batch of a rank end? Raises Hang where it would wait for itself."""
        known = self.ends[rank].get(number)
        if known is not None:
            return known
        batch = self.log.batches[rank][number]
        begin = end = ready = self._ready(rank, number, deadline, path)
        for message in batch.messages:
            seconds = self.of.layout.message(message.nbytes, rank, message.peer)
            leaves = message.way == SEND and message.nbytes <= BUFFER
            if leaves or message.peer == rank or self.alone:
                end = max(end, ready + seconds)
                continue
            theirs = self.log.batch_of(message.peer, 1 - message.way, rank, message.index, deadline, self.of.timeout)
            self._agree(
                rank,
                message,
                next(m for m in self.log.batches[message.peer][theirs].messages if _other_side(message, rank, m)),
            )
            there = self._ready(message.peer, theirs, deadline, (*path, (rank, number)))
            if message.way == RECV and message.nbytes <= BUFFER:
                end = max(end, there + seconds, ready + self.of.layout.message(0, rank, message.peer))
            else:
                end = max(end, max(ready, there) + seconds)
            begin = max(begin, there)
        self.ends[rank][number] = end
        if rank == self.of.rank:
            self.begins[number] = min(begin, end)
        return end

    def _agree(self, rank: int, mine: Message, theirs: Message) -> None:
        """Raises DistBackendError where one side sends more, or less, than the other takes: NCCL would hang, or write past the end."""
        if mine.nbytes != theirs.nbytes:
            (sender, sent), (receiver, taken) = sorted(
                [(rank, mine), (mine.peer, theirs)], key=lambda side: side[1].way
            )
            raise dist.DistBackendError(
                f"rank {self.of.ranks[sender]} sends {sent.nbytes} bytes where rank {self.of.ranks[receiver]} receives {taken.nbytes}: "
                "give both a tensor of one shape and dtype (NCCL would hang, or write past the tensor's end)"
            )

    def _ready(self, rank: int, number: int, deadline: float, path: tuple) -> float:
        """The stream has come to it: the batch before it on that stream is over."""
        if (rank, number) in path:
            raise Hang
        batch = self.log.batches[rank][number]
        if batch.after < 0:
            return batch.issued
        return max(batch.issued, self.end(rank, batch.after, deadline, (*path, (rank, number))))

    def settle(self) -> None:
        """Every message that this rank has come to is over."""
        for exchange in list(self.open):
            exchange.finish()


class Exchange(_compat.Work):
    """One message, or a batch of them, of this rank. messages: (way, peer within the group, tensor)."""

    def __init__(self, messages: Messages, gpu, batched: bool):
        super().__init__()
        self.of, self.gpu, self.batched = messages, gpu, batched
        self.messages: list[tuple[int, int, torch.Tensor]] = []
        self.works, self.arrived, self.held, self.from_itself = [], [], [], []
        self.number = self.end = self.stream = None

    def finish(self) -> None:
        """The numbers are there and the end is known; no stream waits for it yet."""
        if self.end is not None:
            return
        communicator = self.of.of
        names = [("send to", "recv from")[way] + f" rank {communicator.ranks[peer]}" for way, peer, _ in self.messages]
        with communicator.errors(", ".join(names[:4])), communicator.machine.untracked():
            try:
                deadline = time.monotonic() + communicator.timeout.total_seconds()
                end = self.of.end(communicator.rank, self.number, deadline)
            except Hang:
                raise dist.DistBackendError(
                    f"{', '.join(names[:4])}: both ranks send first, and NCCL would hang: a message of more than 4 MiB leaves its "
                    "sender when the receiver has come to it. Use batch_isend_irecv, or let one of them receive first"
                ) from None
            for work in self.works:
                work.wait()
            for memory, scratch in self.arrived:
                memory.copy_(scratch)
            for memory, index in self.from_itself:
                if index not in self.of.to_itself:
                    raise dist.DistBackendError(
                        "recv from this rank itself, which has not sent: NCCL would hang. Let batch_isend_irecv have both"
                    )
                memory.copy_(self.of.to_itself.pop(index))
        self.end, self.works, self.arrived, self.held, self.from_itself = end, [], [], [], []
        if self in self.of.open:
            self.of.open.remove(self)
        clock = communicator.clock
        nbytes = sum(tensor.nbytes for _, _, tensor in self.messages)
        ready = self.of._ready(communicator.rank, self.number, 0.0, ())
        name = f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''}"
        clock.collectives.run(self.stream, ready, self.of.begins.pop(self.number, ready), end, name)
        communicator.statistics.add(self.gpu.index, ready, end, nbytes, 0.0, len(self.messages))
        self.messages = []

    def wait(self, timeout=None) -> bool:
        """The current stream of its GPU waits for it; the host goes on. Always True; `timeout` is not heeded."""
        self.finish()
        self.of.of.clock.collectives.wait(self.gpu.index, self.end)
        return True

    def synchronize(self) -> None:
        """As wait(): the host goes on."""
        self.wait()

    def is_completed(self) -> bool:
        """Has the host's clock passed its end? Asking takes a moment of it."""
        self.finish()
        return self.of.of.clock.collectives.over(self.end)

    def is_success(self) -> bool:
        """Always True: what fails raises at wait()."""
        return True

    def exception(self):
        """Always None: what fails raises at wait()."""
        return None

    def source_rank(self) -> int:
        """This rank, within the group, also where it receives."""
        return self.of.of.rank


def _extent(tensor: torch.Tensor) -> int:
    """How many bytes of memory the tensor reaches over: fewer than its elements have where these share memory (expand)."""
    return tensor.element_size() * (
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def _other_side(mine: Message, rank: int, theirs: Message) -> bool:
    return (theirs.way, theirs.peer, theirs.index) == (1 - mine.way, rank, mine.index)


def _tag(message: Message) -> int:
    """Gloo brings together what has one tag; two sizes, which it would end the process for, have two. 31 bits."""
    return message.index % (1 << 12) | (message.nbytes * 2654435761 >> 8) % (1 << 19) << 12
