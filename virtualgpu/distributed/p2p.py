"""Point to point: send, recv, and batches of them, with time on both sides."""

import contextlib
import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import distributed as dist

from virtualgpu._compat.distributed import Work
from virtualgpu.distributed.communicator import Communicator, SimulatedWork
from virtualgpu.distributed.message_log import RECV, SEND, Awaited, Hang, Message, MessageLog, describe
from virtualgpu.distributed.shared_clock import SingleRankArrivals, real_sleep, real_time
from virtualgpu.distributed.transport import extent, flat, hear, message_of
from virtualgpu.engine.machine import GPU
from virtualgpu.engine.values import invalidate
from virtualgpu.hardware.machine import STEPS
from virtualgpu.timing.streams import Queue

# A message to or from one peer runs on a stream for that pair, as ProcessGroupNCCL has it; a batch (batch_isend_irecv) is one kernel
# on the communicator's own stream, whose messages do not wait for each other. A message begins when both sides have come to it. One
# for which NCCL's buffer has room leaves its sender as soon as it has come to it (`hardware.machine.Fabric.step`).
#
# The first message of a direction is different: NCCL connects its sender with its receiver, and the host waits in the call until both have
# come to it (src/enqueue.cc, p2pTaskAppend; src/transport.cc, ncclTransportP2pSetup). Two ranks that both send first would give each other
# the wrong ends there, and both hang.
#
# Ends are worked out at `wait()`, from what all ranks have written in their logs, so that two ranks that isend first do not block
# each other. What would wait for itself on a GPU, and hang, raises DistBackendError. A rank that is played alone finds the other
# side of each message there, and says so once.


NEIGHBOURS = (
    "send and recv of a rank that is played alone: the other side is taken to be there as soon as this rank is. Memory and the work "
    "of a pipeline's stage are as they would be; its waiting for other stages is not seen, so that the step has no bubble: for that, "
    "start all ranks in a dry run (python -m virtualgpu --dry --gpus N -m torch.distributed.run ...)"
)


VERBS = ("send to", "recv from")  # by direction


def come_to(communicator: Communicator, direction: int, peer: int, tensor: torch.Tensor, gpu: GPU) -> "Exchange":
    """This rank has come to a send or a recv."""
    if communicator.messages is None:
        communicator.messages = Messages(communicator)
    exchange = communicator.batch
    if communicator.coalesced is None:
        exchange = Exchange(communicator.messages, gpu, batched=False)
    elif exchange is None:
        exchange = communicator.batch = Exchange(communicator.messages, gpu, batched=True)
        communicator.coalesced.append(exchange)
    exchange.add(direction, peer, tensor)
    communicator.latest = exchange
    if not exchange.batched:
        communicator.messages.start(exchange)
    return exchange


