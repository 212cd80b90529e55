"""Tensor's own methods: where tensors say they are, how they are read, and how new ones are made; `moves` has how they get elsewhere."""

import functools
import math
import re
import sys

import torch
from torch import nn

from virtualgpu import _compat
from virtualgpu.engine import values
from virtualgpu.engine.dry_run import is_on_meta
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import (
    ALLOCATION,
    PLAIN_TYPES,
    allocation_of,
    gpu_of,
    is_pinned,
    made_by_cpp,
    pin,
    storage_of,
)
from virtualgpu.errors import foreign, no_gpus, without_values
from virtualgpu.torch_api import attention
from virtualgpu.torch_api.moves import CPU, Moves, takes_itself_apart
from virtualgpu.torch_api.patches import Patches

# -- How tensors are read: as an array, a list, text, or by their address. The host waits for the GPU; a dry run has nan or 0.


class Reads:
    """The methods of Tensor that give its numbers to Python."""

    machine: Machine

    def numpy(self, original, tensor, *, force=False):
        """Tensor.numpy. Raises PyTorch's TypeError on a GPU. In a dry run, nan or 0 for what has no numbers."""
        if force:
            tensor = tensor.detach().cpu()
        if (gpu := gpu_of(tensor)) is not None:
            raise TypeError(
                f"can't convert {gpu.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return original(self._with_values(tensor), force=force)

    def __array__(self, original, tensor, dtype=None):
        return tensor.numpy() if dtype is None else tensor.numpy().astype(dtype, copy=False)

    def data_ptr(self, original, tensor):
        """On a GPU, an address of its memory; only code for that GPU could follow it. In a dry run, tensors on the CPU have none."""
        allocation = getattr(storage_of(tensor), ALLOCATION, None)
        if allocation is None or allocation.gpu is None:
            if self.machine.dry and _compat.is_really_meta(tensor) and tensor.device == CPU and not _asked_by_pytorch():
                raise RuntimeError(
                    "data_ptr: a dry run gives tensors on the CPU no memory, so no address tells one from another: "
                    'put them on a GPU before, model.to("cuda")'
                )
            return original(tensor)
        is_made_of_others = hasattr(tensor, "__tensor_flatten__")  # as a DTensor, which has no address
        if allocation.block is None or not tensor.numel() or is_made_of_others:
            return 0
        return allocation.block.address + tensor.storage_offset() * tensor.element_size()

    def tolist(self, original, tensor):
        """Tensor.tolist: the host waits for the current stream. In a dry run, nan or 0 for what has no numbers."""
        if (gpu := gpu_of(tensor)) is not None:
            self._wait(tensor, gpu)
        with self.machine.untracked():
            return original(self._with_values(tensor))

    def __repr__(self, original, tensor, *, tensor_contents=None):
        if takes_itself_apart(tensor):
            return original(tensor, tensor_contents=tensor_contents)
        gpu = gpu_of(tensor)
        if _compat.is_really_meta(tensor) and (self.machine.dry or gpu is not None) and not is_on_meta(tensor):
            with self.machine.untracked():
                known = values.known_of(tensor) if self.machine.dry else None
            where = f"device='{gpu.device}', " if gpu else ""
            if known is None:
                return f"tensor(..., {where}size={tuple(tensor.shape)}, dtype={tensor.dtype})"
        if gpu is not None:
            self._wait(tensor, gpu)
        with self.machine.untracked():
            shown = self._with_values(tensor)
            if tensor.requires_grad and shown is not tensor:
                shown = shown.detach().requires_grad_()
            text = original(shown, tensor_contents=tensor_contents)
        if gpu is None:
            return text
        end = re.search(r"(, (size|dtype|requires_grad|grad_fn|layout|tangent|nnz)=[^\n]*)?\)$", text)
        return text if end is None else f"{text[: end.start()]}, device='{gpu.device}'{text[end.start() :]}"

    def _wait(self, tensor: torch.Tensor, gpu: GPU) -> None:
        """The host waits for the current stream, and this process for the tensor's numbers."""
        if self.machine.forked:
            self.machine.own(gpu)
        self.machine.clock.wait_for(self.machine.clock.current(gpu.index))
        if self.machine.in_flight.parts:
            self.machine.in_flight.let_finish([tensor])

    def _with_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """In a dry run few have some; for the others nan, or zero. Raises RuntimeError for what was made in one, outside it."""
        if not _compat.is_really_meta(tensor):
            if not (self.machine.some_dry and self.machine.dry and values.is_unknown(tensor)):
                return tensor
        elif not self.machine.dry or is_on_meta(tensor):
            if gpu_of(tensor) is not None:
                raise without_values()
            return tensor
        with self.machine.untracked():
            known = values.values_of(tensor)
        if known is None or values.lacks_some(known):
            self.machine.warn_of_nan(values.why_unknown([tensor]))
        if known is not None:
            return known
        nothing = math.nan if tensor.is_floating_point() or tensor.is_complex() else 0
        with self.machine.untracked():
            return torch.full(tuple(tensor.shape), nothing, dtype=tensor.dtype, device="cpu")


def _asked_by_pytorch() -> bool:
    """PyTorch itself knows that an address may be 0."""
    frame, name = sys._getframe(1), "virtualgpu."
    while name.startswith("virtualgpu.") and frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
    return name.startswith("torch.")


# -- Tensor's own methods while virtual GPUs are on: where tensors say they are, and how new ones are made.
#
# Each function here stands in for one of PyTorch's, which does the work on the base device (the CPU, or meta in a dry run); what
# is added is only the label of the storage, the room on the GPU and the time of the copy. Functions that make tensors need no
# stand-in: with their `device=` they come to the dispatch mode.


GRAD, DATA = _compat.TensorBase.grad, _compat.TensorBase.data
MOVES = ("to", "cuda", "cpu")
METHODS = [*MOVES, "type_as", "type", "numpy", "tolist", "data_ptr", "new", "new_tensor", "pin_memory", "is_pinned"]
METHODS += ["__array__", "__repr__", "__deepcopy__", "__reduce_ex__"]
LAZY = (nn.UninitializedParameter, nn.UninitializedBuffer)


def install(machine: Machine, patches: Patches) -> None:
    """Replace Tensor's methods, and attention."""
    TensorPatches(machine, patches).install()
    attention.install(machine, patches)


class TensorPatches(Moves, Reads):
    """The methods that replace Tensor's. `install` says which."""

    def __init__(self, machine: Machine, patches: Patches):
        self.machine, self.patches, self.local = machine, patches, machine.local

    def install(self) -> None:
        """Replace device, is_cuda, is_cpu, is_meta, get_device, grad, data and METHODS."""
        replace, Tensor = self.patches.replace, torch.Tensor
        replace(Tensor, "device", property(self.device))
        replace(Tensor, "is_cuda", property(lambda tensor: self.device(tensor).type == "cuda"))
        replace(Tensor, "is_cpu", property(lambda tensor: self.device(tensor).type == "cpu"))
        replace(Tensor, "is_meta", property(self.is_meta))
        replace(Tensor, "get_device", lambda tensor: -1 if (d := self.device(tensor)).index is None else d.index)
        replace(Tensor, "data", Data(DATA.__get__, self.set_data))
        unwrapped = torch.overrides.get_default_nowrap_functions()  # whose results stay plain tensors: kept by PyTorch
        grad = Grad(GRAD.__get__, self.set_grad, GRAD.__delete__)
        replace(Tensor, "grad", grad)
        unwrapped.add(grad.__get__)
        self.patches.undo(lambda: unwrapped.discard(grad.__get__))
        for name in METHODS:
            replace(Tensor, name, self._wrap_method(name))

    # -- where a tensor is

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Tensor.device. In a dry run what is on no GPU is on the CPU, also where it is really on meta."""
        if self.local.bypass:  # PyTorch's own meta kernels ask too, and should not be deceived
            return _compat.real_device(tensor)
        gpu = gpu_of(tensor)
        if gpu is not None:
            return gpu.device
        real = _compat.real_device(tensor)
        return CPU if real.type == "meta" and self.machine.dry and not is_on_meta(tensor) else real

    def is_meta(self, tensor: torch.Tensor) -> bool:
        """Tensor.is_meta: in a dry run False, but inside `untracked`, for what the program has not put there itself."""
        return _compat.is_really_meta(tensor) and (self.local.bypass or not self.machine.dry or is_on_meta(tensor))

    def set_grad(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Tensor.grad = gradient. Raises PyTorch's RuntimeError where they are on different devices."""
        if type(gradient) in PLAIN_TYPES and type(tensor) in PLAIN_TYPES and gpu_of(gradient) is not gpu_of(tensor):
            allocation = allocation_of(gradient)
            if not (self.local.bypass or made_by_cpp(gradient) or (allocation is not None and allocation.inferred)):
                raise RuntimeError("assigned grad has data located on a different device")
        GRAD.__set__(tensor, gradient)

    def set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Tensor.data = value. In a dry run what came with its numbers (from a file) takes a shape, and the other way round, by becoming
        another tensor: PyTorch's C++ refuses, for one lies on the CPU and one on meta."""
        if self.local.bypass or not self.machine.dry or not self._becomes(tensor, value):
            return DATA.__set__(tensor, value)
        with torch.no_grad():
            other = value.detach()
        if isinstance(tensor, torch.nn.Parameter):
            other = torch.nn.Parameter(other, tensor.requires_grad)
        vars(other).update(vars(tensor))
        torch.utils.swap_tensors(tensor, other.requires_grad_(tensor.requires_grad))

    def _becomes(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """One of them is a shape, and nothing in C++ knows the tensor yet by its old self: a graph, a gradient, a hook."""
        if type(tensor) not in PLAIN_TYPES or type(value) not in PLAIN_TYPES:
            return False
        if _compat.is_really_meta(tensor) == _compat.is_really_meta(value):
            return False
        known = tensor.grad is not None or _compat.has_hooks(tensor) or _compat.is_view(tensor)
        return tensor.is_leaf and not known

    # -- copies, pinned memory

    def __deepcopy__(self, original, tensor, memo):
        if self.machine.dry and tensor.is_leaf and id(tensor) not in memo:
            with torch.no_grad():
                memo[id(tensor)] = tensor.clone().requires_grad_(tensor.requires_grad)
        return original(tensor, memo)

    def __reduce_ex__(self, original, tensor, proto):
        """A shape of a dry run takes the numbers along that are known of it: other ranks are given it in a Python object."""
        out = original(tensor, proto)
        if not _compat.is_really_meta(tensor):
            return out
        with self.machine.untracked():
            numbers = values.known_of(tensor)
        return out if numbers is None else (values.rebuilt, (*out, numbers))

    def pin_memory(self, original, tensor, device=None):
        """Tensor.pin_memory: a copy, unless it is pinned. Raises RuntimeError for a tensor on a GPU, and where there is no GPU."""
        if not self.machine.look():
            raise no_gpus()
        if takes_itself_apart(tensor):
            return original(tensor)
        if (gpu := gpu_of(tensor)) is not None:
            raise RuntimeError(f"cannot pin '{tensor.type()}' on {gpu.device}: only dense CPU tensors can be pinned")
        if self.is_pinned(None, tensor):
            return tensor
        copy = tensor.clone()
        pin(copy)
        return copy

    def is_pinned(self, original, tensor, device=None):
        """Tensor.is_pinned: is its storage marked so? Whether C++ pinned it is not asked."""
        return is_pinned(tensor)

    # -- making new ones, where C++ asks the real device

    def new(self, original, tensor, *args, **kwargs):
        """x.new(2, 3): of x's type, where x is."""
        gpu, device = gpu_of(tensor), kwargs.pop("device", None)
        if device is not None:
            gpu = self.machine.gpu(device)
        with self.machine.untracked():
            out = original(tensor, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and storage_of(out) is storage_of(args[0]):
            return out
        return self.machine.place(out, gpu)

    def new_tensor(self, original, tensor, data, *, dtype=None, device=None, requires_grad=False, **kwargs):
        """No operation of its own tells dispatch where x is."""
        where = self.device(tensor) if device is None else device
        if not isinstance(data, torch.Tensor):
            options = {"dtype": dtype or tensor.dtype, "requires_grad": requires_grad, **kwargs}
            return torch.tensor(data, device=where, **options)
        with self.machine.untracked():
            out = original(tensor, data, dtype=dtype, **kwargs)
        return out.to(where).requires_grad_(requires_grad)

    def _wrap_method(self, name: str):
        """A method of Tensor that calls the one here, with PyTorch's as its first argument."""
        original, function = getattr(torch.Tensor, name), getattr(self, name)

        @functools.wraps(original)
        def method(tensor, *args, **kwargs):
            __tracebackhide__ = True
            if self.local.bypass:
                return original(tensor, *args, **kwargs)
            try:
                if type(tensor) not in PLAIN_TYPES and name in MOVES and isinstance(tensor, LAZY):
                    with _compat.without_function_subclasses():  # a lazy module's: it lets through what it knows alone
                        out = function(original, tensor.as_subclass(torch.Tensor), *args, **kwargs)
                        return out.as_subclass(type(tensor))
                return function(original, tensor, *args, **kwargs)
            except RuntimeError as error:
                frames = foreign(error.__traceback__)
                raise error.with_traceback(frames) from error.__cause__  # PyTorch's error, for the line above

        return method


class Grad(property):
    """Tensor.grad. torch._dynamo asks such attributes of Tensor for their class and name."""

    __objclass__, __name__ = _compat.TensorBase, "grad"


class Data(Grad):
    """Tensor.data, likewise."""

    __name__ = "data"
