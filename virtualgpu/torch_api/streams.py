"""torch.cuda's streams and events on the simulated clock, and torch.Stream, torch.Event for the same."""

import threading

import torch

from virtualgpu.engine.machine import Machine
from virtualgpu.timing.clock import DEFAULT, Queue
from virtualgpu.torch_api.registry import Patches

_Stream = torch.Stream
_Event = torch.Event
CUDA = 1  # c10::DeviceType::CUDA
HANDLES = 0x7F00_0000_0000  # a stream's handle is a number that says which it is; 0 is the default one, as in CUDA


def install(machine: Machine, patches: Patches) -> None:
    """Replace the classes of torch and torch.cuda, and the C functions that get and set the current stream."""
    any_stream, any_event = _generic("Stream", _Stream), _generic("Event", _Event)
    stream = any_stream.ours = stream_class(machine, any_stream)
    event = any_event.ours = event_class(machine, any_event)
    cuda = torch.cuda

    def external(pointer: int, device=None):
        """The stream of such a handle. Raises NotImplementedError for one that PyTorch did not make."""
        gpu = machine.gpu(device)
        id = id_of(pointer)
        if id not in machine.clock.queues[gpu.index]:
            raise NotImplementedError(
                "a stream that was not made by PyTorch is not modelled by virtual GPUs: use torch.cuda.Stream()"
            )
        return stream(stream_id=id, device_index=gpu.index, device_type=CUDA)

    for owner in (cuda, cuda.streams):
        patches.replace(owner, "Stream", stream)
        patches.replace(owner, "Event", event)
        patches.replace(owner, "ExternalStream", external)
    patches.add(torch._C, "_CudaStreamBase", stream)
    patches.add(torch._C, "_CudaEventBase", event)
    patches.replace(torch, "Stream", any_stream)
    patches.replace(torch, "Event", any_event)

    def answer(queue: Queue) -> tuple[int, int, int]:
        return queue.id, queue.gpu, CUDA

    def set_stream(stream_id: int, device_index: int, device_type: int = CUDA) -> None:
        machine.local.use_device(machine.gpu(device_index).index)
        machine.clock.use(machine.clock.stream(device_index, stream_id))

    def use(chosen) -> None:
        machine.local.use_device(machine.gpu(chosen.device_index).index)
        machine.clock.use(machine.clock.stream(chosen.device_index, chosen.stream_id))

    def current(device: int = -1) -> Queue:
        return machine.clock.current(machine.gpu(None if device < 0 else device).index)

    def current_of(device: int = -1):
        id, index, kind = answer(current(device))
        return stream(stream_id=id, device_index=index, device_type=kind)

    for name, function in {
        "_cuda_getCurrentStream": lambda device: answer(current(device)),
        "_cuda_getDefaultStream": lambda device: (DEFAULT, machine.gpu(None if device < 0 else device).index, CUDA),
        "_cuda_getCurrentRawStream": lambda device: handle(current(device)),
        "_cuda_getStreamFromExternal": lambda pointer, device: answer(
            machine.clock.stream(device, external(pointer, device).stream_id)
        ),
        "_cuda_setStream": set_stream,
        "_accelerator_getStream": current_of,
        "_accelerator_setStream": use,
    }.items():
        patches.add(torch._C, name, function)


def handle(queue: Queue) -> int:
    """What CUDA calls the stream."""
    return 0 if queue.id == DEFAULT else HANDLES + (queue.gpu << 20) + queue.id


def id_of(pointer: int) -> int:
    """The id of the stream with that handle."""
    return DEFAULT if not pointer else (pointer - HANDLES) & ((1 << 20) - 1)


def _generic(name: str, theirs: type) -> type:
    """torch.Stream or torch.Event: PyTorch's own class, whose calls for a GPU make ours (`ours`, set by install)."""

    class Kind(type(theirs)):
        def __instancecheck__(cls, instance) -> bool:
            return isinstance(instance, theirs) if cls is generic else type.__instancecheck__(cls, instance)

        def __subclasscheck__(cls, other) -> bool:
            return issubclass(other, theirs) if cls is generic else type.__subclasscheck__(cls, other)

        def __call__(cls, *args, **kwargs):
            if cls is not generic:
                return super().__call__(*args, **kwargs)
            device = args[0] if args and not isinstance(args[0], bool) else kwargs.get("device")
            if kwargs.get("device_type", CUDA) != CUDA or (device is not None and torch.device(device).type != "cuda"):
                return theirs(*args, **kwargs)
            return generic.ours(*args, **kwargs)

    generic = Kind(name, (theirs,), {"__module__": "torch", "__doc__": theirs.__doc__})
    return generic


class _Before(threading.local):
    """What was current in this thread when it entered a stream: {stream: [(device, stream), ...]}."""

    def __init__(self):
        self.of = {}


