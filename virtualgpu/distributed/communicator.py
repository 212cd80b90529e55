"""A process group's communicator: which collectives this rank has come to, when each begins and ends, and who waits for it.

A collective begins when the last rank has come to it and the communicator has done the one before; it lasts as long as `nccl` says.
Ranks come to it when their current stream has (ProcessGroupNCCL lets its own stream wait for that). With async_op=True it runs on the
communicator's own stream beside the kernels, and `wait()` lets the current stream wait for it; otherwise on the current stream itself.

Nothing here depends on real time. Moments are read when the program asks for them: at `wait()`, at the next collective of the
current stream, at torch.cuda.synchronize().
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
from torch import distributed as dist

from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import agreement, transport
from virtualgpu.distributed.arrivals import Arrivals, SingleRankArrivals
from virtualgpu.distributed.calls import Call
from virtualgpu.distributed.checks import check
from virtualgpu.distributed.counts import counts
from virtualgpu.distributed.errors import Naming
from virtualgpu.distributed.nodes import Layout
from virtualgpu.distributed.p2p import Exchange, Messages
from virtualgpu.distributed.work import CoalescedWork, VirtualWork
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.timing.queues import Queue

KEPT = 1024  # works that nobody waits for are remembered up to so many


class Communicator:
    """Of one process group in this process. ranks: the global rank of each member. gloo: carries the numbers, in a dry run counts
    alone; None: they stay where they are.
    """

    def __init__(
        self,
        machine: Machine,
        name: str,
        ranks: list[int],
        rank: int,
        gloo,
        arrivals: Arrivals,
        layout: Layout,
        gpu: GPU,
    ):
        self.machine, self.clock = machine, machine.clock
        self.name, self.ranks, self.rank, self.size = name, ranks, rank, len(ranks)
        self.gloo, self.arrivals, self.layout, self.gpu = gloo, arrivals, layout, gpu
        self.timeout = timedelta(minutes=10)
        self.number = 0  # of the latest collective, from 1
        self.resolved = 0  # up to which ends are known
        self.end = 0.0  # of the latest whose end is known
        self.late = 0.0  # the same, with what this rank's kernels lost beside those before it
        self.works: dict[int, VirtualWork] = {}  # that nobody has waited for: C++ may hold them
        self.latest: VirtualWork | None = None  # on its way through C++ to who called
        self.stream: Queue | None = None
        self.together: list[VirtualWork] | None = None  # inside of a coalescing manager
        self._backward: list[VirtualWork] = []  # whose futures are to be complete at the end of the pass
        self.statistics = machine.communicators.statistics
        self.splits = agreement.SplitsOfRanks(arrivals)
        self.unlike: VirtualWork | None = None  # that another rank means something else by
        self.failed: RuntimeError | None = None  # the first error: nothing begins after it
        self.messages: Messages | None = None
        self.batch: Exchange | None = None  # inside of a coalescing manager

    # -- issue

    def start(self, call: Call, gpu: GPU, asynchronous: bool) -> VirtualWork:
        """This rank has come to a collective. Raises what PyTorch does for tensors that NCCL refuses."""
        check(call, self.rank, self.size)
        if self.unlike is not None:
            self.unlike.finish()  # raises: the ranks' numbers would not meet any more
        if self.failed is not None:
            raise self.failed
        if self.messages is not None and any(exchange.batched for exchange in self.messages.open):
            self.messages.settle()  # on the same stream
        issued, current = self.clock.collectives.come_to(gpu.index)
        stream = self._own_stream(gpu) if asynchronous else current
        self.number += 1
        work = VirtualWork(self, self.number, call, gpu, stream, issued)
        self.works[self.number] = self.latest = work
        if len(self.works) > KEPT:
            oldest = next(iter(self.works.values()))
            oldest.finish()
            self.forget(oldest)
        with self.errors(call.kind):
            if self._differs(work):
                self.unlike = work
            else:
                self._carry(work)
        if self.together is not None:
            self.together.append(work)
        elif not asynchronous:
            work.join()
            work.release()
        return work

    def _differs(self, work: VirtualWork) -> bool:
        """This rank says what it has come to; does one that has come to it mean something else? Then its numbers must not meet this
        rank's.
        """
        number, splits = work.number, agreement.splits_of(work.call, self.rank, self.size)
        if splits is not None:
            self.splits.write(number, splits)
        work.words = words = agreement.words_of(work.call, splits)
        self.arrivals.post(number, work.issued, words, self.timeout)
        others = self.arrivals.come(number)
        if splits is not None:
            others.append((self.rank, words))
        return any(self._difference(work, rank, said) for rank, said in others)

    def _difference(self, work: VirtualWork, rank: int, said: agreement.Words) -> str | None:
        """What another rank means that this one does not, or that rank's own two sides that do not fit."""
        if (said == work.words and not agreement.has_splits(said)) or isinstance(self.arrivals, SingleRankArrivals):
            return None
        differs, number, other = agreement.difference, work.number, (rank, said)
        return differs(number, (self.rank, work.words), other, self.splits, self.ranks) or (
            differs(number, other, other, self.splits, self.ranks) if agreement.has_splits(said) else None
        )

    def _carry(self, work: VirtualWork) -> None:
        with self.machine.untracked():
            carried = counts(work.call) if self.machine.dry else work.call
            if self.gloo is not None and carried is not None:
                work.transfer = transport.start(self.gloo, carried, self.rank, self.size, self.timeout)

    def _own_stream(self, gpu: GPU) -> Queue:
        if self.stream is None or self.stream.gpu != gpu.index:
            self.stream = self.clock.collectives.new_stream(gpu.index)
        return self.stream

    # -- the end

    def resolve(self, work: VirtualWork) -> None:
        """When does it end? Those before it in this communicator are asked first."""
        if self.failed is not None:
            raise self.failed
        for number in range(self.resolved + 1, work.number + 1):
            earlier = self.works[number]
            with self.errors(work.call.kind):
                try:
                    found = self.arrivals.read(number, self.timeout)
                except RuntimeError:  # of two that differ and a third that does not come, the two are the cause
                    self._agree(earlier, self.arrivals.come(number))
                    raise
            self._agree(earlier, enumerate(said for _, said in found))
            nbytes = max(agreement.bytes_of(said) for _, said in found)
            last = max(moment for moment, _ in found)
            beside = self.clock.collectives.beside[earlier.gpu.index]
            seconds, late = (
                self.layout.seconds(earlier.call.kind, nbytes),
                beside.lateness(earlier.issued, earlier.charged),
            )
            start, came = max(last, self.end), max(earlier.issued, self.end)
            self.end, self.resolved = start + seconds, number
            self.late = max(last + late, self.late) + seconds
            earlier.begin, earlier.end, earlier.late = start, self.end, self.late
            share = self.layout.fabric.blocks / earlier.gpu.spec.processors if self.size > 1 else 0.0
            self.clock.collectives.run(
                earlier.stream, came, start, self.end, f"{earlier.call.kind} {_size(nbytes)}", share
            )
            if self.size > 1:
                self.statistics.add(earlier.gpu.index, start, self.end, nbytes, last - earlier.issued)

    def _agree(self, work: VirtualWork, said: Iterable[tuple[int, agreement.Words]]) -> None:
        """Raises where one of these ranks does not mean the same."""
        for rank, words in said:
            difference = self._difference(work, rank, words)
            if difference:
                raise dist.DistBackendError(
                    f"{difference}, in group {self.name!r}: all ranks call the same collectives in the same order, with as many elements "
                    "of one dtype (NCCL would wait for ever, or give wrong numbers without a word)"
                )

    def arrived(self, work: VirtualWork) -> None:
        """Whoever called has it, and keeps it alive for as long as it is needed."""
        if self.latest is work:
            self.latest = None

    def forget(self, work: VirtualWork) -> None:
        """Hold it no longer: its end is known, or it failed."""
        self.works.pop(work.number, None)

    def at_end_of_backward(self, work: VirtualWork) -> None:
        """DDP's reducer waits for futures then; ours are complete before it does."""
        if not self._backward:
            _compat.queue_callback(self._end_backward)
        self._backward.append(work)

    def _end_backward(self) -> None:
        while self._backward:  # what is done with a future may begin another collective
            self._backward.pop(0).wait()

    # -- messages, and what is called together

    def message(self, way: int, peer: int, tensor: torch.Tensor, gpu: GPU) -> Exchange:
        """This rank has come to a send or a recv."""
        if self.messages is None:
            self.messages = Messages(self)
        exchange = self.batch
        if self.together is None:
            exchange = Exchange(self.messages, gpu, batched=False)
        elif exchange is None:
            exchange = self.batch = Exchange(self.messages, gpu, batched=True)
            self.together.append(exchange)
        exchange.messages.append((way, peer, tensor))
        self.latest = exchange
        if not exchange.batched:
            self.messages.start(exchange)
        return exchange

    def end_together(self) -> CoalescedWork:
        """The end of a coalescing manager: one work for all that was called inside."""
        works, self.together = self.together or [], None
        if self.batch is not None:
            self.messages.start(self.batch)
            self.batch = None
        self.latest = CoalescedWork(works)
        return self.latest

    def settle_collectives(self) -> None:
        """The ends of all collectives so far are known."""
        for work in list(self.works.values()):
            work.finish()

    def drain(self) -> None:
        """Every collective that this rank has come to is over, and its end known."""
        self.settle_collectives()
        if self.messages is not None:
            self.messages.settle()

    def errors(self, what: str) -> Naming:
        """Around what waits for other ranks: errors name them."""
        where = f"{what} of rank {self.ranks[self.rank]} in group {self.name!r}"
        return Naming(where, self.ranks, self.timeout, self.arrivals.ended, lambda: self.arrivals.behind(self.number))


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"
