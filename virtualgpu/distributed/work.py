"""What an asynchronous collective returns: a Work whose wait() makes the current stream wait, as NCCL's does."""

import torch

from virtualgpu._compat import current_node, graph_task
from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import transport
from virtualgpu.distributed.calls import Call
from virtualgpu.engine.machine import GPU
from virtualgpu.timing.queues import Queue


class VirtualWork(_compat.Work):
    """One collective of this rank. `issued`: when the rank came to it; `begin`, `end`: known once it is resolved. `late`: its end
    for this rank's streams, whose kernels were slowed by the collectives before it (simulation.beside).

    Its tensors are held until somebody waits, as ProcessGroupNCCL holds them.
    """

    def __init__(self, communicator, number: int, call: Call, gpu: GPU, stream: Queue, issued: float):
        super().__init__()
        self.communicator, self.number, self.call = communicator, number, call
        self.gpu, self.stream, self.issued = gpu, stream, issued
        self.begin = self.end = self.late = None
        self.charged = communicator.clock.collectives.beside[gpu.index].charged
        self.words = None  # that this rank says of it
        self.transfer = None
        self._value = call.outputs
        self._future = None
        self._failed = None

    def finish(self) -> None:
        """The numbers are there, and the end is known; no stream waits for it yet. Blocks this process, not the simulated host."""
        if self._failed is not None:
            raise self._failed
        try:
            if self.end is None:
                self.communicator.resolve(self)  # first: it knows who does not come, and who came to something else
            if self.transfer is not None:
                transfer = self.transfer
                with self.communicator.errors(self.call.kind), self.communicator.machine.untracked():
                    transfer.wait()
                self.transfer = None
        except RuntimeError as error:
            self._failed = error
            self.communicator.failed = self.communicator.failed or error
            self.communicator.forget(self)
            if self.transfer is not None:
                transport.LOST.append(self.call)
            raise

    def wait(self, timeout=None) -> bool:
        """The current stream waits for it; after a barrier the host does, too."""
        self.join()
        self.communicator.arrived(self)
        return True

    def join(self) -> None:
        """As wait(), before whoever called has got it."""
        self.finish()
        clock = self.communicator.clock
        clock.collectives.wait(self.gpu.index, self.late)
        if self.call.kind == "barrier":
            clock.wait_until(self.late)
        self.communicator.forget(self)
        self._value_after_wait()

    def synchronize(self) -> None:
        """As wait(): the host waits only after a barrier."""
        self.wait()

    def block_current_stream(self) -> None:
        """As wait(), which after a barrier blocks the host, too."""
        self.wait()

    def is_completed(self) -> bool:
        """Has the host's clock passed its end? Asking takes a moment of it."""
        self.finish()
        return self.communicator.clock.collectives.over(self.late)

    def is_success(self) -> bool:
        """False once it has failed; True also while nobody has asked for its end."""
        return self._failed is None

    def exception(self):
        """What it failed with, as far as is known; or None."""
        return self._failed

    def result(self) -> list[torch.Tensor]:
        """The outputs; [] after `release`."""
        return self._value

    def source_rank(self) -> int:
        """The call's root, within the group; 0 where there is none."""
        return self.call.root

    def get_future(self) -> torch.futures.Future:
        """Holds the outputs. In a backward pass it is complete at the pass's end, or when somebody in Python asks for it."""
        if self._future is None:
            self._future = torch.futures.Future()
            if graph_task() == -1 or current_node() is None:  # outside of a backward pass, or in its last callbacks
                self.wait()
            else:
                _asking_completes(self._future, self.wait)
                self.communicator.at_end_of_backward(self)
        return self._future

    def get_future_result(self) -> torch.futures.Future:
        """As get_future(), with the outputs for its value; PyTorch's has a number, its WorkResult."""
        return self.get_future()

    def _value_after_wait(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(self._value)
        self.call.pairs = []

    def release(self) -> None:
        """Who called waits no more, and asks for no result: its tensors are not held."""
        self._value = []


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
