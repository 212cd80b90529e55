"""DTensor and DeviceMesh on virtual GPUs: what they ask the device for, and what they compute on the side."""

import contextlib
import functools
import threading

import torch

from virtualgpu import _compat
from virtualgpu.distributed import dtensor_random
from virtualgpu.distributed.objects import with_numbers
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace DeviceMesh's methods, and how tensors are wrapped and faked; the rest when somebody makes a mesh."""
    from torch.distributed import device_mesh

    _wrappers(machine, patches)
    _fakes(machine, patches)
    mesh = device_mesh.DeviceMesh
    first = []

    def prepare():
        """Not before somebody makes a mesh: importing DTensor takes a second."""
        if not first:
            first.append(True)
            dtensor_random.install(patches)

    def of_mesh(original, begins=False):
        """A mesh computes with small CPU tensors, which have numbers in a dry run, too."""
        numbers = with_numbers(machine, original)

        @functools.wraps(original)
        def method(*args, **kwargs):
            prepare()
            return numbers(*args, **kwargs)

        return method if begins else numbers

    for name, value in list(vars(mesh).items()):
        if name in ("__hash__", "__eq__", "__repr__", "__enter__", "__exit__"):
            continue
        if isinstance(value, property):
            patches.replace(mesh, name, property(of_mesh(value.fget), value.fset))
        elif isinstance(value, staticmethod):
            patches.replace(mesh, name, staticmethod(of_mesh(value.__func__)))
        elif callable(value) and not isinstance(value, (type, classmethod)):
            patches.replace(mesh, name, of_mesh(value, begins=name == "__init__"))
    patches.replace_everywhere(device_mesh, "init_device_mesh", of_mesh(device_mesh.init_device_mesh, begins=True))


def _wrappers(machine: Machine, patches: Patches) -> None:
    """A wrapper of tensors says where it is by what it wraps; for C++ it is on the CPU, as those really are."""
    make = torch.Tensor._make_wrapper_subclass

    @functools.wraps(make)
    def make_wrapper_subclass(cls, *args, device=None, **kwargs):
        if device is not None and torch.device(device).type == "cuda":
            device = torch.device(machine.base)
        return make(cls, *args, **kwargs) if device is None else make(cls, *args, device=device, **kwargs)

    patches.replace(torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper_subclass))


class _Entered(threading.local):
    """The contexts that this thread entered with each mode, the innermost last."""

    def __init__(self):
        self.stack = []


def _fakes(machine: Machine, patches: Patches) -> None:
    """DTensor works out shardings with fake tensors, whose own bookkeeping takes a tensor of a dry run for what it really is."""
    mode, local = _compat.fake_tensor.FakeTensorMode, _Entered()
    enter, leave = mode.__enter__, mode.__exit__

    def begin(self):
        local.stack.append(machine.untracked() if machine.dry else contextlib.nullcontext())
        local.stack[-1].__enter__()
        return enter(self)

    def end(self, *error):
        local.stack.pop().__exit__(None, None, None)
        return leave(self, *error)

    patches.replace(mode, "__enter__", begin)
    patches.replace(mode, "__exit__", end)
    # The tracer works out a number that is made on a GPU, unless it knows that there is no driver to ask for one
    patches.replace(mode, "avoid_device_init", property(lambda self: True))
    if not _compat.built_with_cuda:
        _uniform(patches)


def _uniform(patches: Patches) -> None:
    """In a wheel without CUDA C++ has no guard for its devices, which PyTorch's way to draw a fake tensor's numbers asks for."""
    table, operator = torch._decomp.decomposition_table, torch.ops.aten.uniform_.default
    original = table[operator]

    def uniform_(self, low=0.0, high=1.0, generator=None):
        if self.device.type != "cuda":
            return original(self, low, high, generator)
        return self.copy_(torch.rand_like(self) * (high - low) + low)

    table[operator] = uniform_
    patches.undo(lambda: table.update({operator: original}))
