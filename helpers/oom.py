"""What notebook 06 needs beside PyTorch: an error's frames forgotten, another process on the GPU, and what a recorded
step held of which kind."""

import contextlib
import gc
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence

import torch

import virtualgpu
from virtualgpu.engine import meter
from virtualgpu.hardware.specs import parse_size


def forget_error() -> None:
    """Free what the last uncaught error keeps alive: the local variables of every function it passed through.

    Python keeps such an error for its debugger (`sys.last_value` and its kind), IPython keeps its traceback once more, and the error
    itself in the result of the cell that ran last.
    """
    for name in ("last_exc", "last_value"):
        _clear(getattr(sys, name, None))
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        vars(sys).pop(name, None)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.InteractiveTB.tb = None
        shell.last_execution_result = None  # clearing frames is not enough: a shown frame has a copy of its variables
    gc.collect()  # frames and errors refer to each other


@contextlib.contextmanager
def other_process(leave: int | str, device: int = 0) -> Iterator[None]:
    """In this block, another process holds all of a GPU's free memory but `leave` (bytes, or text such as "40 MB").

    On real GPUs there is such a process; it ends with the block, or with this one.
    """
    leave, machine = parse_size(leave), virtualgpu.machine()
    if machine is not None:
        with meter.other_process(machine.gpus[device], leave):
            yield
        return
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(device), str(leave)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            if not child.stdout.readline():
                raise RuntimeError(f"the other process found no room on {torch.cuda.get_device_name(device)}")
            yield
        finally:
            child.stdin.close()


KEPT = {"model": "parameters", "forward": "activations", "backward": "gradients", "optimizer": "optimizer state"}


def kinds(trace: Sequence[Mapping], phases: Sequence[tuple[int, str]]) -> dict[str, list[float]]:
    """MiB held after each event of a snapshot's trace (`snapshot["device_traces"][0]`), one list a kind.

    phases: (number of the first event, "model", "forward", "backward" or "optimizer") in order. A block's kind is told by the
    phase that made it, if it outlives that phase: what backward leaves behind are gradients. What does not is temporary.
    """
    ends = [start for start, _ in phases[1:]] + [len(trace)]
    found = {kind: [0.0] * len(trace) for kind in (*KEPT.values(), "temporary")}
    for size, start, end in _lives(trace):
        name, over = next((name, over) for (_, name), over in zip(phases, ends, strict=True) if start < over)
        row = found[KEPT[name] if end >= over else "temporary"]
        for at in range(start, end):
            row[at] += size / 2**20
    return found


def _lives(trace: Sequence[Mapping]) -> Iterator[tuple[int, int, int]]:
    """Of each block: bytes, the event that made it, and the one that freed it (len(trace) where none did)."""
    open_: dict[int, tuple[int, int]] = {}
    for at, event in enumerate(trace):
        if event["action"] == "alloc":
            open_[event["addr"]] = event["size"], at
        elif event["action"] == "free_completed" and event["addr"] in open_:
            yield *open_.pop(event["addr"]), at
    for size, start in open_.values():
        yield size, start, len(trace)


_HOLD = """
import sys, torch
device, leave = map(int, sys.argv[1:])
held = torch.empty(max(0, torch.cuda.mem_get_info(device)[0] - leave), dtype=torch.uint8, device=device)
print(held.nbytes, flush=True)
sys.stdin.read()
"""


def _clear(error: BaseException | None) -> None:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
