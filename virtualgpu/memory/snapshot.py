"""PyTorch's memory history and snapshots, in its own format, and what kind of memory a recorded step held."""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from virtualgpu import _compat
from virtualgpu.memory.blocks import Block
from virtualgpu.memory.config import UNLIMITED

# -- What a recorded step held of which kind: told from a snapshot's trace by the phase that made each block, as somebody can who has only that file.
# (`run/report.py` is told by modules and optimizers while the program runs, and needs no phases.)

KEPT = {"model": "parameters", "forward": "activations", "backward": "gradients", "optimizer": "optimizer state"}


def kinds(trace: Sequence[Mapping], phases: Sequence[tuple[int, str]]) -> dict[str, list[float]]:
    """MiB held after each event of a snapshot's trace (`snapshot["device_traces"][0]`), one list a kind.

    phases: (number of the first event, "model", "forward", "backward" or "optimizer") in order. A block's kind is told by the
    phase that made it, if it outlives that phase: what backward leaves behind are gradients. What does not is temporary.
    """
    ends = [start for start, _ in phases[1:]] + [len(trace)]
    held = {kind: [0.0] * len(trace) for kind in (*KEPT.values(), "temporary")}
    for size, start, end in _lives(trace):
        name, over = next((name, over) for (_, name), over in zip(phases, ends, strict=True) if start < over)
        row = held[KEPT[name] if end >= over else "temporary"]
        for index in range(start, end):
            row[index] += size / 2**20
    return held


def _lives(trace: Sequence[Mapping]) -> Iterator[tuple[int, int, int]]:
    """Of each block: bytes, the event that made it, and the one that freed it (len(trace) where none did)."""
    open_: dict[int, tuple[int, int]] = {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            open_[event["addr"]] = event["size"], index
        elif event["action"] == "free_completed" and event["addr"] in open_:
            yield *open_.pop(event["addr"]), index
    for size, start in open_.values():
        yield size, start, len(trace)


# -- What happened in a GPU's memory, and who did it: PyTorch's memory history and snapshots, in PyTorch's own format.
#
# A `History` is told of each event by its allocator (see `Segments.tell`), and keeps where in the program it came from:
# Python's frames, innermost first, without virtualgpu's own. Where C++ frames are asked for (stacks="all"), the one that
# is known comes before them: that of the operation, `at::_ops::mm::call`, which tells in a backward pass who it was. `snapshot` makes the dictionary that
# `torch.cuda.memory._snapshot()` returns and `_memory_viz.py` reads. Times are of the simulated clock, in microseconds.
# Other C++ frames here are the CPU's, and not shown.
#
# Sources: CUDACachingAllocator.cpp (record_trace, snapshot), torch/csrc/cuda/Module.cpp (the dictionary),
# memory_snapshot.cpp (options).


NO_POOL = (0, 0)  # PyTorch's number of the pools that all share
NEVER, STATE, ALLOC, ALL = range(4)  # RecordContext: for which events frames are kept
CONTEXT = {None: NEVER, "state": STATE, "alloc": ALLOC, "all": ALL}

_OURS = str(Path(__file__).parents[1])
_BETWEEN = (str(Path(torch.__file__).parent), contextlib.__file__)  # what ours may have called that called ours

Context = tuple  # code objects and instructions in turn, innermost first; an operation's name stands for a code object


class _Metadata(threading.local):
    """What torch.cuda.memory._set_memory_metadata said in this thread."""

    text = ""


metadata = _Metadata()


class Event(NamedTuple):
    """One entry. size: in bytes. time_us: of the simulated clock. context: None where the level keeps no frames."""

    action: str
    address: int  # of an oom: what was free on the GPU
    size: int
    stream: int
    time_us: int
    context: Context | None
    metadata: str


class History:
    """One GPU's. `level`: which events keep their frames; `skip`: actions that are not kept; the last `max_entries`
    are. operation_of: the operation that a frame of Python dispatches, or None; given where frames are to name it, too."""

    def __init__(
        self,
        timeline,
        level: int,
        max_entries: int = sys.maxsize,
        skip: Iterable[str] = (),
        operation_of: Callable[[FrameType], Any] | None = None,
    ):
        self.timeline, self.level, self.skip, self.operation_of = timeline, level, frozenset(skip), operation_of
        self.events: deque[Event] = deque(maxlen=max(1, min(max_entries, sys.maxsize)))

    def gather(self, freeing: bool = False) -> Context | None:
        """Where we are, if events of this kind keep it."""
        if self.level < (ALL if freeing else STATE):
            return None
        frame: FrameType | None = sys._getframe(1)
        context: list = []
        while frame is not None:
            context += (frame.f_code, frame.f_lasti)
            if self.operation_of is not None and (operation := self.operation_of(frame)) is not None:
                context += (_in_cpp(operation), 0)
            frame = frame.f_back
        return tuple(context)

    def note(self, action: str, address: int, size: int, stream: int, context, text: str | None = None) -> None:
        """Write an event down, with `text` instead of the thread's metadata."""
        if action not in self.skip:
            time_us = int(self.timeline.now() * 1e6)
            context = context if self.level >= ALLOC else None
            text = metadata.text if text is None else text
            self.events.append(Event(action, address, size, stream, time_us, context, text))


def options(enabled: str | None, context: str | None, stacks: str, max_entries: int) -> tuple[int, int]:
    """Level and number of entries for what `_record_memory_history` was asked. Raises RuntimeError in PyTorch's
    words."""
    if enabled not in (None, "state", "all"):
        raise RuntimeError("expected state to be 'state', 'all', or None")
    if context not in CONTEXT:
        raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
    if stacks not in ("python", "all"):
        raise RuntimeError("expected stacks to be 'python', or 'all'")
    return CONTEXT[context], max_entries if enabled == "all" else 1


def frames_of(context: Context | None) -> list[dict[str, Any]]:
    """The program's frames. Those of virtualgpu are left out, and what of torch it called itself."""
    if context is None:
        return []
    pairs = list(zip(context[::2], context[1::2], strict=True))
    inner, operations = 0, []
    for number, (code, _) in enumerate(pairs):
        if isinstance(code, str):
            operations.append({"name": code, "filename": "??", "line": 0})
        elif _is_ours(code):
            inner = number + 1
        elif not code.co_filename.startswith(_BETWEEN):
            break
    python = [
        (code, instruction) for code, instruction in pairs[inner:] if not isinstance(code, str) and not _is_ours(code)
    ]
    return operations + [
        {"name": code.co_name, "filename": code.co_filename, "line": line_of(code, instruction)}
        for code, instruction in python
    ]


def _is_ours(code) -> bool:
    return code.co_filename.startswith(_OURS)


def _in_cpp(operation) -> str:
    """What C++ calls the function that carries out this operation."""
    overload = _compat.overload_name(operation)
    name = _compat.schema(operation).name.partition("::")[2]
    return f"at::_ops::{name}{'' if overload == 'default' else '_' + overload}::call"


def line_of(code: CodeType, instruction: int) -> int:
    """The line of the source that an instruction is of."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


class _Frames:
    """Frames of the same call are the same list, as in PyTorch's: a pickle stays small."""

    def __init__(self):
        self.known: dict[int, tuple[Context | None, list]] = {}

    def __call__(self, context: Context | None) -> list[dict[str, Any]]:
        if id(context) not in self.known:
            self.known[id(context)] = (context, frames_of(context))
        return self.known[id(context)][1]


def snapshot(allocators: Sequence, include_traces: bool = True) -> dict[str, Any]:
    """What `torch._C._cuda_memorySnapshot` returns for these GPUs."""
    frames = _Frames()
    traces, segments = [], []
    for allocator in allocators:
        history = allocator.history
        events = history.events if history is not None and include_traces else ()
        traces.append([_entry(event, frames) for event in events])
        mine = _segments(allocator, frames)
        segments += mine
        if history is not None:
            history.note("snapshot", 0, sum(segment["active_size"] for segment in mine), 0, None)
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": _settings(allocators[0].config),
        "external_annotations": [],
        "host_segments": [],
        "host_traces": [],
    }