class Messages:
    """The messages of one communicator, and when the batches of all its ranks end, as far as that is known."""

    def __init__(self, communicator: Communicator):
        self.communicator = communicator
        self.log = MessageLog(communicator.arrivals)
        self.single_rank = isinstance(communicator.arrivals, SingleRankArrivals)
        if self.single_rank:
            warnings.warn(NEIGHBOURS, stacklevel=2)
        self.failed: RuntimeError | None = None  # they wait for each other: no message comes after that
        self.open: list[Exchange] = []  # that nobody has waited for
        self.leaving: list[tuple[Message, Work, torch.Tensor]] = []  # on their way, perhaps: by gloo's work, from there
        self.to_itself: dict[int, torch.Tensor] = {}  # what this rank has sent to itself and not yet received, by index
        self._ends: list[dict[int, float]] = [{} for _ in range(communicator.size)]  # [rank][batch]
        self._readies: list[dict[int, float]] = [{} for _ in range(communicator.size)]
        self._begins: dict[int, float] = {}  # of this rank's batches: when the other sides had come to all of it
        self._last: dict[int, int] = {}  # this rank's latest batch on each pair's stream, and the communicator's (-1)
        self._streams: dict[int, Queue] = {}

    def start(self, exchange: "Exchange") -> None:
        """This rank has come to these messages. Waits for the other side of those that are the first of their direction."""
        if self.failed is not None:
            raise copy.copy(self.failed)
        comm, gpu = self.communicator, exchange.gpu
        key = -1 if exchange.batched else exchange.messages[0][1]
        issued, current = comm.clock.collectives.come_to(gpu.index)
        if exchange.batched:
            comm.settle()  # on the same stream
            issued = max(issued, comm.end)
        if key not in self._streams:
            self._streams[key] = comm.clock.collectives.new_stream(gpu.index)
        messages = [(direction, peer, tensor.nbytes) for direction, peer, tensor in exchange.messages]
        number = self._last[key] = self.log.write(issued, self._last.get(key, -1), messages, current.id)
        exchange.begin(number, self._streams[key])
        self.open.append(exchange)
        self._let_go()
        with exchange.explained():
            for direction, peer, _, index in self.log.batches[comm.rank][number].messages:
                if index == 0 and peer != comm.rank and not self.single_rank:
                    self.log.batch_of(peer, 1 - direction, comm.rank, index, self._deadline(), comm.timeout)

    def times(self, exchange: "Exchange") -> tuple[float, float, float]:
        """When its stream comes to a batch of this rank, when the other sides have come to it, and when it ends. Waits for other ranks;
        raises Hang where it would wait for itself."""
        rank, number = self.communicator.rank, exchange.number
        end = self._end(rank, number, self._deadline(), ())
        ready = self._ready(rank, number, 0.0, ())
        return ready, self._begins.pop(number, ready), end

    def _deadline(self) -> float:
        return real_time() + self.communicator.timeout.total_seconds()

    def _end(self, rank: int, number: int, deadline: float, path: tuple) -> float:
        if number in self._ends[rank]:
            return self._ends[rank][number]
        comm, log = self.communicator, self.log
        begin = end = ready = self._ready(rank, number, deadline, path)
        path = (*path, (rank, number))
        for direction, peer, nbytes, index in log.batches[rank][number].messages:
            seconds, least = comm.layout.message(nbytes, rank, peer), 0.0
            if peer == rank or self.single_rank:
                left = ready
            elif direction == SEND:
                left = self._leaves(rank, number, peer, index, deadline, path)
            else:
                batch = log.batch_of(peer, SEND, rank, index, deadline, comm.timeout)
                self._agree(peer, rank, index)
                left = self._leaves(peer, batch, rank, index, deadline, path)
                least = ready + comm.layout.message(0, rank, peer)
            begin, end = max(begin, left), max(end, left + seconds, least)
        self._ends[rank][number] = end
        if rank == comm.rank:
            self._begins[number] = min(begin, end)
        return end

    def _leaves(self, sender: int, number: int, receiver: int, index: int, deadline: float, path: tuple) -> float:
        """When a message of this batch of its sender leaves it: NCCL's buffer has room, or the receiver takes it."""
        left, comm = self._ready(sender, number, deadline, path), self.communicator
        taken = self._must_be_taken(sender, receiver, index)
        if taken is not None:
            batch = self.log.batch_of(receiver, RECV, sender, taken, deadline, comm.timeout)
            self._agree(sender, receiver, taken)
            left = max(left, self._ready(receiver, batch, deadline, path))
        return left

    def _must_be_taken(self, sender: int, receiver: int, index: int) -> int | None:
        """Which of these messages, at the latest, must have been come to by its receiver before this one may leave: itself, where it is larger
        than NCCL's buffer; None where there is room for it and all before it."""
        step, steps = self.communicator.layout.step(sender, receiver), 0
        for earlier in range(index, -1, -1):
            steps += max(1, math.ceil(self.log.nbytes(sender, SEND, receiver, earlier) / step))
            if steps > STEPS:
                return earlier
        return None

    def _ready(self, rank: int, number: int, deadline: float, path: tuple) -> float:
        """The stream has come to it: the batch before it on that stream is over."""
        readies = self._readies[rank]
        if number not in readies:
            if (rank, number) in path:
                raise Hang(path=(*path[path.index((rank, number)) :], (rank, number)))
            _, after, *_ = batch = self.log.batches[rank][number]
            path = (*path, (rank, number))
            readies[number] = max(batch.issued, self._end(rank, after, deadline, path) if after >= 0 else batch.issued)
        return readies[number]

    def _agree(self, sender: int, receiver: int, index: int) -> None:
        """Raises DistBackendError where one side sends more, or less, than the other takes: NCCL would hang, or write past the end."""
        sent, taken = self.log.nbytes(sender, SEND, receiver, index), self.log.nbytes(receiver, RECV, sender, index)
        if sent != taken:
            ranks = self.communicator.ranks
            raise dist.DistBackendError(
                f"rank {ranks[sender]} sends {sent} bytes where rank {ranks[receiver]} receives {taken}: "
                "give both a tensor of one shape and dtype (NCCL would hang, or write past the tensor's end)"
            )

    def leave(self, message: Message, work: Work, memory: torch.Tensor) -> None:
        """A message of this rank is on its way. Its host goes on, unless the receiver is there."""
        self.leaving.append((message, work, memory))
        self._let_go()

    def _let_go(self) -> None:
        """Of what has been received: gloo hands a message over when its receiver asks for it, and not before."""
        rank = self.communicator.rank
        for sent in self.leaving[:]:
            message, work, _ = sent
            if self.log.has(Awaited(message.peer, RECV, rank, message.nth)):
                self.leaving.remove(sent)
                self._agree(rank, message.peer, message.nth)
                work.wait()

    def deliver(self) -> None:
        """What is on its way arrives, unless its receiver has ended or left the group."""
        deadline, arrivals = self._deadline(), self.communicator.arrivals
        with contextlib.suppress(RuntimeError), self.communicator.machine.untracked():
            while self.leaving and real_time() < deadline:
                ended = arrivals.ended()
                self._let_go()
                self.leaving = [sent for sent in self.leaving if sent[0].peer not in ended]
                real_sleep(1e-3)

    def settle(self) -> None:
        """Every message that this rank has come to is over."""
        for exchange in list(self.open):
            exchange.finish()


