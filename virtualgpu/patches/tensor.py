"""Where tensors say they are, how they get elsewhere, and how they are read: Tensor's own methods while virtual GPUs are on.

Each function here stands in for one of PyTorch's, which does the work on the base device (the CPU, or meta in a dry run); what
is added is only the label of the storage, the room on the GPU and the time of the copy. Functions that make tensors need no
stand-in: with their `device=` they come to the dispatch mode.
"""

import functools
import math
import re
import sys

import torch
from torch.nn.parameter import UninitializedTensorMixin

from virtualgpu import _compat
from virtualgpu.engine import values
from virtualgpu.engine.dispatch import has_dispatch
from virtualgpu.engine.eager import LARGE, require_room
from virtualgpu.engine.home import PLAIN, gpu_of, home_of, made_by_cpp, sparse_parts, storage_of
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.operations import LEGACY_TYPE_NAMES, type_name
from virtualgpu.errors import foreign, without_values
from virtualgpu.patches import fused
from virtualgpu.patches.registry import Patches

CPU = torch.device("cpu")
GRAD = _compat.TensorBase.grad
MOVES = ("to", "cuda", "cpu")
METHODS = [
    "to",
    "type_as",
    "cuda",
    "cpu",
    "type",
    "numpy",
    "tolist",
    "new",
    "new_tensor",
    "__array__",
    "__repr__",
    "__deepcopy__",
]
METHODS += ["pin_memory", "is_pinned", "is_shared", "share_memory_", "data_ptr", "__dlpack__"]


def install(machine: Machine, patches: Patches) -> None:
    """Replace Tensor's methods, and the kernels of `fused`."""
    TensorPatches(machine, patches).install()
    fused.install(machine, patches)


