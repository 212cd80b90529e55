"""torch.distributed with nccl: refused in a sentence, where PyTorch's C++ would end the process for lack of a driver.

gloo on CPU tensors works as it does without GPUs.
"""

import functools

import torch

from virtualgpu.engine.machine import Machine
from virtualgpu.patches.registry import Patches

MESSAGE = (
    'process groups of nccl are not modelled by virtual GPUs yet: give backend="gloo" and keep what is communicated on the CPU, '
    "or run where there are real GPUs"
)


def install(machine: Machine, patches: Patches) -> None:
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d as module

    for name in ("init_process_group", "new_group"):
        patches.replace_everywhere(module, name, _refusing(getattr(module, name), name))


def _refusing(original, name: str):
    @functools.wraps(original)
    def refusing(*args, **kwargs):
        at = {"init_process_group": 0, "new_group": 2}[name]
        backend = kwargs.get("backend", args[at] if len(args) > at else None)
        if (backend is None and name == "init_process_group") or "nccl" in str(backend).lower():
            raise NotImplementedError(MESSAGE)
        return original(*args, **kwargs)

    return refusing
