"""How tensors get elsewhere: Tensor.to and its kind, and the gradients of such copies."""

import torch

from virtualgpu import _compat
from virtualgpu.engine import copies, values
from virtualgpu.engine.allocation import gpu_of, is_pinned, pin, sparse_parts, storage_of
from virtualgpu.engine.dispatch import has_dispatch
from virtualgpu.engine.eager import LARGE, require_room
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.on_meta import is_on_meta, put_on_meta
from virtualgpu.engine.operations import type_name
from virtualgpu.engine.scalar_types import LEGACY
from virtualgpu.errors import no_data

CPU = torch.device("cpu")


class Moves:
    """The methods of Tensor that give a tensor somewhere else."""

    machine: Machine

    def move(self, tensor: torch.Tensor, target: GPU | None, wait: bool = True, **changes) -> torch.Tensor:
        """A copy of `tensor` on `target` (None: the CPU), a new storage, through which gradients travel back and tangents on. changes: its dtype
        and memory_format, where they are not the tensor's."""
        backward = tensor.requires_grad and torch.is_grad_enabled()
        if backward or _compat.in_forward_mode() or _compat.is_functorch_wrapped(tensor):
            return ToCopy.apply(tensor, self, target, wait, *changes.items())
        return self.carry(tensor, target, wait, **changes)

    def carry(self, tensor: torch.Tensor, target: GPU | None, wait: bool, **changes) -> torch.Tensor:
        """As `move`, without gradients. Raises torch.OutOfMemoryError where there is no room."""
        machine, source = self.machine, gpu_of(tensor)
        batched = _compat.is_batched_gradient(tensor)
        if batched or takes_itself_apart(tensor):
            # as an operation, what it is made of comes by; C++'s `to` would find it on the CPU
            device = CPU if target is None else target.device
            plain = tensor if batched else tensor.detach()  # a batch of gradients cannot, and need not
            return torch.ops.aten._to_copy.default(plain, device=device, non_blocking=not wait, **changes)
        if source is not None:
            machine.own(source)
        if self._has_nothing(tensor) and (source or target) is not None:
            raise no_data(made_in_dry_run=source is not None)
        nbytes = tensor.numel() * changes.get("dtype", tensor.dtype).itemsize
        if target is not None and nbytes >= LARGE:
            target.require(nbytes) if machine.dry else require_room([nbytes], target)
        with machine.untracked():
            if machine.dry and not _compat.is_really_meta(tensor):
                copy = _compat.empty_like(tensor.detach(), device="meta", **changes)
            else:
                copy = torch.ops.aten._to_copy.default(tensor.detach(), **changes)
            if machine.dry:
                values.propagate_copy(tensor, copy)
        if storage_of(copy) is not None:
            for part in _parts(copy):
                machine.place(part, target)
        if target is None and source is not None and not wait:
            pin(copy)  # PyTorch pins what it copies to in the background
        pinned = is_pinned(tensor) or is_pinned(copy)
        copies.charge(machine, copy, tensor, (target, source), not wait, pinned)
        return copy

    def _has_nothing(self, tensor: torch.Tensor) -> bool:
        """Is it on meta, in a dry run because the program has put it there?"""
        return _compat.is_really_meta(tensor) and (not self.machine.dry or is_on_meta(tensor))

    def to(self, original, tensor, *args, **kwargs):
        """Tensor.to, also to another tensor's place; what takes itself apart (DTensor) moves part by part."""
        apart = takes_itself_apart(tensor)
        first = args[0] if args else kwargs.get("other")
        flags = [a for a in args if isinstance(a, bool)]  # non_blocking, copy
        if isinstance(first, torch.Tensor):  # .to(other): its device and dtype
            where, dtype = self.device(first), first.dtype
            if where.type == "meta" and self.machine.dry and not apart:
                return self.to_meta(tensor, dtype)
            if where.type not in ("cpu", "cuda"):
                return original(tensor, *args, **kwargs)
            if apart and where.type == "cuda" and self.machine.gpu(where) is not gpu_of(tensor):
                return original(tensor, *args, **kwargs)
            tensor = self.taken_over(original, tensor)
            copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
            memory_format = kwargs.get("memory_format")
        else:
            where, dtype, _non_blocking, memory_format = _compat.parse_to(
                *(_as_cuda_device(a) for a in args if not isinstance(a, bool)),
                **{k: _as_cuda_device(v) for k, v in kwargs.items() if k not in ("copy", "non_blocking")},
            )
            if where is not None and where.type == "meta" and self.machine.dry and not apart:
                return self.to_meta(tensor, dtype)
            if where is not None and where.type not in ("cpu", "cuda"):
                return original(tensor, *args, **kwargs)
            if apart and where is not None and where.type == "cuda" and self.machine.gpu(where) is not gpu_of(tensor):
                # its parts come by; where it is already, there is nothing to do
                return original(tensor, *args, **kwargs)
            if where is not None:
                tensor = self.taken_over(original, tensor)
            copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
        changes = {} if dtype in (None, tensor.dtype) else {"dtype": dtype}
        if memory_format not in (None, torch.preserve_format):
            changes["memory_format"] = memory_format
        target = None if where is None else self.machine.gpu(where)
        if where is not None and gpu_of(tensor) is not target:
            wait = not kwargs.get("non_blocking", flags[0] if flags else False)
            return self.move(tensor, target, wait, **changes)
        plain = tensor
        if changes or copy:
            plain = original(tensor, changes.pop("dtype", tensor.dtype), copy=copy, **changes)
        if where is None:
            return plain
        if target is None and self._has_nothing(plain) and not apart:
            raise no_data(made_in_dry_run=False)
        return plain

    def to_meta(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """In a dry run: a shape that no GPU has memory for. The tensor itself where it is one."""
        if is_on_meta(tensor) and dtype in (None, tensor.dtype):
            return tensor
        with self.machine.untracked():
            return put_on_meta(torch.empty_like(tensor.detach(), dtype=dtype, device="meta"))

    def taken_over(self, original, tensor: torch.Tensor) -> torch.Tensor:
        """From a real GPU to the CPU, by PyTorch's own Tensor.to; any other tensor as it is."""
        if not self.machine.is_on_real_gpu(tensor):
            return tensor
        with self.machine.untracked():
            return original(tensor, CPU)

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
            kinds = {name: kind for kind, name in LEGACY.items()}
            kind = kinds.get(dtype.rpartition(".")[2])
            if kind is not None:
                gpu = gpu_of(tensor)
                where = CPU if "cuda" not in dtype else "cuda" if gpu is None else gpu.device
                return tensor.to(where, kind, non_blocking)
        return original(tensor, dtype, non_blocking, **kwargs)


class ToCopy(torch.autograd.Function):
    """The copy between two places, and the copy of its gradient back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor, patches, target, wait, *changes):
        """`Moves.carry` it to `target`; None: the CPU."""
        return patches.carry(tensor, target, wait, **dict(changes))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Remember where the tensor was (`source`), and where it goes (`target`)."""
        tensor, ctx.patches, ctx.target, _, *changes = inputs
        ctx.source = gpu_of(tensor)
        converts = output.dtype is not tensor.dtype
        ctx.forth, ctx.back = ({"dtype": dtype} if converts else {} for dtype in (output.dtype, tensor.dtype))
        ctx.others = 3 + len(changes)  # which have no gradient

    @staticmethod
    def backward(ctx, gradient):
        """The gradient goes to where the tensor was; the host waits, unless both places are GPUs."""
        return ctx.patches.move(gradient, ctx.source, **ctx.back), *[None] * ctx.others

    @staticmethod
    def jvp(ctx, tangent, *_):
        """A tangent goes where the tensor went."""
        return ctx.patches.move(tangent, ctx.target, **ctx.forth)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with a storage that this one is made of: itself, or the parts of a sparse one."""
    return sparse_parts(tensor) or [tensor]


def takes_itself_apart(tensor: torch.Tensor) -> bool:
    """Is it of a class that carries out operations by itself, part by part, as DTensor?"""
    return type(tensor) is not torch.Tensor and has_dispatch(type(tensor))


def _as_cuda_device(device):
    """A bare index means a GPU."""
    return torch.device("cuda", device) if type(device) is int else device
