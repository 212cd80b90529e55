"""What an asynchronous collective returns: a Work whose wait() makes the current stream wait, as NCCL's does."""

import torch

from virtualgpu._compat import current_node, graph_task
from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import transport
from virtualgpu.distributed.arrivals import Words
from virtualgpu.distributed.calls import Call
from virtualgpu.distributed.counts import Told
from virtualgpu.distributed.transport import Transfer
from virtualgpu.engine.machine import GPU
from virtualgpu.timing.streams import Queue


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
