"""What a race is called: one error that names both accesses, the tensor, the streams, the lines, and the cure."""

import torch

from virtualgpu import environment
from virtualgpu.memory.blocks import format_size
from virtualgpu.sanitizer import frames
from virtualgpu.sanitizer.accesses import Access, Accesses
from virtualgpu.timing.collectives import COMMUNICATION
from virtualgpu.timing.streams import DEFAULT, Queue


class UnsynchronizedAccessError(RuntimeError):
    """Two accesses to one piece of memory, one of which writes, and nothing makes the later one wait for the earlier.

    It has the name of PyTorch's own (`torch.cuda._sanitizer`), and is a RuntimeError.
    """

    __module__ = "virtualgpu.sanitizer"


def race(new: Access, old: Access, memory: Accesses, where: str) -> UnsynchronizedAccessError:
    """The error. where: the device, and the address."""
    doing = "writing" if old.writes else "reading"
    does = "overwrites" if new.writes else "reads"
    gone = "" if old.freed is None else ", of a tensor that was freed"
    text = [
        f"{_rank()}a race: {_by(new)} {does} what {_by(old)} may still be {doing}{gone}",
        *_part("tensor", f"{_dtype(new)} of shape {new.shape}, {format_size(new.end - new.start)} {where}", None),
        *(_part("made", "", memory.frames) if memory.frames else ()),
        *_part("now", _use(new, "it"), new.frames),
        *_part("before", _use(old, "it" if old.freed is None else f"the tensor of shape {old.shape}"), old.frames),
        *(_part("freed", "", old.freed) if old.freed else ()),
        *_part("cure", _cure(new, old, memory), None),
    ]
    return UnsynchronizedAccessError("\n".join(text))


def _part(name: str, text: str, where: frames.Frames | None) -> list[str]:
    rows = [text] if text else []
    rows += [("  " if text else "") + line for line in frames.lines(where or ())]
    return [f"  {name if not index else '':8}{line}" for index, line in enumerate(rows)]


def _by(access: Access) -> str:
    return f"the host ({access.operation})" if access.queue is None else f"{access.operation} on {stream(access.queue)}"


def _use(access: Access, what: str) -> str:
    verb = "writes" if access.writes else "reads"
    argument = f" (its argument {access.argument!r})" if access.argument not in ("", "out") else ""
    return f"{_by(access)} {verb} {what}{argument}"


def stream(queue: Queue) -> str:
    """How a stream is called: by its stream_id."""
    if queue.id == DEFAULT:
        return f"the default stream of cuda:{queue.gpu}"
    if queue.id >= COMMUNICATION:
        return f"a stream of communication of cuda:{queue.gpu}"
    return f"stream {queue.id} of cuda:{queue.gpu}"


def _cure(new: Access, old: Access, memory: Accesses) -> str:
    if old.queue.id >= COMMUNICATION:
        return f"call wait() on the work that {old.operation} returned, before this line"
    if new.queue is None:
        return (
            f"let the host wait before this line: synchronize() of {stream(old.queue)}, or of an event recorded there behind that work; "
            "torch.cuda.synchronize() waits for all"
        )
    if old.freed is not None and old.queue.id != memory.stream:
        return (
            f"call tensor.record_stream(stream) for {stream(old.queue)} on the tensor that is freed, or free it when the stream that it "
            "was made on has waited for that one"
        )
    waiting = "the current stream" if new.queue.id >= COMMUNICATION else stream(new.queue)
    return (
        f"let {waiting} wait for {stream(old.queue)} before this line: stream.wait_stream(other), or wait_event() of an event recorded behind "
        "that work"
    )


def _dtype(access: Access) -> str:
    return str(access.dtype).removeprefix("torch.")


def _rank() -> str:
    rank = environment.rank()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    return f"rank {rank}: " if rank >= 0 else ""
