"""What notebook 06 needs beside PyTorch: an error's frames forgotten, another process on the GPU, and a riddle."""

import contextlib
import gc
import subprocess
import sys
import traceback
from collections.abc import Iterator

import torch
from torch import nn

from helpers import virtual
from helpers.virtual.specs import parse_size


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
    leave, machine = parse_size(leave), virtual.machine()
    if machine is not None:
        memory = machine.gpus[device].settled()
        taken = max(0, memory.free_on_gpu - leave)
        memory.others += taken
        try:
            yield
        finally:
            memory.others -= taken
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


def riddle(device: torch.device, iterations: int = 12) -> dict[str, list[float]]:
    """Four short runs on the GPU: {name: MiB in tensors at the end of each iteration}. checks.causes knows the answers."""
    runs = {"A": _keep_graphs, "B": _step_every_fourth, "C": _longer_inputs, "D": _keep_outputs}
    curves = {}
    for name, run in runs.items():
        before = torch.cuda.memory_allocated(device)
        curves[name] = [(torch.cuda.memory_allocated(device) - before) / 2**20 for _ in run(device, iterations)]
    return curves


def _keep_graphs(device, iterations) -> Iterator[None]:
    net, total = nn.Linear(256, 256, device=device), 0
    for _ in range(iterations):
        total = total + net(torch.ones(2048, 256, device=device)).square().sum()
        yield


def _step_every_fourth(device, iterations) -> Iterator[None]:
    net = nn.Linear(1536, 1536, device=device)
    optimizer = torch.optim.Adam(net.parameters())
    for iteration in range(1, iterations + 1):
        net(torch.ones(1, 1536, device=device)).sum().backward()
        if iteration % 4 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        yield


def _longer_inputs(device, iterations) -> Iterator[None]:
    net = nn.Linear(256, 256, device=device)
    for iteration in range(iterations):
        length = 1 + iteration % (iterations // 2)
        hidden = net(torch.ones(2048 * length, 256, device=device))
        hidden.sum().backward()
        yield


def _keep_outputs(device, iterations) -> Iterator[None]:
    net, kept = nn.Linear(256, 64, device=device), []
    for _ in range(iterations):
        kept.append(net(torch.ones(2048, 256, device=device)).detach())
        yield


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
