"""A process group's communicator: which collectives this rank has come to, when each begins and ends, and who waits for it.

A collective begins when the last rank has come to it and the communicator has done the one before; it lasts as long as `nccl` says.
Ranks come to it when their current stream has (ProcessGroupNCCL lets its own stream wait for that). With async_op=True it runs on the
communicator's own stream beside the kernels, and `wait()` lets the current stream wait for it; otherwise on the current stream itself.

Nothing here depends on real time. Moments are read when the program asks for them: at `wait()`, at the next collective of the
current stream, at torch.cuda.synchronize().
"""

from datetime import timedelta

import torch
from torch import distributed as dist

from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed.calls import Call, check, check_what_nccl_has
from virtualgpu.distributed.p2p import Exchange, Messages
from virtualgpu.distributed.shared_clock import LEFT, Arrivals, explain
from virtualgpu.distributed.topology import Layout
from virtualgpu.distributed.work import Agreement, CoalescedWork, VirtualWork, Words, bytes_of, words_of
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.timing.streams import Queue

KEPT = 1024  # works that nobody waits for are remembered up to so many


class Communicator:
    """Of one process group in this process. ranks: the global rank of each member. gloo: carries the numbers, in a dry run counts
    alone; None: this rank is played alone.
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
        timeout: timedelta,
    ):
        self.machine, self.clock, self.statistics = machine, machine.clock, machine.communicators.statistics
        self.name, self.ranks, self.rank, self.size = name, ranks, rank, len(ranks)
        self.gloo, self.arrivals, self.layout, self.gpu, self.timeout = gloo, arrivals, layout, gpu, timeout
        self.nccl = gloo is None or gloo.name() == "nccl"
        self.share = (
            layout.fabric.blocks / gpu.spec.processors if self.size > 1 else 0.0
        )  # of the GPU, for NCCL's kernels
        self.agreement = Agreement(arrivals, ranks)
        self.number = 0  # of the latest collective, from 1
        self.resolved = 0  # up to which ends are known
        self.end = 0.0  # of the latest whose end is known
        self.late = 0.0  # the same, with what this rank's kernels lost beside those before it
        self.works: dict[int, VirtualWork] = {}  # that nobody has waited for: C++ may hold them
        self.latest: VirtualWork | None = None  # on its way through C++ to who called
        self.stream: Queue | None = None
        self.together: list | None = None  # works inside of a coalescing manager
        self._backward: list[VirtualWork] = []  # whose futures are to be complete at the end of the pass
        self.unlike: VirtualWork | None = None  # that another rank means something else by
        self.failed: RuntimeError | None = None  # the first error: nothing begins after it
        self.messages: Messages | None = None
        self.batch: Exchange | None = None  # inside of a coalescing manager

    # -- issue

    def start(self, call: Call, gpu: GPU, asynchronous: bool) -> VirtualWork:
        """This rank has come to a collective. Raises what PyTorch does for tensors that NCCL refuses."""
        check(call, self.rank, self.size)
        if self.nccl:
            check_what_nccl_has(call, self.size, gpu.spec.capability)
        if self.unlike is not None:
            self.unlike.finish()  # raises: the ranks' numbers would not meet any more
        if self.failed is not None:
            raise self.failed
        if self.messages is not None and any(exchange.batched for exchange in self.messages.open):
            self.messages.settle()  # on the same stream
        issued, stream = self.clock.collectives.come_to(gpu.index)
        if asynchronous:
            stream = self._own_stream(gpu)
        splits = call.collective.splits and call.collective.splits(call, self.rank, self.size)
        words = words_of(call, splits)
        self.number += 1
        work = VirtualWork(self, self.number, call, words, gpu, stream, issued)
        self.works[self.number] = self.latest = work
        if len(self.works) > KEPT:
            oldest = next(iter(self.works.values()))
            oldest.finish()
            self.forget(oldest)
        try:
            if splits is not None:
                self.agreement.write(work.number, splits)
            others = self.arrivals.post(work.number, issued, words, self.timeout)
            if splits is not None:
                others.append((self.rank, words))
            for rank, other in others:  # the numbers of a rank that means something else must not meet this rank's
                if (other != words or splits is not None) and self.agreement.difference(
                    work.number, words, rank, other
                ):
                    self.unlike = work
            if self.unlike is None:
                if self.machine.in_flight.parts:
                    self.machine.in_flight.let_finish(call.tensors, call.uses(self.rank)[0])
                work.carry()
        except RuntimeError as error:
            self.explain(error, call.kind)
            raise
        if self.together is not None:
            self.together.append(work)
        elif not asynchronous:
            work.join()
            work.release()
        return work

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
            try:
                self._resolve(self.works[number])
            except RuntimeError as error:
                self.explain(error, work.call.kind)
                raise

    def _resolve(self, work: VirtualWork) -> None:
        try:
            last, all_words = self.arrivals.read(work.number, self.timeout)
        except RuntimeError:  # of two that differ and a third that does not come, the two are the cause
            for rank, words in self.arrivals.come(work.number):
                self._agree(work, rank, words)
            raise
        for rank, words in enumerate(all_words):
            if words != work.words or words[2] & 1:
                self._agree(work, rank, words)
        nbytes = bytes_of(max(all_words))
        seconds, collectives = self.layout.seconds(work.call.collective.cost, nbytes), self.clock.collectives
        late = collectives.beside[work.gpu.index].lateness(work.issued, work.charged)
        begin, came = max(last, self.end), max(work.issued, self.end)
        self.end, self.resolved = begin + seconds, work.number
        self.late = max(last + late, self.late) + seconds
        work.resolve(self.late)
        collectives.run(work.stream, came, begin, self.end, f"{work.call.kind} {_size(nbytes)}", self.share)
        if self.size > 1:
            self.statistics.add(work.gpu.index, begin, self.end, nbytes, last - work.issued)

    def _agree(self, work: VirtualWork, rank: int, words: Words) -> None:
        """Raises where that rank does not mean the same."""
        difference = self.agreement.difference(work.number, work.words, rank, words)
        if difference is not None:
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

    def leave(self, how: int = LEFT) -> None:
        """Its group is destroyed: nobody waits here any more."""
        self.arrivals.leave(how)
        for work in self.works.values():
            self.machine.in_flight.remove(work, work.call.tensors)

    def fail(self, work: VirtualWork, error: RuntimeError) -> None:
        """A work failed: nothing begins after it."""
        self.failed = self.failed or error
        self.forget(work)

    def at_end_of_backward(self, work: VirtualWork) -> None:
        """DDP's reducer waits for futures then; ours are complete before it does."""
        if not self._backward:
            _compat.queue_callback(self._end_backward)
        self._backward.append(work)

    def _end_backward(self) -> None:
        while self._backward:  # what is done with a future may begin another collective
            self._backward.pop(0).wait()

    # -- messages, and what is called together

    def message(self, direction: int, peer: int, tensor: torch.Tensor, gpu: GPU) -> Exchange:
        """This rank has come to a send or a recv."""
        if self.messages is None:
            self.messages = Messages(self)
        exchange = self.batch
        if self.together is None:
            exchange = Exchange(self.messages, gpu, batched=False)
        elif exchange is None:
            exchange = self.batch = Exchange(self.messages, gpu, batched=True)
            self.together.append(exchange)
        exchange.add(direction, peer, tensor)
        self.latest = exchange
        if not exchange.batched:
            self.messages.start(exchange)
        return exchange

    def begin_together(self) -> None:
        """What is called from now on is waited for as one."""
        self.together = []

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

    def explain(self, error: RuntimeError, what: str) -> None:
        """Raises PyTorch's error, naming ranks, where one did not come to `what`."""
        arrivals = self.arrivals
        behind = lambda: arrivals.behind(self.number)  # noqa: E731
        explain(error, what, self.rank, self.name, self.ranks, self.timeout, arrivals.ended, behind)


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"
