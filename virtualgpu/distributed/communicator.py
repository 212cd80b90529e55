"""A process group's communicator: which collectives this rank has come to, when each begins and ends, and who waits for it.

A collective begins when the last rank has come to it and the communicator has done the one before; it lasts as long as `nccl` says.
Ranks come to it when their current stream has (ProcessGroupNCCL lets its own stream wait for that). With async_op=True it runs on the
communicator's own stream beside the kernels, and `wait()` lets the current stream wait for it; otherwise on the current stream itself.

Nothing here depends on real time. Moments are read when the program asks for them: at `wait()`, at the next collective of the
current stream, at torch.cuda.synchronize().
"""

import copy
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from virtualgpu._compat import current_node, graph_task
from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import transport
from virtualgpu.distributed.calls import KINDS, Call, check, check_what_nccl_has, signature_of
from virtualgpu.distributed.collectives import Agreement
from virtualgpu.distributed.shared_clock import LEFT, Arrivals, Signature, explain
from virtualgpu.distributed.topology import Layout
from virtualgpu.distributed.transport import Transfer, carry_known
from virtualgpu.engine.machine import GPU, Machine, dry_runs
from virtualgpu.memory.ledger import Communication
from virtualgpu.timing.clock import Clock
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
        # Of the GPU, for NCCL's kernels
        self.share = layout.fabric.blocks / gpu.spec.processors if self.size > 1 else 0.0
        self.agreement = Agreement(arrivals, ranks)
        self.number = 0  # of the latest collective, from 1
        self.resolved = 0  # up to which ends are known
        self.end = 0.0  # of the latest whose end is known
        self.late = 0.0  # the same, with what this rank's kernels lost beside those before it
        self.works: dict[int, VirtualWork] = {}  # that nobody has waited for: C++ may hold them
        self.latest: SimulatedWork | CoalescedWork | None = None  # on its way through C++ to who called
        self.stream: Queue | None = None
        self.coalesced: list | None = None  # works inside of a coalescing manager
        self._backward: list[VirtualWork] = []  # whose futures are to be complete at the end of the pass
        self.unlike: VirtualWork | None = None  # that another rank means something else by
        self.failed: RuntimeError | None = None  # the first error: nothing begins after it
        self.messages: Any = None  # point to point (`p2p.Messages`), once there is one
        self.batch: Any = None  # an Exchange, inside of a coalescing manager

    # -- issue

    def start(self, call: Call, gpu: GPU, asynchronous: bool) -> "VirtualWork":
        """This rank has come to a collective. Raises what PyTorch does for tensors that NCCL refuses."""
        check(call, self.rank, self.size)
        if self.nccl:
            check_what_nccl_has(call, self.size, gpu.spec.capability)
        if self.unlike is not None:
            self.unlike.finish()  # raises: the ranks' numbers would not meet any more
        if self.failed is not None:
            raise copy.copy(self.failed)
        if self.messages is not None and any(exchange.batched for exchange in self.messages.open):
            self.messages.settle()  # on the same stream
        issued, stream = self.clock.collectives.come_to(gpu.index)
        if asynchronous:
            if self.stream is None or self.stream.gpu != gpu.index:
                self.stream = self.clock.collectives.new_stream(gpu.index)
            stream = self.stream
        splits = call.collective.splits and call.collective.splits(call, self.rank, self.size)
        signature = signature_of(call, splits)
        self.number += 1
        work = VirtualWork(self, gpu, call, signature, issued, stream)
        work.at_once = not asynchronous and self.coalesced is None
        self.works[self.number] = self.latest = work
        if len(self.works) > KEPT:
            oldest = next(iter(self.works.values()))
            oldest.finish()
            self.works.pop(oldest.number, None)
        try:
            if splits is not None:
                self.agreement.write(work.number, splits)
            others = self.arrivals.post(work.number, issued, signature, self.timeout)
            if splits is not None:
                others.append((self.rank, signature))
            for rank, other in others:
                differs = other != signature or splits is not None
                if differs and self.agreement.difference(work.number, signature, rank, other):
                    self.unlike = work
            if self.unlike is None:  # or the numbers of two that mean something else would meet
                if self.machine.in_flight.parts:
                    self.machine.in_flight.let_finish(call.tensors, call.uses(self.rank)[0])
                work.carry()
        except RuntimeError as error:
            self.explain(error, call.kind)
            raise
        if self.coalesced is not None:
            self.coalesced.append(work)
        elif work.at_once:
            work.join()
        return work

    def resolve(self, latest: "VirtualWork") -> None:
        """When does it end? Those before it in this communicator are asked first."""
        if self.failed is not None:
            raise copy.copy(self.failed)
        for number in range(self.resolved + 1, latest.number + 1):
            work = self.works[number]
            try:
                last, signatures = self.arrivals.read(number, self.timeout)
            except RuntimeError as error:  # of two that differ and a third that does not come, the two are the cause
                for rank, signature in self.arrivals.come(number):
                    self._agree(work, rank, signature)
                self.explain(error, latest.call.kind)
                raise
            for rank, signature in enumerate(signatures):
                if signature != work.signature or signature[2] & 1:
                    self._agree(work, rank, signature)
            nbytes = max(signatures)[0] // KINDS
            seconds, collectives = self.layout.seconds(work.call.kind, nbytes), self.clock.collectives
            late = collectives.beside[work.gpu.index].lateness(work.issued, work.charged)
            begin, came = max(last, self.end), max(work.issued, self.end)
            self.end, self.resolved = begin + seconds, number
            self.late = work.late = max(last + late, self.late) + seconds
            name = work.call.kind if self.clock.spans is None else f"{work.call.kind} {_size(nbytes)}"
            collectives.run(work.stream, came, begin, self.end, name, self.share)
            if self.size > 1:
                self.statistics.add(work.gpu.index, begin, self.end, nbytes, last - work.issued)

    def _agree(self, work: "VirtualWork", rank: int, signature: Signature) -> None:
        """Raises where that rank does not mean the same."""
        difference = self.agreement.difference(work.number, work.signature, rank, signature)
        if difference is not None:
            raise dist.DistBackendError(
                f"{difference}, in group {self.name!r}: all ranks call the same collectives in the same order, with as many elements "
                "of one dtype (NCCL would wait for ever, or give wrong numbers without a word)"
            )

    def arrived(self, work: "SimulatedWork") -> None:
        """Whoever called has it, and keeps it alive for as long as it is needed."""
        if self.latest is work:
            self.latest = None

    def leave(self, how: int = LEFT) -> None:
        """Its group is destroyed: nobody waits here any more."""
        self.arrivals.leave(how)
        for work in self.works.values():
            self.machine.in_flight.remove(work, work.call.tensors)

    def close(self) -> None:
        """Its group is destroyed. Gloo's goes now, in one order on all ranks, and not when Python looks for cycles: where numbers are still on
        their way to a rank that came to something else, its end waits for that rank's."""
        self.gloo = None

    def fail(self, work: "VirtualWork", error: RuntimeError) -> None:
        """A work failed: nothing begins after it."""
        self.failed = self.failed or error
        self.works.pop(work.number, None)

    def at_end_of_backward(self, work: "VirtualWork") -> None:
        """DDP's reducer waits for futures then; ours are complete before it does."""
        if not self._backward:
            _compat.queue_callback(self._end_backward)
        self._backward.append(work)

    def _end_backward(self) -> None:
        while self._backward:  # what is done with a future may begin another collective
            self._backward.pop(0).wait()

    # -- what is called together (a coalescing manager), messages too

    def begin_coalescing(self) -> None:
        """What is called from now on is waited for as one."""
        self.coalesced = []

    def end_coalescing(self) -> "CoalescedWork":
        """One work for all that was called since."""
        works, self.coalesced = self.coalesced or [], None
        if self.batch is not None and self.messages is not None:
            self.messages.start(self.batch)
            self.batch = None
        self.latest = work = CoalescedWork(works)
        return work

    def settle(self) -> None:
        """The ends of all collectives so far are known."""
        for work in list(self.works.values()):
            work.finish()

    def drain(self) -> None:
        """Every collective and message that this rank has come to is over, and its end known."""
        self.settle()
        if self.messages is not None:
            self.messages.settle()

    def explain(self, error: RuntimeError, what: str) -> None:
        """Raises PyTorch's error, naming ranks, where one did not come to `what`."""
        behind = functools.partial(self.arrivals.behind, self.number)
        explain(error, what, self.rank, self.name, self.ranks, self.timeout, self.arrivals.ended, behind)


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"


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

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Has the host's clock passed its end? Asking takes a moment of it."""
        self.finish()
        return self.communicator.clock.collectives.over(self.late)