class Exchange(SimulatedWork):
    """One message, or a batch of them, of this rank. messages: (direction, peer within the group, tensor). number: of the batch."""

    number = -1
    stream: Queue

    def __init__(self, messages: Messages, gpu: GPU, batched: bool):
        super().__init__(messages.communicator, gpu)
        self.channel, self.batched = messages, batched
        self.messages: list[tuple[int, int, torch.Tensor]] = []
        self._arriving: list[Work] = []  # of gloo
        self._received: list[Callable[[], object]] = []  # what is to be done then
        self._sent: list[tuple[Message, Work, torch.Tensor]] = []
        self._held: list[torch.Tensor] = []  # what is carried

    def add(self, direction: int, peer: int, tensor: torch.Tensor) -> None:
        """One message more, before it begins."""
        self.messages.append((direction, peer, tensor))

    def begin(self, number: int, stream: Queue) -> None:
        """Its messages are written down as batch `number`: begin to carry the numbers."""
        self.number, self.stream = number, stream
        comm, dry = self.communicator, self.communicator.machine.dry
        carries = not self.channel.single_rank and comm.gloo is not None
        written = self.channel.log.batches[comm.rank][number].messages
        with comm.machine.untracked():
            for (direction, peer, tensor), message in zip(self.messages, written, strict=True):
                carried = message_of(tensor, direction == SEND) if dry and carries else tensor
                if dry and direction == RECV:
                    invalidate([tensor], "recv")
                if carries and carried is not None and carried.numel():
                    self._held.append(carried)
                    self._carry(direction, peer, flat(carried).view(torch.uint8)[: extent(carried)], message)
                    if dry and direction == RECV:
                        self._received.append(functools.partial(hear, tensor, carried))

    def _carry(self, direction: int, peer: int, memory: torch.Tensor, message: Message) -> None:
        gloo, itself = self.communicator.gloo, peer == self.communicator.rank  # gloo has no way to oneself
        if direction == SEND:
            scratch = memory.clone()
            if itself:
                self.channel.to_itself[message.nth] = scratch
            else:
                self._sent.append((message, gloo.send([scratch], peer, _tag(message)), scratch))
        elif itself:
            self._received.append(lambda: memory.copy_(self._from_itself(message)))
        else:
            scratch = torch.empty_like(memory)
            self._arriving.append(gloo.recv([scratch], peer, _tag(message)))
            self._received.append(functools.partial(memory.copy_, scratch))

    def _from_itself(self, message: Message) -> torch.Tensor:
        if message.nth not in self.channel.to_itself:
            raise dist.DistBackendError(
                "recv from this rank itself, which has not sent: NCCL would hang. Let batch_isend_irecv have both"
            )
        return self.channel.to_itself.pop(message.nth)

    def finish(self) -> None:
        """The numbers are there and the end is known; no stream waits for it yet."""
        if self.late is not None:
            return
        comm, names = self.communicator, self._names()
        with self.explained(), comm.machine.untracked():
            if self.channel.failed is not None:
                raise copy.copy(self.channel.failed)
            ready, begin, end = self.channel.times(self)
            for work in self._arriving:
                work.wait()
            for receive in self._received:
                receive()
            for sent in self._sent:
                self.channel.leave(*sent)
            self._arriving, self._received, self._sent, self._held = [], [], [], []
        self.late = end
        if self in self.channel.open:
            self.channel.open.remove(self)
        name = f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''}"
        comm.clock.collectives.run(self.stream, ready, begin, end, name)
        nbytes = sum(tensor.nbytes for _, _, tensor in self.messages)
        comm.statistics.add(self.gpu.index, ready, end, nbytes, 0.0, len(self.messages))
        self.messages = []

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What is raised inside names these messages."""
        comm = self.communicator
        try:
            yield
        except Hang as hang:
            reason = describe(hang, self.channel.log, comm.ranks, comm.layout)
            self.channel.failed = dist.DistBackendError(f"{', '.join(self._names()[:4])}: {reason}")
            raise copy.copy(self.channel.failed) from None
        except RuntimeError as error:
            comm.explain(error, ", ".join(self._names()[:4]))
            raise

    def _names(self) -> list[str]:
        return [f"{VERBS[direction]} rank {self.communicator.ranks[peer]}" for direction, peer, _ in self.messages]

    def join(self) -> None:
        """The current stream waits for it; the host goes on."""
        self.finish()
        self.communicator.clock.collectives.wait(self.gpu.index, self.late)


def _tag(message: Message) -> int:
    """Gloo brings together what has one tag; two sizes, which it would end the process for, have two. 31 bits."""
    return message.nth % (1 << 12) | (message.nbytes * 2654435761 >> 8) % (1 << 19) << 12