def _entry(event: Event, frames: _Frames) -> dict[str, Any]:
    entry = {
        "action": event.action,
        "device_free" if event.action == "oom" else "addr": event.address,
        "size": event.size,
        "stream": event.stream,
        "time_us": event.time_us,
        "compile_context": "N/A",
        "user_metadata": event.metadata,
        "pool_id": NO_POOL,
    }
    if event.context is not None:
        entry["frames"] = frames(event.context)
    elif event.action not in ("oom", "snapshot"):
        entry["frames"] = []
    return entry


def _segments(allocator, frames: _Frames) -> list[dict[str, Any]]:
    """Each segment with its blocks; of an expandable one, each piece that has memory behind it."""
    segments: list[dict[str, Any]] = []
    previous: Block | None = None
    for block in allocator.all_blocks():
        if block.mapped:
            if block.prev is None or block.prev is not previous or not previous.mapped:
                segments.append(_segment(allocator, block, frames))
            _add(segments[-1], block, frames)
        previous = block
    return segments


def _segment(allocator, head: Block, frames: _Frames) -> dict[str, Any]:
    return {
        "device": allocator.device,
        "address": head.address,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": head.stream,
        "segment_type": "small" if head.free_list.pool.small else "large",
        "segment_pool_id": NO_POOL,
        "is_expandable": head.segment is not None,
        "frames": frames(head.segment_context),
        "blocks": [],
    }


def _add(segment: dict[str, Any], block: Block, frames: _Frames) -> None:
    allocated = block.used and not block.waiting
    requested = block.requested if block.used else 0
    segment["total_size"] += block.size
    segment["allocated_size"] += block.size if allocated else 0
    segment["active_size"] += block.size if block.used else 0
    segment["requested_size"] += requested
    segment["blocks"].append(
        {
            "address": block.address,
            "size": block.size,
            "requested_size": requested,
            "state": "active_allocated" if allocated else "active_pending_free" if block.used else "inactive",
            "frames": frames(block.context),
        }
    )


def _settings(config) -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.text,
        "max_split_size": -1 if config.max_split_size == UNLIMITED else config.max_split_size,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << i): count for i, count in enumerate(config.divisions)},
    }
