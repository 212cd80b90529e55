"""What notebook 06 needs beside PyTorch: an error's frames forgotten, and another process on the GPU."""

import contextlib
import gc
import subprocess
import sys
import traceback
from collections.abc import Iterator

import torch

import virtualgpu
from virtualgpu.engine import meter
from virtualgpu.hardware.specs import parse_size


def forget_error() -> None:
    """Free what the last uncaught error keeps alive: the local variables of every function it passed through.

    Python keeps such an error for its debugger (`sys.last_value` and its kind), IPython keeps its traceback once more.
    """
    for name in ("last_exc", "last_value"):
        _clear(getattr(sys, name, None))
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        vars(sys).pop(name, None)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.InteractiveTB.tb = None
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