class VirtualWork(SimulatedWork):
    """One collective of this rank. issued: when the rank came to it. late: after the kernels that were slowed by the collectives before it
    (timing.nccl). at_once: the current stream waits for it within the call, which asks for no result.

    Its tensors are held until somebody waits, as ProcessGroupNCCL holds them.
    """

    def __init__(self, comm: Communicator, gpu: GPU, call: Call, signature: Signature, issued: float, stream: Queue):
        super().__init__(comm, gpu)
        self.number, self.call, self.signature = comm.number, call, signature
        self.issued, self.stream, self.at_once = issued, stream, False
        self.charged = comm.clock.collectives.beside[gpu.index].charged
        self._transfer: Transfer | None = None
        self._outputs = call.outputs
        self._future: torch.futures.Future | None = None
        self._failed: RuntimeError | None = None
        self._joined = False  # has somebody waited?

    def carry(self) -> None:
        """Begin to carry the numbers; in a dry run those that are known."""
        comm, machine = self.communicator, self.communicator.machine
        if (machine.always_dry or dry_runs.some) and machine.dry:
            with machine.untracked():
                self._transfer = carry_known(comm.gloo, self.call, comm.rank, comm.size, comm.timeout)
        elif comm.gloo is not None:
            self._transfer = Transfer(comm.gloo, self.call, comm.rank, comm.size, comm.timeout)
        if self._transfer is not None and not self.at_once:  # otherwise nobody else meets its tensors meanwhile
            machine.in_flight.add(self, *self.call.uses(comm.rank))

    def finish(self) -> None:
        """The numbers are there, and the end is known. Raises what it failed with."""
        if self._failed is not None:
            raise copy.copy(self._failed)
        comm, transfer = self.communicator, self._transfer
        in_flight = comm.machine.in_flight
        try:
            if self.late is None:
                comm.resolve(self)  # first: it knows who does not come, and who came to something else
            if transfer is not None:
                try:
                    transfer.wait()
                    if transfer.last:
                        with comm.machine.untracked():
                            transfer.finish()
                except RuntimeError as error:
                    comm.explain(error, self.call.kind)
                    raise
                self._transfer = None
                if not self.at_once:
                    in_flight.remove(self, self.call.tensors)
        except RuntimeError as error:
            self._failed = copy.copy(error)  # without its frames, which hold the group until Python looks for cycles
            comm.fail(self, self._failed)
            if transfer is not None:
                transport.LOST.append(self.call)
                self._transfer = None
                in_flight.remove(self, self.call.tensors)
            raise

    def join(self) -> None:
        """The current stream waits for it; after a barrier the host does, too."""
        self.finish()
        comm = self.communicator
        comm.clock.collectives.wait(self.gpu.index, self.late)
        if self.call.kind == "barrier":
            comm.clock.wait_until(self.late)
        if not self._joined:
            self._joined = True
            comm.works.pop(self.number, None)
            self.call.pairs, self.call.outputs, self.call.tensors = (), [], []  # it is over: they are not held
            if self.at_once:
                self._outputs = []
        if self._future is not None and not self._future.done():
            self._future.set_result(self._outputs)

    def wait(self, timeout=None) -> bool:
        """See `SimulatedWork`; nothing is left to do where the stream has waited within the call."""
        if self.at_once and self._joined:
            self.communicator.arrived(self)
            return True
        return super().wait(timeout)

    def is_success(self) -> bool:
        """False once it has failed; True also while nobody has asked for its end."""
        return self._failed is None

    def exception(self):
        """What it failed with, as far as is known; or None."""
        return self._failed

    def result(self) -> list[torch.Tensor]:
        """The outputs; [] where the call has waited."""
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


class CoalescedWork(_compat.Work):
    """Several collectives, or messages, that are waited for as one."""

    def __init__(self, works: list[SimulatedWork]):
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


def _asking_completes(future: torch.futures.Future, complete: Callable[[], object]) -> None:
    """wait() and value() of this future, and of those made from it by then(), first wait for the collective."""

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

    def forget(done) -> None:
        """Or future and functions would hold each other, and a bucket's memory, until Python looks for such."""
        for name in ("wait", "value", "then"):
            vars(future).pop(name, None)

    vars(future).update(wait=asked(future.wait), value=asked(future.value), then=then)
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
        local = self.clock.local
        self._look(local.now if local.backward is None else self.clock.host)

    def total(self) -> Communication:
        """So far; the rest of the kernels is taken to be queued."""
        self._look(float("inf"))
        return Communication(self.count, self.nbytes, self.seconds, self._hidden, self.waited)

    def _look(self, now: float) -> None:
        """What kernels hid of the collectives that were over by then."""
        still_open = []
        for gpu, begin, end in self._open:
            if end <= now:
                self._hidden += self.clock.compute[gpu].overlap(begin, end)
            else:
                still_open.append((gpu, begin, end))
        self._open = still_open
