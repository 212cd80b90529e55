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

from virtualgpu.distributed import _compat, numbers
from virtualgpu.distributed.calls import Call
from virtualgpu.distributed.checks import check
from virtualgpu.distributed.counts import counts
from virtualgpu.distributed.moments import Page, RankEnded, RankLate
from virtualgpu.distributed.nodes import Layout
from virtualgpu.distributed.p2p import Exchange, Messages
from virtualgpu.distributed.work import Together, VirtualWork
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.simulation.queues import Queue

KINDS = tuple(numbers.CARRIERS)
KEPT = 1024  # works that nobody waits for are remembered up to so many


class Communicator:
    """Of one process group in this process. ranks: the global rank of each member. gloo: carries the numbers, in a dry run counts
    alone; None: they stay where they are.
    """

    def __init__(
        self, machine: Machine, name: str, ranks: list[int], rank: int, gloo, page: Page, layout: Layout, gpu: GPU
    ):
        self.machine, self.clock = machine, machine.clock
        self.name, self.ranks, self.rank, self.size = name, ranks, rank, len(ranks)
        self.gloo, self.page, self.layout, self.gpu = gloo, page, layout, gpu
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
        self.messages: Messages | None = None
        self.batch: Exchange | None = None  # inside of a coalescing manager

    # -- issue

    def start(self, call: Call, gpu: GPU, asynchronous: bool) -> VirtualWork:
        """This rank has come to a collective. Raises what PyTorch does for tensors that NCCL refuses."""
        check(call, self.rank, self.size)
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
        with self._errors(call.kind):
            self.page.post(self.number, issued, call.nbytes * len(KINDS) + KINDS.index(call.kind), self.timeout)
            with self.machine.untracked():
                carried = counts(call) if self.machine.dry else call
                if self.gloo is not None and carried is not None:
                    work.transfer = numbers.start(self.gloo, carried, self.rank, self.size, self.timeout)
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
        for number in range(self.resolved + 1, work.number + 1):
            earlier = self.works.get(number)
            with self._errors(work.call.kind):
                found = self.page.read(number, self.timeout)
            nbytes = self._agreed(earlier.call.kind, [what for _, what in found])
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

    def _agreed(self, kind: str, said: list[int]) -> int:
        """The bytes of the whole. Raises where ranks came to different collectives, which NCCL would hang on."""
        for rank, what in enumerate(said):
            theirs = KINDS[what % len(KINDS)]
            if theirs != kind:
                raise dist.DistBackendError(
                    f"rank {self.ranks[self.rank]} came to {kind} where rank {self.ranks[rank]} came to {theirs}, in group {self.name!r}: "
                    "all ranks call the same collectives in the same order (with NCCL they would wait for ever)"
                )
        return max(what // len(KINDS) for what in said)

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

    def end_together(self) -> Together:
        """The end of a coalescing manager: one work for all that was called inside."""
        works, self.together = self.together or [], None
        if self.batch is not None:
            self.messages.start(self.batch)
            self.batch = None
        self.latest = Together(works)
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

    def _errors(self, kind: str) -> "_Errors":
        return _Errors(self, kind)


class _Errors:
    """Whatever keeps ranks from meeting becomes PyTorch's DistBackendError, which says who did not come."""

    def __init__(self, communicator: Communicator, kind: str):
        self.of, self.kind = communicator, kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, _, error, trace) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, (torch.OutOfMemoryError, dist.DistBackendError)):
            return
        text, of = str(error), self.of
        where = f"{self.kind} of rank {of.ranks[of.rank]} in group {of.name!r}"
        if isinstance(error, RankEnded) or "Connection closed by peer" in text or "Connection reset" in text:
            gone = [error.rank] if isinstance(error, RankEnded) else of.page.ended()
            who = f"rank {', '.join(str(of.ranks[rank]) for rank in gone)}" if gone else "another rank"
            raise dist.DistBackendError(
                f"{where}: {who} has ended, and this rank waited for it. What stopped it stands in its own output"
            ) from error
        if isinstance(error, RankLate) or "timed out" in text.lower():
            late = error.ranks if isinstance(error, RankLate) else of.page.behind(of.number)
            who = f"rank {', '.join(str(of.ranks[rank]) for rank in late)} had" if late else "another rank had"
            seconds = of.timeout.total_seconds()
            raise dist.DistBackendError(
                f"{where} timed out after {seconds:g} s: {who} not come to it. Do all ranks call the same collectives in the same "
                "order? The limit is init_process_group(timeout=...)"
            ) from error


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"
