"""torch.cuda's streams and events on the simulated clock, and torch.Stream, torch.Event for the same."""
# ruff: noqa: D102 - methods without a word are those of PyTorch's classes, which documents them

import threading

import torch

from virtualgpu import _compat, errors
from virtualgpu.engine.machine import Machine
from virtualgpu.timing.clock import DEFAULT, Queue
from virtualgpu.torch_api.patches import Patches

_Stream, _Event = torch.Stream, torch.Event
CUDA = 1  # c10::DeviceType::CUDA
HANDLES = 0x7F00_0000_0000  # a stream's handle is a number that says which it is; 0 is the default one, as in CUDA


def install(machine: Machine, patches: Patches) -> None:
    """Replace the classes of torch and torch.cuda, and the C functions that get and set the current stream."""
    any_stream, any_event = _generic("Stream", _Stream), _generic("Event", _Event)
    of_session = {"machine": machine, "__module__": "torch.cuda.streams"}
    stream = any_stream.virtual = type(any_stream)("Stream", (StreamMethods, any_stream), of_session)
    event = any_event.virtual = type(any_event)("Event", (EventMethods, any_event), of_session)
    streams = _Streams(machine, stream)
    external = streams.external  # one object in both modules
    for owner in (torch.cuda, torch.cuda.streams):
        patches.replace(owner, "Stream", stream)
        patches.replace(owner, "Event", event)
        patches.replace(owner, "ExternalStream", external)
    patches.replace(torch, "Stream", any_stream)
    patches.replace(torch, "Event", any_event)
    for name, answer in {
        "_CudaStreamBase": stream,
        "_CudaEventBase": event,
        "_cuda_getCurrentStream": lambda device: _numbers(streams.current(device)),
        "_cuda_getDefaultStream": lambda device: (DEFAULT, streams.gpu(device), CUDA),
        "_cuda_getCurrentRawStream": lambda device: handle(streams.current(device)),
        "_cuda_getStreamFromExternal": streams.from_external,
        "_cuda_setStream": streams.use,
        "_accelerator_getStream": streams.current_stream,
        "_accelerator_setStream": lambda chosen: streams.use(chosen.stream_id, chosen.device_index),
    }.items():
        patches.add(_compat.C, name, answer)


class _Streams:
    """The C functions about streams. A device is an index, -1 the current GPU; a stream is its id, its GPU and the kind of device."""

    def __init__(self, machine: Machine, kind: type):
        self.machine, self.clock, self.kind = machine, machine.clock, kind

    def gpu(self, device: int) -> int:
        """The index of the GPU. Raises PyTorch's error where there is none."""
        return self.machine.expect_gpu(None if device < 0 else device).index

    def current(self, device: int = -1) -> Queue:
        return self.clock.current(self.gpu(device))

    def current_stream(self, device: int = -1):
        queue = self.current(device)
        return self.kind(stream_id=queue.id, device_index=queue.gpu, device_type=CUDA)

    def use(self, stream_id: int, device_index: int, device_type: int = CUDA) -> None:
        self.machine.local.use_device(self.gpu(device_index))
        self.clock.use(self.clock.stream(device_index, stream_id))

    def external(self, pointer: int, device=None):
        """The stream of such a handle. Raises NotImplementedError for one that PyTorch did not make."""
        gpu, id = self.machine.expect_gpu(device), id_of(pointer)
        if id not in self.clock.queues[gpu.index]:
            raise NotImplementedError(
                "a stream that was not made by PyTorch is not modelled by virtual GPUs: use torch.cuda.Stream()"
            )
        return self.kind(stream_id=id, device_index=gpu.index, device_type=CUDA)

    def from_external(self, pointer: int, device: int) -> tuple[int, int, int]:
        return _numbers(self.clock.stream(device, self.external(pointer, device).stream_id))


def _numbers(queue: Queue) -> tuple[int, int, int]:
    """As C++ knows a stream."""
    return queue.id, queue.gpu, CUDA


def handle(queue: Queue) -> int:
    """What CUDA calls the stream."""
    return 0 if queue.id == DEFAULT else HANDLES + (queue.gpu << 20) + queue.id


def id_of(pointer: int) -> int:
    """The id of the stream with that handle."""
    return DEFAULT if not pointer else (pointer - HANDLES) & ((1 << 20) - 1)


class Generic(type):
    """The class of torch.Stream and torch.Event: PyTorch's own (`original`), whose calls for a GPU make one of `virtual`, set by install."""

    original: type
    virtual: type

    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, cls.original) if "virtual" in vars(cls) else type.__instancecheck__(cls, instance)

    def __subclasscheck__(cls, other) -> bool:
        return issubclass(other, cls.original) if "virtual" in vars(cls) else type.__subclasscheck__(cls, other)

    def __call__(cls, *args, **kwargs):
        if "virtual" not in vars(cls):
            return super().__call__(*args, **kwargs)
        device = args[0] if args and not isinstance(args[0], bool) else kwargs.get("device")
        other = kwargs.get("device_type", CUDA) != CUDA or (device is not None and torch.device(device).type != "cuda")
        return (cls.original if other else cls.virtual)(*args, **kwargs)


