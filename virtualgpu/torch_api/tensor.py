"""Tensor's own methods while virtual GPUs are on: where tensors say they are, and how new ones are made. `tensor_moves` has
how they get elsewhere, `tensor_reads` how they are read.

Each function here stands in for one of PyTorch's, which does the work on the base device (the CPU, or meta in a dry run); what
is added is only the label of the storage, the room on the GPU and the time of the copy. Functions that make tensors need no
stand-in: with their `device=` they come to the dispatch mode.
"""

import functools

import torch
from torch.nn.parameter import UninitializedTensorMixin

from virtualgpu import _compat
from virtualgpu.engine import values
from virtualgpu.engine.allocation import PLAIN_TYPES, allocation_of, gpu_of, is_pinned, made_by_cpp, pin, storage_of
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.on_meta import is_on_meta
from virtualgpu.errors import foreign, no_gpus
from virtualgpu.torch_api import fused
from virtualgpu.torch_api.registry import Patches
from virtualgpu.torch_api.tensor_moves import CPU, Moves, takes_itself_apart
from virtualgpu.torch_api.tensor_reads import Reads

GRAD, DATA = _compat.TensorBase.grad, _compat.TensorBase.data
MOVES = ("to", "cuda", "cpu")
METHODS = [*MOVES, "type_as", "type", "numpy", "tolist", "data_ptr", "new", "new_tensor", "pin_memory", "is_pinned"]
METHODS += ["__array__", "__repr__", "__deepcopy__", "__reduce_ex__"]


def install(machine: Machine, patches: Patches) -> None:
    """Replace Tensor's methods, and the kernels of `fused`."""
    TensorPatches(machine, patches).install()
    fused.install(machine, patches)


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
        made = original(tensor, proto)
        if not _compat.is_really_meta(tensor):
            return made
        with self.machine.untracked():
            numbers = values.known_of(tensor)
        return made if numbers is None else (values.rebuilt, (*made, numbers))

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
            made = original(tensor, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and storage_of(made) is storage_of(args[0]):
            return made
        return self.machine.place(made, gpu)

    def new_tensor(self, original, tensor, data, *, dtype=None, device=None, requires_grad=False, **kwargs):
        """No operation of its own tells dispatch where x is."""
        where = self.device(tensor) if device is None else device
        if not isinstance(data, torch.Tensor):
            options = {"dtype": dtype or tensor.dtype, "requires_grad": requires_grad, **kwargs}
            return torch.tensor(data, device=where, **options)
        with self.machine.untracked():
            made = original(tensor, data, dtype=dtype, **kwargs)
        return made.to(where).requires_grad_(requires_grad)

    def _wrap_method(self, name: str):
        """A method of Tensor that calls the one here, with PyTorch's as its first argument."""
        original, function = getattr(torch.Tensor, name), getattr(self, name)

        @functools.wraps(original)
        def method(tensor, *args, **kwargs):
            __tracebackhide__ = True
            if self.local.bypass:
                return original(tensor, *args, **kwargs)
            try:
                if type(tensor) not in PLAIN_TYPES and name in MOVES and isinstance(tensor, UninitializedTensorMixin):
                    with _compat.without_function_subclasses():  # a lazy module's: it lets through what it knows alone
                        made = function(original, tensor.as_subclass(torch.Tensor), *args, **kwargs)
                        return made.as_subclass(type(tensor))
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
