"""Where real GPUs work as well, C++ would ask their driver: what of that is refused while virtual ones are on.

Real GPUs are hidden, not gone: `engine.dispatch.DispatchBesideReal` has tensors that lie on one, `torch_api.devices` what C++ makes
with a device of its own. A process that never wants them back hides them from C++ as well (`_compat.hide_real_gpus`).
"""

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.storage import gpu_of
from virtualgpu.errors import of_real_gpu
from virtualgpu.torch_api.patches import Patches, standing_in


def install(machine: Machine, patches: Patches) -> None:
    """Replace what events of before do with streams, what makes a fake tensor, and what tells CuPy, Numba and their kind an address."""
    if not machine.real_gpus:
        return
    for name in ("record", "wait"):
        patches.replace(torch.cuda.Event, name, _refuse)
    patches.wrap(torch.Tensor, "__cuda_array_interface__", _interface)
    kind = _compat.fake_tensor.FakeTensor
    patches.replace(kind, "__new__", staticmethod(standing_in(kind.__new__, _fake, machine.real_gpus)))


def _refuse(*_, **__):
    raise of_real_gpu("event")


def _interface(original: property) -> property:
    """Without a driver nobody could follow the address; with one, a kernel that does ends the process's use of the real GPU."""

    def interface(tensor):
        if gpu_of(tensor) is None:
            return original.__get__(tensor)
        raise AttributeError(
            "kernels of other libraries run on a real GPU, and cannot reach the memory of a virtual one: give them tensor.cpu()"
        )

    return property(interface)


def _fake(real_gpus: int, original, cls, *args, **kwargs):
    """Of a fake tensor that says cuda, C++ asks the driver for that device, and ends the process where there are fewer."""
    for value in (*args, *kwargs.values()):
        device = _compat.Device(value) if isinstance(value, str) else value
        if isinstance(device, _compat.Device) and device.type == "cuda" and (device.index or 0) >= real_gpus:
            raise NotImplementedError(
                f"torch.export and other users of fake tensors find {real_gpus} real GPU{'s' * (real_gpus > 1)} here, and no {device}: "
                'hide the real by CUDA_VISIBLE_DEVICES="" in front of the program, or run it by python -m virtualgpu'
            )
    return original(cls, *args, **kwargs)