class TensorPatches:
    """The methods that replace Tensor's. `install` says which."""

    def __init__(self, machine: Machine, patches: Patches):
        self.machine, self.patches, self.local = machine, patches, machine.local

    def install(self) -> None:
        """Replace device, is_cuda, is_cpu, is_meta, get_device, grad and METHODS."""
        replace, Tensor = self.patches.replace, torch.Tensor
        replace(Tensor, "device", property(self.device))
        replace(Tensor, "is_cuda", property(lambda tensor: self.device(tensor).type == "cuda"))
        replace(Tensor, "is_cpu", property(lambda tensor: self.device(tensor).type == "cpu"))
        replace(Tensor, "is_meta", property(self.is_meta))
        replace(Tensor, "get_device", lambda tensor: -1 if (d := self.device(tensor)).index is None else d.index)
        unwrapped = torch.overrides.get_default_nowrap_functions()  # whose results stay plain tensors: kept by PyTorch
        grad = Grad(GRAD.__get__, self.set_grad, GRAD.__delete__)
        replace(Tensor, "grad", grad)
        unwrapped.add(grad.__get__)
        self.patches.undo(lambda: unwrapped.discard(grad.__get__))
        for name in METHODS:
            if hasattr(self, name):
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
        return CPU if real.type == "meta" and self.machine.dry else real

    def is_meta(self, tensor: torch.Tensor) -> bool:
        """Tensor.is_meta: False in a dry run, but inside `untracked`."""
        return _compat.is_really_meta(tensor) and (self.local.bypass or not self.machine.dry)

    def set_grad(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Tensor.grad = gradient. Raises PyTorch's RuntimeError where they are on different devices."""
        if type(gradient) in PLAIN and type(tensor) in PLAIN and gpu_of(gradient) is not gpu_of(tensor):
            home = home_of(gradient)
            if not (self.local.bypass or made_by_cpp(gradient) or (home is not None and home.guessed)):
                raise RuntimeError("assigned grad has data located on a different device")
        GRAD.__set__(tensor, gradient)

    # -- how it gets elsewhere

    def move(self, tensor: torch.Tensor, target: GPU | None, wait: bool = True) -> torch.Tensor:
        """A copy of `tensor` on `target` (None: the CPU), a new storage, through which gradients travel back."""
        if (tensor.requires_grad and torch.is_grad_enabled()) or _compat.is_functorch_wrapped(tensor):
            return ToCopy.apply(tensor, self, target, wait)
        return self.carry(tensor, target, wait)

    def carry(self, tensor: torch.Tensor, target: GPU | None, wait: bool) -> torch.Tensor:
        """As `move`, without gradients. Raises torch.OutOfMemoryError where there is no room."""
        machine, source = self.machine, gpu_of(tensor)
        if _takes_itself_apart(
            tensor
        ):  # as an operation, its parts come by; as `to`, C++ would find it on the CPU already
            device = CPU if target is None else target.device
            return torch.ops.aten._to_copy.default(tensor.detach(), device=device, non_blocking=not wait)
        if source is not None:
            machine.own(source)
        if _compat.is_really_meta(tensor) and not machine.dry and (source or target) is not None:
            raise (
                without_values()
                if source is not None
                else NotImplementedError("Cannot copy out of meta tensor; no data!")
            )
        nbytes = tensor.numel() * tensor.element_size()
        if target is not None and nbytes >= LARGE:
            target.require(nbytes) if machine.dry else require_room([nbytes], target)
        with machine.untracked():
            if machine.dry and not _compat.is_really_meta(tensor):
                copy = _compat.empty_like(tensor.detach(), device="meta")
            else:
                copy = tensor.detach().clone()
            if machine.dry:
                values.follow_copy(tensor, copy)
        if storage_of(copy) is not None:
            for part in machine_parts(copy):
                machine.place(part, target)
        if target is None and source is not None and not wait:
            storage_of(copy)._virtual_pinned = True  # PyTorch pins what it copies to in the background
        pinned = any(getattr(storage_of(t), "_virtual_pinned", False) for t in (tensor, copy))
        machine.charge_copy(source, target, nbytes, wait or not (pinned or (source and target)))
        return copy

    def to(self, original, tensor, *args, **kwargs):
        """Tensor.to, also to another tensor's place; what takes itself apart (DTensor) moves part by part."""
        apart = _takes_itself_apart(tensor)
        first = args[0] if args else kwargs.get("other")
        flags = [a for a in args if isinstance(a, bool)]  # non_blocking, copy
        if isinstance(first, torch.Tensor):  # .to(other): its device and dtype
            where, dtype = self.device(first), first.dtype
            if where.type not in ("cpu", "cuda"):
                return original(tensor, *args, **kwargs)
            if apart and where.type == "cuda" and self.machine.gpu(where) is not gpu_of(tensor):
                return original(tensor, *args, **kwargs)
            plain = original(tensor, dtype, *args[1:], **{k: v for k, v in kwargs.items() if k != "other"})
        else:
            where, dtype, _non_blocking, memory_format = _compat.parse_to(
                *(_as_cuda_device(a) for a in args if not isinstance(a, bool)),
                **{k: _as_cuda_device(v) for k, v in kwargs.items() if k not in ("copy", "non_blocking")},
            )
            if where is not None and where.type == "meta" and gpu_of(tensor) is not None and self.machine.dry:
                with self.machine.untracked():  # a shape, and no memory of that GPU
                    return torch.empty_like(tensor.detach(), dtype=dtype, device="meta")
            if where is not None and where.type not in ("cpu", "cuda"):
                return original(tensor, *args, **kwargs)
            if apart and where is not None and where.type == "cuda" and self.machine.gpu(where) is not gpu_of(tensor):
                return original(
                    tensor, *args, **kwargs
                )  # its parts come by; where it is already, there is nothing to do
            copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
            plain = tensor
            if dtype is not None or memory_format is not None or copy:
                options = {"copy": copy} | ({"memory_format": memory_format} if memory_format is not None else {})
                plain = original(tensor, dtype if dtype is not None else tensor.dtype, **options)
        if where is None:
            return plain
        wait = not kwargs.get("non_blocking", flags[0] if flags else False)
        target = self.machine.gpu(where)
        return plain if gpu_of(plain) is target else self.move(plain, target, wait)

    def type_as(self, original, tensor, other):
        """Tensor.type_as: a CPU tensor goes to the other's GPU, too."""
        return tensor.to(other)

    def cuda(self, original, tensor, device=None, non_blocking=False, memory_format=torch.preserve_format):
        """Tensor.cuda. Raises RuntimeError for the CPU."""
        target = self.machine.gpu("cuda" if device is None else device)
        if target is None:
            raise RuntimeError("Invalid device, must be cuda device")
        return tensor.to(target.device, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(self, original, tensor, memory_format=torch.preserve_format):
        """Tensor.cpu; from a GPU, the host waits for the copy."""
        return tensor.to(CPU, memory_format=memory_format)

    def type(self, original, tensor, dtype=None, non_blocking=False, **kwargs):
        """Tensor.type; without dtype, the name ("torch.cuda.FloatTensor")."""
        if dtype is None:
            return type_name(tensor)
        if isinstance(dtype, type):  # torch.cuda.FloatTensor itself, as torchsummary has it
            dtype = f"{dtype.__module__}.{dtype.__name__}"
        if isinstance(dtype, str) and dtype.startswith("torch."):
            kinds = {name: kind for kind, name in LEGACY_TYPE_NAMES.items()}
            kind = kinds.get(dtype.rpartition(".")[2])
            if kind is not None:
                gpu = gpu_of(tensor)
                where = CPU if "cuda" not in dtype else "cuda" if gpu is None else gpu.device
                return tensor.to(where, kind, non_blocking)
        return original(tensor, dtype, non_blocking, **kwargs)

    # -- reading it

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
        home = getattr(storage_of(tensor), "_virtual_home", None)
        if home is None or home.gpu is None:
            if self.machine.dry and _compat.is_really_meta(tensor) and tensor.device == CPU and not _asked_by_pytorch():
                raise RuntimeError(
                    "data_ptr: a dry run gives tensors on the CPU no memory, so no address tells one from another: "
                    'put them on a GPU before, model.to("cuda")'
                )
            return original(tensor)
        if home.block is None or not tensor.numel() or hasattr(tensor, "__tensor_flatten__"):  # a DTensor has none
            return 0
        return home.block.address + tensor.storage_offset() * tensor.element_size()

    def tolist(self, original, tensor):
        """Tensor.tolist: the host waits for the current stream. In a dry run, nan or 0 for what has no numbers."""
        if (gpu := gpu_of(tensor)) is not None:
            self.machine.clock.wait_for(self.machine.clock.current(gpu.index))
        with self.machine.untracked():
            return original(self._with_values(tensor))

    def __repr__(self, original, tensor, *, tensor_contents=None):
        if _takes_itself_apart(tensor):
            return original(tensor, tensor_contents=tensor_contents)
        gpu = gpu_of(tensor)
        if _compat.is_really_meta(tensor) and (self.machine.dry or gpu is not None):
            where = f"device='{gpu.device}', " if gpu else ""
            return f"tensor(..., {where}size={tuple(tensor.shape)}, dtype={tensor.dtype})"
        if gpu is not None:
            self.machine.clock.wait_for(self.machine.clock.current(gpu.index))
        with self.machine.untracked():
            text = original(self._with_values(tensor), tensor_contents=tensor_contents)
        if gpu is None:
            return text
        end = re.search(r"(, (size|dtype|requires_grad|grad_fn|layout|tangent|nnz)=[^\n]*)?\)$", text)
        return text if end is None else f"{text[: end.start()]}, device='{gpu.device}'{text[end.start() :]}"

    def _with_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """In a dry run few have some; for the others nan, or zero. Raises RuntimeError for what was made in one, outside it."""
        if not _compat.is_really_meta(tensor):
            if not (
                self.machine.some_dry and self.machine.dry and gpu_of(tensor) is None and values.is_unknown(tensor)
            ):
                return tensor
        elif not self.machine.dry:
            if gpu_of(tensor) is not None:
                raise without_values()
            return tensor
        elif (known := values.values_of(tensor)) is not None:
            return known
        nothing = math.nan if tensor.is_floating_point() else 0
        with self.machine.untracked():
            return torch.full(tuple(tensor.shape), nothing, dtype=tensor.dtype, device="cpu")

    # -- copies, pinned memory

    def __deepcopy__(self, original, tensor, memo):
        if self.machine.dry and tensor.is_leaf and id(tensor) not in memo:
            with torch.no_grad():
                memo[id(tensor)] = tensor.clone().requires_grad_(tensor.requires_grad)
        return original(tensor, memo)

    def pin_memory(self, original, tensor, device=None):
        """Tensor.pin_memory: a copy, unless it is pinned. Raises RuntimeError for a tensor on a GPU."""
        if _takes_itself_apart(tensor):
            return original(tensor)
        if (gpu := gpu_of(tensor)) is not None:
            raise RuntimeError(f"cannot pin '{tensor.type()}' on {gpu.device}: only dense CPU tensors can be pinned")
        if self.is_pinned(None, tensor):
            return tensor
        copy = tensor.clone()
        storage_of(copy)._virtual_pinned = True
        return copy

    def is_pinned(self, original, tensor, device=None):
        """Tensor.is_pinned: is its storage marked so? Whether C++ pinned it is not asked."""
        return getattr(storage_of(tensor), "_virtual_pinned", False)

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
        """A method of Tensor that calls ours, with PyTorch's as its first argument."""
        original, ours = getattr(torch.Tensor, name), getattr(self, name)

        @functools.wraps(original)
        def method(tensor, *args, **kwargs):
            __tracebackhide__ = True
            if self.local.bypass:
                return original(tensor, *args, **kwargs)
            try:
                if type(tensor) not in PLAIN and name in MOVES and isinstance(tensor, UninitializedTensorMixin):
                    with _compat.without_function_subclasses():  # a lazy module's: it lets through what it knows alone
                        made = ours(original, tensor.as_subclass(torch.Tensor), *args, **kwargs)
                        return made.as_subclass(type(tensor))
                return ours(original, tensor, *args, **kwargs)
            except RuntimeError as error:
                frames = foreign(error.__traceback__)
                raise error.with_traceback(frames) from error.__cause__  # PyTorch's error, for the line above

        return method


class Grad(property):
    """Tensor.grad. torch._dynamo asks such attributes of Tensor for their class and name."""

    __objclass__, __name__ = _compat.TensorBase, "grad"


class ToCopy(torch.autograd.Function):
    """The copy between two places, and the copy of its gradient back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor, patches, target, wait):
        """`TensorPatches.carry` it to `target`; None: the CPU."""
        return patches.carry(tensor, target, wait)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Remember where the tensor was (`source`), and where it goes (`target`)."""
        tensor, ctx.patches, ctx.target, _ = inputs
        ctx.source = gpu_of(tensor)

    @staticmethod
    def backward(ctx, gradient):
        """The gradient goes to where the tensor was; the host waits, unless both places are GPUs."""
        return ctx.patches.move(gradient, ctx.source), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        """A tangent goes where the tensor went."""
        return ctx.patches.move(tangent, ctx.target)


def machine_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with a storage that this one is made of: itself, or the parts of a sparse one."""
    return sparse_parts(tensor) or [tensor]


def _takes_itself_apart(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and has_dispatch(type(tensor))


def _as_cuda_device(device):
    """A bare index means a GPU."""
    return torch.device("cuda", device) if type(device) is int else device


def _asked_by_pytorch() -> bool:
    """PyTorch itself knows that an address may be 0."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("virtualgpu."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith("torch.")
