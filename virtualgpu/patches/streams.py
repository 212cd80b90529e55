"""torch.cuda's stream and event on the simulated clock."""

import torch

from virtualgpu.engine.machine import GPU, Machine


class Stream:
    """The one stream of a GPU."""

    cuda_stream = 0

    def __init__(self, machine: Machine, gpu: GPU):
        self.machine, self.gpu, self.device = machine, gpu, gpu.device

    def synchronize(self) -> None:
        self.machine.clock.wait(self.gpu.index)

    def query(self) -> bool:
        return self.machine.clock.ready[self.gpu.index] <= self.machine.clock.host

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream: "Stream") -> None:
        """What is queued here from now on starts when that stream has come to here."""
        ready = self.machine.clock.ready
        ready[self.gpu.index] = max(ready[self.gpu.index], ready[stream.gpu.index])

    def wait_event(self, event) -> None:
        event.wait(self)

    def record_event(self, event=None):
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def __eq__(self, other) -> bool:
        return isinstance(other, Stream) and other.gpu is self.gpu

    def __hash__(self) -> int:
        return hash(self.gpu.index)


def event_class(machine: Machine):
    class Event:
        """A mark in a GPU's queue: the moment at which all that was queued before it is done."""

        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_):
            if interprocess:
                raise NotImplementedError("events between processes are not modelled by virtual GPUs")
            self.enable_timing, self.time, self.gpu = enable_timing, None, 0

        def record(self, stream=None) -> None:
            self.gpu = machine.local.current if stream is None else stream.device.index
            self.time = max(machine.clock.host, machine.clock.ready[self.gpu])

        def synchronize(self) -> None:
            machine.clock.wait_until(self.time or 0.0)

        def wait(self, stream=None) -> None:
            """Work queued from now on starts after this event."""
            gpu = machine.local.current if stream is None else stream.device.index
            machine.clock.ready[gpu] = max(machine.clock.ready[gpu], self.time or 0.0)

        def query(self) -> bool:
            return self.time is None or self.time <= machine.clock.host

        def elapsed_time(self, end_event) -> float:
            """Milliseconds of simulated time from this event to the other."""
            if not (self.enable_timing and end_event.enable_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self.time is None or end_event.time is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not (self.query() and end_event.query()):
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
            return (end_event.time - self.time) * 1e3

    return Event
