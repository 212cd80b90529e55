"""Where tensors say they are, and how they get there: `.to`, `.device`, `device=` in factories, saving and loading.

Each function here stands in for one of PyTorch's, which does the work on the base device (the CPU, or meta in a dry run); what
is added is only the label of the storage, the room on the GPU and the time of the copy.
"""

import functools
import math
import re

import torch
from torch import nn
from torch.utils._device import DeviceContext, _device_constructors

from virtualgpu.engine.machine import GPU, HOME, Machine, gpu_of, storage_of
from virtualgpu.engine.operations import LEGACY, type_name
from virtualgpu.patches.registry import Patches

CPU = torch.device("cpu")

FACTORIES = [
    "empty",
    "ones",
    "zeros",
    "full",
    "eye",
    "arange",
    "range",
    "linspace",
    "logspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "tensor",
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "empty_strided",
    "empty_permuted",
    "tril_indices",
    "triu_indices",
    "hann_window",
    "hamming_window",
    "bartlett_window",
    "blackman_window",
    "kaiser_window",
    "empty_like",
    "ones_like",
    "zeros_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
]
NEW_TENSOR = torch.Tensor.new_tensor
METHODS = ["new_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"]


class Placement:
    """The functions that replace PyTorch's while virtual GPUs are on. `install` says which."""

    def __init__(self, machine: Machine, patches: Patches):
        self.machine, self.patches, self.local = machine, patches, machine.local

    def install(self) -> None:
        replace, Tensor = self.patches.replace, torch.Tensor
        replace(torch.UntypedStorage, HOME, None)  # the CPU's, unless it says otherwise
        replace(Tensor, "device", property(self.device))
        replace(Tensor, "is_cuda", property(lambda tensor: self.device(tensor).type == "cuda"))
        replace(Tensor, "is_cpu", property(lambda tensor: self.device(tensor).type == "cpu"))
        replace(Tensor, "is_meta", property(self.is_meta))
        replace(Tensor, "get_device", lambda tensor: -1 if (d := self.device(tensor)).index is None else d.index)
        for name in [
            "to",
            "cuda",
            "cpu",
            "type",
            "numpy",
            "tolist",
            "pin_memory",
            "is_pinned",
            "__array__",
            "__repr__",
            "__deepcopy__",
            "record_stream",
        ]:
            replace(Tensor, name, self._standing_in(name))
        for name in FACTORIES:
            replace(torch, name, self._factory(getattr(torch, name)))
        for name in METHODS:
            replace(Tensor, name, self._factory(getattr(Tensor, name)))
        replace(torch.UntypedStorage, "clone", self._storage_clone(torch.UntypedStorage.clone))
        replace(torch, "Generator", _generator(torch.Generator, self.machine))
        for owner in (nn.functional, torch._C._nn):
            replace(owner, "scaled_dot_product_attention", self._attention(owner.scaled_dot_product_attention))
        replace(torch._C, "_group_tensors_by_device_and_dtype", self.group_by_device)

    # -- where a tensor is

    def device(self, tensor: torch.Tensor) -> torch.device:
        if self.local.bypass:  # PyTorch's own meta kernels ask too, and should not be deceived
            return _real_device(tensor)
        gpu = gpu_of(tensor)
        if gpu is not None:
            return gpu.device
        real = _real_device(tensor)
        return CPU if real.type == "meta" and self.machine.dry else real

    def is_meta(self, tensor: torch.Tensor) -> bool:
        return _real_device(tensor).type == "meta" and (self.local.bypass or not self.machine.dry)

    # -- how it gets elsewhere

    def move(self, tensor: torch.Tensor, target: GPU | None, wait: bool = True) -> torch.Tensor:
        """A copy of `tensor` on `target` (None: the CPU), through which gradients travel back."""
        if (tensor.requires_grad and torch.is_grad_enabled()) or torch._C._functorch.is_functorch_wrapped_tensor(
            tensor
        ):
            return ToCopy.apply(tensor, self, target, wait)
        return self.carry(tensor, target, wait)

    def carry(self, tensor: torch.Tensor, target: GPU | None, wait: bool) -> torch.Tensor:
        machine, source = self.machine, gpu_of(tensor)
        if source is not None:
            machine.own(source)
        with machine.aside():
            if machine.dry and _real_device(tensor).type != "meta":
                copy = torch._C._VariableFunctions.empty_like(tensor.detach(), device="meta")
            else:
                copy = tensor.detach().clone()
        machine.place(copy, target)
        pinned = any(getattr(storage_of(t), "_virtual_pinned", False) for t in (tensor, copy))
        machine.travel(source, target, tensor, wait or not (pinned or source is not None))
        return copy

    def to(self, original, tensor, *args, **kwargs):
        first = args[0] if args else kwargs.get("other")
        flags = [a for a in args if isinstance(a, bool)]  # non_blocking, copy
        if isinstance(first, torch.Tensor):  # .to(other): its device and dtype
            where, dtype = self.device(first), first.dtype
            plain = original(tensor, dtype, *args[1:], **{k: v for k, v in kwargs.items() if k != "other"})
        else:
            where, dtype, _non_blocking, memory_format = torch._C._nn._parse_to(
                *(_unnumbered(a) for a in args if not isinstance(a, bool)),
                **{k: _unnumbered(v) for k, v in kwargs.items() if k not in ("copy", "non_blocking")},
            )
            if where is not None and where.type not in ("cpu", "cuda"):
                return original(tensor, *args, **kwargs)
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

    def cuda(self, original, tensor, device=None, non_blocking=False, memory_format=torch.preserve_format):
        target = self.machine.gpu("cuda" if device is None else device)
        return tensor.to(target.device, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(self, original, tensor, memory_format=torch.preserve_format):
        return tensor.to(CPU, memory_format=memory_format)

    def type(self, original, tensor, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            return type_name(tensor)
        if isinstance(dtype, type):  # torch.cuda.FloatTensor itself, as torchsummary has it
            dtype = f"{dtype.__module__}.{dtype.__name__}"
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            kinds = {name: kind for kind, name in LEGACY.items()}
            gpu = gpu_of(tensor)
            return tensor.to("cuda" if gpu is None else gpu.device, kinds[dtype.removeprefix("torch.cuda.")])
        return original(tensor, dtype, non_blocking, **kwargs)

    # -- reading it

    def numpy(self, original, tensor, *, force=False):
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

    def tolist(self, original, tensor):
        if (gpu := gpu_of(tensor)) is not None:
            self.machine.clock.wait(gpu.index)
        with self.machine.aside():
            return original(self._with_values(tensor))

    def __repr__(self, original, tensor, *, tensor_contents=None):
        gpu = gpu_of(tensor)
        if _real_device(tensor).type == "meta" and self.machine.dry:
            where = f"device='{gpu.device}', " if gpu else ""
            return f"tensor(..., {where}size={tuple(tensor.shape)}, dtype={tensor.dtype})"
        if gpu is not None:
            self.machine.clock.wait(gpu.index)
        with self.machine.aside():
            text = original(tensor, tensor_contents=tensor_contents)
        if gpu is None:
            return text
        end = re.search(r"(, (size|dtype|requires_grad|grad_fn|layout|tangent)=[^\n]*)?\)$", text).start()
        return f"{text[:end]}, device='{gpu.device}'{text[end:]}"

    def _with_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """In a dry run there are none: nan, or zero."""
        if not (self.machine.dry and _real_device(tensor).type == "meta"):
            return tensor
        nothing = math.nan if tensor.is_floating_point() else 0
        with self.machine.aside():
            return torch.full(tuple(tensor.shape), nothing, dtype=tensor.dtype, device="cpu")

    # -- copies, pinned memory, streams

    def __deepcopy__(self, original, tensor, memo):
        if self.machine.dry and tensor.is_leaf and id(tensor) not in memo:
            with torch.no_grad():
                memo[id(tensor)] = tensor.clone().requires_grad_(tensor.requires_grad)
        return original(tensor, memo)

    def _storage_clone(self, original):
        @functools.wraps(original)
        def clone(storage):
            with self.machine.aside():
                copy = original(storage)
            home = getattr(storage, HOME, None)
            if home is not None:
                self.machine.place(torch._C._VariableFunctions.empty(0, dtype=torch.uint8).set_(copy), home.gpu)
            return copy

        return clone

    def pin_memory(self, original, tensor, device=None):
        if (gpu := gpu_of(tensor)) is not None:
            raise RuntimeError(f"cannot pin '{tensor.type()}' on {gpu.device}: only dense CPU tensors can be pinned")
        if self.is_pinned(None, tensor):
            return tensor
        copy = tensor.clone()
        storage_of(copy)._virtual_pinned = True
        return copy

    def is_pinned(self, original, tensor, device=None):
        return getattr(storage_of(tensor), "_virtual_pinned", False)

    def record_stream(self, original, tensor, stream):
        """There is one stream only."""

    # -- making new ones

    def _factory(self, original):
        takes_default = original in _device_constructors()

        @functools.wraps(original)
        def make(*args, **kwargs):
            __tracebackhide__ = True
            if self.local.bypass:
                return original(*args, **kwargs)
            device = kwargs.get("device")
            if device is None:
                if original is NEW_TENSOR:  # no operation of its own, which would tell where
                    device = self.device(args[0])
                elif not takes_default:
                    return original(*args, **kwargs)  # zeros_like(x): where x is, as for any other operation
                else:
                    device = _default_device() or CPU
            if not isinstance(device, int) and torch.device(device).type not in ("cpu", "cuda"):
                return original(*args, **kwargs)
            try:
                return self._make(original, self.machine.gpu(device), args, kwargs)
            except RuntimeError as error:
                raise error.with_traceback(None) from error.__cause__  # PyTorch's error, for the line above

        return make

    def _make(self, original, gpu: GPU | None, args, kwargs) -> torch.Tensor:
        machine = self.machine
        with machine.aside():
            made = original(*args, **{**kwargs, "device": machine.base})
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if given is not None and storage_of(made) is storage_of(given):
            return made.to(CPU if gpu is None else gpu.device)  # as_tensor of what is already a tensor
        if gpu is not None:
            machine.place(made, gpu)
            machine.clock.launch(gpu.index, gpu.spec.seconds(0, made.nbytes, made.dtype), original.__name__)
        return made

    def _standing_in(self, name: str):
        """A method of Tensor that calls ours, with PyTorch's as its first argument."""
        original, ours = getattr(torch.Tensor, name), getattr(self, name)

        @functools.wraps(original)
        def method(tensor, *args, **kwargs):
            __tracebackhide__ = True
            if self.local.bypass:
                return original(tensor, *args, **kwargs)
            try:
                return ours(original, tensor, *args, **kwargs)
            except RuntimeError as error:
                raise error.with_traceback(None) from error.__cause__  # PyTorch's error, for the line above

        return method

    # -- kernels that PyTorch chooses by the real device

    def _attention(self, original):
        """In a dry run, the fused kernel that the CPU takes, and a GPU likewise; PyTorch has none for meta."""

        @functools.wraps(original)
        def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
            options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            if not self.machine.dry or query.dim() != 4 or dropout_p or enable_gqa:
                return original(query, key, value, **options, enable_gqa=enable_gqa)
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                options["attn_mask"] = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, 0)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, **options)[0]

        return attention

    # -- lists of tensors on several devices

    def group_by_device(self, lists, with_indices=False):
        """What torch.optim asks before it calls foreach operations: {(device, dtype): (lists, indices)}, by each first tensor."""
        groups: dict = {}
        for at, first in enumerate(lists[0]):
            found, indices = groups.setdefault((self.device(first), first.dtype), ([[] for _ in lists], []))
            for column, values in zip(found, lists, strict=True):
                if values:
                    column.append(values[at])
            if with_indices:
                indices.append(at)
        return groups


class ToCopy(torch.autograd.Function):
    """The copy between two places, and the copy of its gradient back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor, placement, target, wait):
        return placement.carry(tensor, target, wait)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensor, ctx.placement, ctx.target, _ = inputs
        ctx.source = gpu_of(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.placement.move(gradient, ctx.source), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return ctx.placement.move(tangent, ctx.target)


def _default_device() -> torch.device | None:
    """What `with torch.device(...)` or torch.set_default_device chose, if anything."""
    for level in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(level)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def _real_device(tensor: torch.Tensor) -> torch.device:
    return torch._C.TensorBase.device.__get__(tensor)


def _unnumbered(device):
    """A bare index means a GPU."""
    return torch.device("cuda", device) if type(device) is int else device


def _generator(original, machine: Machine):
    """torch.Generator(device="cuda"): virtual GPUs draw from the CPU's generators, so that numbers equal the CPU's."""

    class Generator(original):
        def __new__(cls, device="cpu"):
            machine.gpu(device)
            return super().__new__(cls, device="cpu")

    return Generator
