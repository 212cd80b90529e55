"""Lists of tensors on several devices, which PyTorch groups by device in C++."""

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch._C._group_tensors_by_device_and_dtype."""
    patches.replace(_compat.C, "_group_tensors_by_device_and_dtype", group_by_device)


def group_by_device(lists, with_indices=False):
    """What torch.optim asks before it calls foreach operations: {(device, dtype): (lists, indices)}, by each first tensor."""
    groups: dict = {}
    for index, first in enumerate(lists[0]):
        columns, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for column, values in zip(columns, lists, strict=True):
            if values:
                column.append(values[index])
        if with_indices:
            indices.append(index)
    return groups
