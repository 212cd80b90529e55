"""Point to point: send, recv, and batches of them, with time on both sides.

A message to or from one peer runs on a stream for that pair, as ProcessGroupNCCL has it; a batch (batch_isend_irecv) is one kernel
on the communicator's own stream, whose messages do not wait for each other. A message begins when both sides have come to it. One
that fits NCCL's buffer (NCCL_BUFFSIZE: 4 MiB) leaves its sender as soon as it has come to it.

Ends are worked out at `wait()`, from what all ranks have written in their logs, so that two ranks that isend first do not block
each other. What would wait for itself on a GPU, and hang, raises DistBackendError. A rank that is played alone finds the other side of
each message there, and says so once.
"""

import time
import warnings

import torch
from torch import distributed as dist

from virtualgpu.distributed.arrivals import SingleRankArrivals
from virtualgpu.distributed.counts import message_of
from virtualgpu.distributed.message_log import RECV, SEND, Message, MessageLog
from virtualgpu.distributed.transport import flat
from virtualgpu.distributed.work import SimulatedWork
from virtualgpu.engine.allocation import reach
from virtualgpu.engine.machine import GPU
from virtualgpu.engine.values import invalidate
from virtualgpu.timing.queues import Queue

BUFFER = 4 << 20  # NCCL's documentation, NCCL_BUFFSIZE: the default is 4 MiB

NEIGHBOURS = (
    "send and recv of a rank that is played alone: the other side is taken to be there as soon as this rank is. Memory and the work "
    "of a pipeline's stage are as they would be; its waiting for other stages is not seen, so that the step has no bubble: for that, "
    "start all ranks in a dry run (python -m virtualgpu --dry --gpus N -m torch.distributed.run ...)"
)


VERBS = ("send to", "recv from")  # by direction


class Hang(RuntimeError):
    """Messages that wait for each other."""


class Messages:
    """The messages of one communicator, and when the batches of all its ranks end, as far as that is known."""

    def __init__(self, communicator):
        self.communicator = communicator
        self.log = MessageLog(communicator.arrivals)
        self.single_rank = isinstance(communicator.arrivals, SingleRankArrivals)
        if self.single_rank:
            warnings.warn(NEIGHBOURS, stacklevel=2)
        self.open: list[Exchange] = []  # that nobody has waited for
        self.to_itself: dict[int, torch.Tensor] = {}  # what this rank has sent to itself and not yet received, by index
        self._ends: list[dict[int, float]] = [{} for _ in range(communicator.size)]  # [rank][batch]
        self._begins: dict[int, float] = {}  # of this rank's batches: when the other sides had come to all of it
        self._last: dict[int, int] = {}  # this rank's latest batch on each pair's stream, and the communicator's (-1)
        self._streams: dict[int, Queue] = {}

    def start(self, exchange: "Exchange") -> None:
        """This rank has come to these messages."""
        comm, gpu = self.communicator, exchange.gpu
        key = -1 if exchange.batched else exchange.messages[0][1]
        issued, _ = comm.clock.collectives.come_to(gpu.index)
        if exchange.batched:
            comm.settle_collectives()  # on the same stream
            issued = max(issued, comm.end)
        if key not in self._streams:
            self._streams[key] = comm.clock.collectives.new_stream(gpu.index)
        messages = [(direction, peer, tensor.nbytes) for direction, peer, tensor in exchange.messages]
        number = self._last[key] = self.log.write(issued, self._last.get(key, -1), messages)
        exchange.begin(number, self._streams[key])
        self.open.append(exchange)

    def times(self, exchange: "Exchange") -> tuple[float, float, float]:
        """When its stream comes to a batch of this rank, when the other sides have come to it, and when it ends. Waits for other ranks;
        raises Hang where it would wait for itself."""
        rank, number = self.communicator.rank, exchange.number
        end = self._end(rank, number, time.monotonic() + self.communicator.timeout.total_seconds(), ())
        ready = self._ready(rank, number, 0.0, ())
        return ready, self._begins.pop(number, ready), end

    def _end(self, rank: int, number: int, deadline: float, path: tuple) -> float:
        if number in self._ends[rank]:
            return self._ends[rank][number]
        comm, log = self.communicator, self.log
        begin = end = ready = self._ready(rank, number, deadline, path)
        for message in log.batches[rank][number].messages:
            peer, is_small = message.peer, message.nbytes <= BUFFER
            seconds = comm.layout.message(message.nbytes, rank, peer)
            if (message.direction == SEND and is_small) or peer == rank or self.single_rank:
                end = max(end, ready + seconds)
                continue
            batch = log.batch_of(peer, 1 - message.direction, rank, message.index, deadline, comm.timeout)
            key = (1 - message.direction, rank, message.index)
            self._agree(
                rank,
                message,
                next(m for m in log.batches[peer][batch].messages if (m.direction, m.peer, m.index) == key),
            )
            there = self._ready(peer, batch, deadline, (*path, (rank, number)))
            if message.direction == RECV and is_small:
                end = max(end, there + seconds, ready + comm.layout.message(0, rank, peer))
            else:
                end = max(end, max(ready, there) + seconds)
            begin = max(begin, there)
        self._ends[rank][number] = end
        if rank == comm.rank:
            self._begins[number] = min(begin, end)
        return end

    def _ready(self, rank: int, number: int, deadline: float, path: tuple) -> float:
        """The stream has come to it: the batch before it on that stream is over."""
        if (rank, number) in path:
            raise Hang
        batch = self.log.batches[rank][number]
        if batch.after < 0:
            return batch.issued
        return max(batch.issued, self._end(rank, batch.after, deadline, (*path, (rank, number))))

    def _agree(self, rank: int, mine: Message, other: Message) -> None:
        """Raises DistBackendError where one side sends more, or less, than the other takes: NCCL would hang, or write past the end."""
        if mine.nbytes != other.nbytes:
            sides = sorted([(mine.direction, rank, mine.nbytes), (other.direction, mine.peer, other.nbytes)])
            (_, sender, sent), (_, receiver, taken) = sides
            ranks = self.communicator.ranks
            raise dist.DistBackendError(
                f"rank {ranks[sender]} sends {sent} bytes where rank {ranks[receiver]} receives {taken}: "
                "give both a tensor of one shape and dtype (NCCL would hang, or write past the tensor's end)"
            )

    def forget(self, exchange: "Exchange") -> None:
        """It is over."""
        if exchange in self.open:
            self.open.remove(exchange)

    def settle(self) -> None:
        """Every message that this rank has come to is over."""
        for exchange in list(self.open):
            exchange.finish()