def stream_class(machine: Machine, base: type) -> type:
    """torch.cuda.Stream of this machine's GPUs, a subclass of `base`, which is torch.Stream."""
    clock, before = machine.clock, _Before()

    class Stream(base):
        """A stream of a virtual GPU: its work runs in order, beside that of other streams."""

        def __new__(cls, device=None, priority=0, **kwargs):
            if "stream_id" in kwargs:
                gpu = machine.gpu(kwargs.get("device_index", 0))
                queue = clock.stream(gpu.index, kwargs["stream_id"])
            elif kwargs.get("stream_ptr"):
                return torch.cuda.ExternalStream(kwargs["stream_ptr"], device)
            else:
                gpu = machine.gpu(None if device is None or (isinstance(device, int) and device < 0) else device)
                if gpu is None:
                    raise ValueError(f"Expected a cuda device, but got: {device}")
                if priority > 0:
                    raise RuntimeError(f"Expected cuda stream priority to be less than or equal to 0, got {priority}")
                queue = clock.new_stream(gpu.index, priority)
            self = super().__new__(cls, stream_id=queue.id, device_index=queue.gpu, device_type=CUDA)
            self._queue = queue
            return self

        def __init__(self, *args, **kwargs):
            pass

        @property
        def priority(self) -> int:
            return self._queue.priority

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -3  # as many as PyTorch has pools for (c10/cuda/CUDAStream.h)

        @property
        def cuda_stream(self) -> int:
            return handle(self._queue)

        native_handle = cuda_stream

        @property
        def device(self) -> torch.device:
            return machine.gpus[self._queue.gpu].device

        def __enter__(self) -> "Stream":
            gpu = self._queue.gpu
            before.of.setdefault(self, []).append((machine.local.current, clock.current(gpu)))
            machine.local.use_device(gpu)
            clock.use(self._queue)
            return self

        def __exit__(self, *error) -> None:
            device, queue = before.of[self].pop()
            machine.local.use_device(device)
            if not before.of[self]:
                del before.of[self]
            clock.use(queue)

        def synchronize(self) -> None:
            clock.wait_for(self._queue)

        def query(self) -> bool:
            clock.check(self._queue.gpu)
            return clock.over(self._queue.ready)

        def is_capturing(self) -> bool:
            return False

        def wait_stream(self, stream) -> None:
            """What is queued here from now on starts when that stream has come to here."""
            theirs = clock.stream(stream.device_index, stream.stream_id)
            self._queue.wait_until(theirs.ready)

        def wait_event(self, event) -> None:
            event.wait(self)

        def record_event(self, event=None):
            event = torch.cuda.Event() if event is None else event
            event.record(self)
            return event

        def __eq__(self, other) -> bool:
            same = isinstance(other, _Stream)
            return same and (other.stream_id, other.device_index) == (self.stream_id, self.device_index)

        def __ne__(self, other) -> bool:
            return not self == other

        def __hash__(self) -> int:
            return hash((self.stream_id, self.device_index))

        def __repr__(self) -> str:
            return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    Stream.__module__, Stream.__qualname__ = "torch.cuda.streams", "Stream"
    return Stream


def event_class(machine: Machine, base: type) -> type:
    """torch.cuda.Event of this machine's GPUs, a subclass of `base`, which is torch.Event."""
    clock = machine.clock

    class Event(base):
        """A mark in a stream: the moment at which all that was queued before it is done."""

        def __new__(cls, *args, **kwargs):
            return super().__new__(cls, device="cpu")  # C++'s half, which nobody asks

        def __init__(self, *args, device=None, **options):
            if args and not isinstance(args[0], bool):
                args = args[1:]  # torch.Event("cuda", ...)
            self._begin(*args, **options)

        def _begin(self, enable_timing=False, blocking=False, interprocess=False, external=False) -> None:
            if interprocess:
                raise NotImplementedError("events between processes are not modelled by virtual GPUs")
            self.enable_timing, self.blocking, self.time, self._gpu = enable_timing, blocking, None, None

        @property
        def device(self) -> torch.device | None:
            return None if self._gpu is None else machine.gpus[self._gpu].device

        @property
        def cuda_event(self) -> int:
            return 0 if self.time is None else HANDLES + id(self) % (1 << 40)

        event_id = cuda_event

        def record(self, stream=None) -> None:
            queue = _queue_of(stream)
            if self._gpu not in (None, queue.gpu):
                raise RuntimeError(f"Event device {self._gpu} does not match recording stream's device {queue.gpu}.")
            self._gpu = queue.gpu
            self.time = max(clock.host, queue.ready)

        def synchronize(self) -> None:
            clock.wait_until(self.time or 0.0)
            if self._gpu is not None:
                clock.check(self._gpu)

        def wait(self, stream=None) -> None:
            """Work queued from now on starts after this event."""
            _queue_of(stream).wait_until(self.time or 0.0)

        def query(self) -> bool:
            if self._gpu is not None:
                clock.check(self._gpu)
            return self.time is None or clock.over(self.time)

        def elapsed_time(self, end_event) -> float:
            """Milliseconds of simulated time from this event to the other."""
            if not (self.enable_timing and end_event.enable_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self.time is None or end_event.time is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if max(self.time, end_event.time) > clock.host:
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
            if self._gpu != end_event._gpu:
                raise RuntimeError("CUDA error: invalid resource handle: the two events are of different GPUs")
            return (end_event.time - self.time) * 1e3

        def ipc_handle(self):
            raise NotImplementedError("events between processes are not modelled by virtual GPUs")

        @classmethod
        def from_ipc_handle(cls, device, handle):
            raise NotImplementedError("events between processes are not modelled by virtual GPUs")

        def __repr__(self) -> str:
            return (
                f"<torch.cuda.Event {self.cuda_event:#x}>"
                if self.time is not None
                else "<torch.cuda.Event uninitialized>"
            )

    def _queue_of(stream) -> Queue:
        if stream is None:
            return clock.current(machine.gpu(None).index)
        return clock.stream(stream.device_index, stream.stream_id)

    Event.__module__, Event.__qualname__ = "torch.cuda.streams", "Event"
    return Event