def _generic(name: str, original: type) -> Generic:
    attributes = {"__module__": "torch", "__doc__": original.__doc__, "original": original, "virtual": None}
    return Generic(name, (original,), attributes)


class Entered(threading.local):
    """What was current in this thread when it entered a stream: {stream: [(device, stream), ...]}."""

    def __init__(self) -> None:
        self.of: dict[StreamMethods, list[tuple[int, Queue]]] = {}


entered = Entered()


class StreamMethods:
    """A stream of a virtual GPU: its work runs in order, beside that of other streams. `machine` is set by install."""

    machine: Machine
    _queue: Queue
    stream_id: int
    device_index: int

    def __new__(cls, device=None, priority=0, **kwargs):
        machine = cls.machine
        if "stream_id" in kwargs:
            gpu = machine.expect_gpu(kwargs.get("device_index", 0))
            queue = machine.clock.stream(gpu.index, kwargs["stream_id"])
        elif kwargs.get("stream_ptr"):
            return torch.cuda.ExternalStream(kwargs["stream_ptr"], device)
        else:
            if not machine.look():
                raise errors.no_device()
            gpu = machine.expect_gpu(None if isinstance(device, int) and device < 0 else device)
            queue = machine.clock.new_stream(gpu.index, min(priority, 0))  # a positive one is 0 (on an H100)
        self = super().__new__(cls, stream_id=queue.id, device_index=queue.gpu, device_type=CUDA)  # type: ignore[call-arg]
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
        return self.machine.gpus[self._queue.gpu].device

    def __enter__(self) -> "StreamMethods":
        gpu = self._queue.gpu
        entered.of.setdefault(self, []).append((self.machine.local.current, self.machine.clock.current(gpu)))
        self.machine.local.use_device(gpu)
        self.machine.clock.use(self._queue)
        return self

    def __exit__(self, *error) -> None:
        device, queue = entered.of[self].pop()
        self.machine.local.use_device(device)
        if not entered.of[self]:
            del entered.of[self]
        self.machine.clock.use(queue)

    def synchronize(self) -> None:
        self.machine.clock.wait_for(self._queue)

    def query(self) -> bool:
        self.machine.clock.check(self._queue.gpu)
        return self.machine.clock.over(self._queue.ready)

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream) -> None:
        """What is queued here from now on starts when that stream has come to here."""
        self._queue.wait_until(_queue_of(self.machine, stream).ready)

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


class EventMethods:
    """A mark in a stream: the moment at which all that was queued before it is done. `machine` is set by install."""

    machine: Machine
    time: float | None = None
    _gpu: int | None = None

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls, device="cpu")  # type: ignore[call-arg]  # C++'s half, which nobody asks

    def __init__(self, *args, device=None, **options):
        if args and not isinstance(args[0], bool):
            args = args[1:]  # torch.Event("cuda", ...)
        self._begin(*args, **options)

    def _begin(self, enable_timing=False, blocking=False, interprocess=False, external=False) -> None:
        if interprocess:
            self.ipc_handle()
        self.enable_timing, self.blocking = enable_timing, blocking

    @property
    def device(self) -> torch.device | None:
        return None if self._gpu is None else self.machine.gpus[self._gpu].device

    @property
    def cuda_event(self) -> int:
        return 0 if self.time is None else HANDLES + id(self) % (1 << 40)

    event_id = cuda_event

    def record(self, stream=None) -> None:
        queue = _queue_of(self.machine, stream)
        if self._gpu not in (None, queue.gpu):
            raise RuntimeError(f"Event device {self._gpu} does not match recording stream's device {queue.gpu}.")
        self._gpu = queue.gpu
        clock = self.machine.clock
        with clock.ours():
            self.time = max(clock.host, queue.ready)

    def synchronize(self) -> None:
        self.machine.clock.wait_until(self.time or 0.0)
        if self._gpu is not None:
            self.machine.clock.check(self._gpu)

    def wait(self, stream=None) -> None:
        """Work queued from now on starts after this event."""
        _queue_of(self.machine, stream).wait_until(self.time or 0.0)

    def query(self) -> bool:
        if self._gpu is not None:
            self.machine.clock.check(self._gpu)
        return self.time is None or self.machine.clock.over(self.time)

    def elapsed_time(self, end_event) -> float:
        """Milliseconds of simulated time from this event to the other."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.time is None or end_event.time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(self.time, end_event.time) > self.machine.clock.host:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self._gpu != end_event._gpu:
            raise RuntimeError(
                "CUDA error: invalid resource handle: the two events are of different GPUs; record both on one"
            )
        return (end_event.time - self.time) * 1e3

    @staticmethod
    def ipc_handle(*_):
        raise NotImplementedError(
            "events between processes are not modelled by virtual GPUs: synchronize, and tell the other process by a queue or a barrier"
        )

    from_ipc_handle = ipc_handle

    def __repr__(self) -> str:
        mark = "uninitialized" if self.time is None else f"{self.cuda_event:#x}"
        return f"<torch.cuda.Event {mark}>"


def _queue_of(machine: Machine, stream) -> Queue:
    if stream is None:
        return machine.clock.current(machine.expect_gpu().index)
    if not isinstance(stream, StreamMethods):
        raise errors.of_real_gpu("stream")
    return machine.clock.stream(stream.device_index, stream.stream_id)