class Exchange(SimulatedWork):
    """One message, or a batch of them, of this rank. messages: (direction, peer within the group, tensor)."""

    def __init__(self, messages: Messages, gpu: GPU, batched: bool):
        super().__init__(messages.communicator, gpu)
        self.channel, self.batched = messages, batched
        self.messages: list[tuple[int, int, torch.Tensor]] = []
        self.number: int | None = None
        self.stream: Queue | None = None
        self._works: list = []  # of gloo
        self._held: list[torch.Tensor] = []  # what these carry
        self._received: list[tuple[torch.Tensor, torch.Tensor]] = []  # (where to, from where) when they are done
        self._from_itself: list[tuple[torch.Tensor, int]] = []

    def add(self, direction: int, peer: int, tensor: torch.Tensor) -> None:
        """One message more, before it begins."""
        self.messages.append((direction, peer, tensor))

    def begin(self, number: int, stream: Queue) -> None:
        """Its messages are written down as batch `number`: begin to carry the numbers."""
        self.number, self.stream = number, stream
        comm = self.communicator
        if not self.channel.single_rank and comm.gloo is not None:
            with comm.machine.untracked():
                for (direction, peer, tensor), message in zip(
                    self.messages, self.channel.log.batches[comm.rank][number].messages, strict=True
                ):
                    carried = message_of(tensor) if comm.machine.dry else tensor
                    if carried is not None and carried.numel():
                        self._held.append(carried)
                        self._carry(direction, peer, flat(carried).view(torch.uint8)[: _extent(tensor)], message)
        elif comm.machine.dry:
            invalidate(tensor for direction, _, tensor in self.messages if direction == RECV)

    def _carry(self, direction: int, peer: int, memory: torch.Tensor, message: Message) -> None:
        gloo = self.communicator.gloo
        if peer == self.communicator.rank:  # gloo has no way to oneself
            if direction == SEND:
                self.channel.to_itself[message.index] = memory.clone()
            else:
                self._from_itself.append((memory, message.index))
        elif direction == SEND:
            scratch = memory.clone()
            self._works.append(gloo.send([scratch], peer, _tag(message)))
            self._held.append(scratch)
        else:
            scratch = torch.empty_like(memory)
            self._works.append(gloo.recv([scratch], peer, _tag(message)))
            self._received.append((memory, scratch))

    def finish(self) -> None:
        """The numbers are there and the end is known; no stream waits for it yet."""
        if self.late is not None:
            return
        comm = self.communicator
        names = [f"{VERBS[direction]} rank {comm.ranks[peer]}" for direction, peer, _ in self.messages]
        try:
            with comm.machine.untracked():
                ready, begin, end = self.channel.times(self)
                self._receive()
        except Hang:
            raise dist.DistBackendError(
                f"{', '.join(names[:4])}: both ranks send first, and NCCL would hang: a message of more than 4 MiB leaves its "
                "sender when the receiver has come to it. Use batch_isend_irecv, or let one of them receive first"
            ) from None
        except RuntimeError as error:
            comm.explain(error, ", ".join(names[:4]))
            raise
        self.late = end
        self.channel.forget(self)
        name = f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''}"
        comm.clock.collectives.run(self.stream, ready, begin, end, name)
        nbytes = sum(tensor.nbytes for _, _, tensor in self.messages)
        comm.statistics.add(self.gpu.index, ready, end, nbytes, 0.0, len(self.messages))
        self.messages = []

    def join(self) -> None:
        """The current stream waits for it; the host goes on."""
        self.finish()
        self.communicator.clock.collectives.wait(self.gpu.index, self.late)

    def _receive(self) -> None:
        for work in self._works:
            work.wait()
        for memory, scratch in self._received:
            memory.copy_(scratch)
        for memory, index in self._from_itself:
            if index not in self.channel.to_itself:
                raise dist.DistBackendError(
                    "recv from this rank itself, which has not sent: NCCL would hang. Let batch_isend_irecv have both"
                )
            memory.copy_(self.channel.to_itself.pop(index))
        self._works, self._held, self._received, self._from_itself = [], [], [], []


def _extent(tensor: torch.Tensor) -> int:
    """How many bytes of memory the tensor reaches over: fewer than its elements have where these share memory (expand)."""
    return tensor.element_size() * reach(tensor)


def _tag(message: Message) -> int:
    """Gloo brings together what has one tag; two sizes, which it would end the process for, have two. 31 bits."""
    return message.index % (1 << 12) | (message.nbytes * 2654435761 >> 8) % (1 << 19) << 12
