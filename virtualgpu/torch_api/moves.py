"""How tensors and storages get from one device to another: Tensor.to and its kind, the gradients of such copies, and UntypedStorage's methods."""

from collections.abc import Callable

import torch

from virtualgpu import _compat
from virtualgpu.engine import factories, values
from virtualgpu.engine.cuda_checks import LEGACY
from virtualgpu.engine.dispatch import has_dispatch
from virtualgpu.engine.dry_run import is_on_meta, put_on_meta
from virtualgpu.engine.eager import LARGE, require_room
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.placement import type_name
from virtualgpu.engine.storage import (
    ALLOCATION,
    PINNED,
    Allocation,
    gpu_of,
    gpu_of_storage,
    is_pinned,
    pin,
    set_allocation,
    sparse_parts,
    storage_of,
)
from virtualgpu.engine.values import SHADOW
from virtualgpu.errors import no_data
from virtualgpu.torch_api.patches import Patches, standing_in

CPU = torch.device("cpu")


# -- Tensors


class Moves:
    """The methods of Tensor that give a tensor somewhere else."""

    machine: Machine
    device: Callable[[torch.Tensor], torch.device]

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
            for part in sparse_parts(copy) or [copy]:
                machine.place(part, target)
        if target is None and source is not None and not wait:
            pin(copy)  # PyTorch pins what it copies to in the background
        pinned = is_pinned(tensor) or is_pinned(copy)
        factories.charge(machine, copy, tensor, (target, source), not wait, pinned)
        return copy

    def _has_nothing(self, tensor: torch.Tensor) -> bool:
        """Is it on meta, in a dry run because the program has put it there?"""
        return _compat.is_really_meta(tensor) and (not self.machine.dry or is_on_meta(tensor))

    def to(self, original, tensor, *args, **kwargs):
        """Tensor.to, also to another tensor's place; what takes itself apart (DTensor) moves part by part."""
        machine, apart = self.machine, takes_itself_apart(tensor)
        first = args[0] if args else kwargs.get("other")
        flags = [a for a in args if isinstance(a, bool)]  # non_blocking, copy
        copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
        if isinstance(first, torch.Tensor):  # .to(other): its device and dtype
            where, dtype, memory_format = self.device(first), first.dtype, kwargs.get("memory_format")
        else:
            where, dtype, _non_blocking, memory_format = _compat.parse_to(
                *(_as_cuda_device(a) for a in args if not isinstance(a, bool)),
                **{k: _as_cuda_device(v) for k, v in kwargs.items() if k not in ("copy", "non_blocking")},
            )
        target = None
        if where is not None:
            if where.type == "meta" and machine.dry and not apart:
                return self.to_meta(tensor, dtype)
            if where.type not in ("cpu", "cuda"):
                return original(tensor, *args, **kwargs)
            target = machine.gpu(where)
            if apart and target is not None and target is not gpu_of(tensor):
                return original(
                    tensor, *args, **kwargs
                )  # its parts come by; where it is already, there is nothing to do
            tensor = self.taken_over(original, tensor)
        changes = {} if dtype in (None, tensor.dtype) else {"dtype": dtype}
        if memory_format not in (None, torch.preserve_format):
            changes["memory_format"] = memory_format
        if where is not None and gpu_of(tensor) is not target:
            wait = not kwargs.get("non_blocking", flags[0] if flags else False)
            return self.move(tensor, target, wait, **changes)
        plain = tensor
        if changes or copy:
            plain = original(tensor, changes.pop("dtype", tensor.dtype), copy=copy, **changes)
        if where is not None and target is None and self._has_nothing(plain) and not apart:
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
    def forward(tensor, methods, target, wait, *changes):
        """`Moves.carry` it to `target`; None: the CPU."""
        return methods.carry(tensor, target, wait, **dict(changes))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Remember where the tensor was (`source`), and where it goes (`target`)."""
        tensor, ctx.methods, ctx.target, _, *changes = inputs
        ctx.source = gpu_of(tensor)
        converts = output.dtype is not tensor.dtype
        ctx.forth, ctx.back = ({"dtype": dtype} if converts else {} for dtype in (output.dtype, tensor.dtype))
        ctx.others = 3 + len(changes)  # which have no gradient

    @staticmethod
    def backward(ctx, gradient):
        """The gradient goes to where the tensor was; the host waits, unless both places are GPUs."""
        return ctx.methods.move(gradient, ctx.source, **ctx.back), *[None] * ctx.others

    @staticmethod
    def jvp(ctx, tangent, *_):
        """A tangent goes where the tensor went."""
        return ctx.methods.move(tangent, ctx.target, **ctx.forth)


def takes_itself_apart(tensor: torch.Tensor) -> bool:
    """Is it of a class that carries out operations by itself, part by part, as DTensor?"""
    return type(tensor) is not torch.Tensor and has_dispatch(type(tensor))


def _as_cuda_device(device):
    """A bare index means a GPU."""
    return torch.device("cuda", device) if type(device) is int else device


# -- Storages: where they say they are, how they are made, resized and moved.


def install(machine: Machine, patches: Patches) -> None:
    """Replace UntypedStorage's methods."""
    Storage, storages = torch.UntypedStorage, _Storages(machine)
    patches.replace(Storage, "device", property(storages.device))
    patches.replace(Storage, "__new__", staticmethod(standing_in(Storage.__new__, storages.make)))
    patches.replace(Storage, "to", lambda *args, **kwargs: storages.to(*args, **kwargs))
    patches.replace(Storage, "cuda", lambda *args, **kwargs: storages.cuda(*args, **kwargs))
    patches.replace(Storage, "cpu", lambda storage: storages.to(storage, device=CPU))
    patches.replace(Storage, "is_pinned", lambda storage, device=None: getattr(storage, PINNED, False))
    patches.stand_in(
        Storage, "is_shared", lambda original, storage: gpu_of_storage(storage) is not None or original(storage)
    )
    patches.stand_in(Storage, "clone", storages.clone)
    patches.stand_in(Storage, "resize_", _resize)
    patches.stand_in(Storage, "_share_cuda_", _share_cuda)
    patches.stand_in(Storage, "data_ptr", storages.data_ptr)


class _Storages:
    """The methods that need the machine."""

    def __init__(self, machine: Machine):
        self.machine, self.local = machine, machine.local
        self.copy = torch.UntypedStorage.clone

    def device(self, storage) -> torch.device:
        gpu = None if self.local.bypass else gpu_of_storage(storage)
        if gpu is not None:
            return gpu.device
        real = _compat.real_storage_device(storage)
        as_cpu = self.machine.dry and not self.local.bypass and not storage._virtual_on_meta
        return CPU if real.type == "meta" and as_cpu else real

    def make(self, original, cls, *args, device=None, **kwargs):
        """UntypedStorage(4, device="cuda")."""
        target = None if device is None or self.local.bypass else torch.device(device)
        if target is None or target.type != "cuda":
            return original(cls, *args, **({} if device is None else {"device": device}), **kwargs)
        storage = original(cls, *args, device=self.machine.base, **kwargs)
        return self.machine.place_storage(storage, self.machine.gpu(target))

    def to(self, storage, *, device, non_blocking: bool = False):
        """A copy on `device`; the storage itself where it is there already. What the host does not wait for is pinned there."""
        machine, source, target = self.machine, gpu_of_storage(storage), self.machine.gpu(device)
        real = _compat.real_storage_device(storage).type
        if machine.real_gpus and real == "cuda":  # made before these GPUs were on
            with machine.untracked():
                storage = torch.UntypedStorage(storage.nbytes(), device="cpu").copy_(storage)
        if real == "meta" and not machine.dry and torch.device(device).type != "meta":
            raise no_data(made_in_dry_run=source is not None)
        if target is source:
            return storage
        with machine.untracked():
            out = meta_storage(storage) if machine.dry and target else self.copy(storage)
        machine.place_storage(out, target)
        if target is None and non_blocking:
            setattr(out, PINNED, True)
        pinned = getattr(storage, PINNED, False) or getattr(out, PINNED, False)
        machine.charge_copy(source, target, storage.nbytes(), non_blocking, pinned)
        return out

    def cuda(self, storage, device=None, non_blocking: bool = False):
        gpu = self.machine.expect_gpu("cuda" if device is None else device)
        return self.to(storage, device=gpu.device, non_blocking=non_blocking)

    def clone(self, original, storage):
        """On the same GPU."""
        with self.machine.untracked():
            copy = original(storage)
        gpu = gpu_of_storage(storage)
        return copy if gpu is None else self.machine.place_storage(copy, gpu)

    def data_ptr(self, original, storage) -> int:
        """On a GPU, the address of its block."""
        allocation = getattr(storage, ALLOCATION, None)
        if allocation is None or allocation.gpu is None or self.local.bypass:
            return original(storage)
        return 0 if allocation.block is None else allocation.block.address


def _resize(original, storage, size: int):
    """FSDP gives the memory of gathered parameters back in this way."""
    if storage.nbytes() != size:
        setattr(storage, SHADOW, None)
    allocation = getattr(storage, ALLOCATION, None)
    if allocation is None or allocation.gpu is None or size == allocation.nbytes:
        return original(storage, size)
    room = Allocation(allocation.gpu, size)  # PyTorch, too, has both for a moment: the bytes are copied over
    out = original(storage, size)
    set_allocation(storage, room)
    return out


def _share_cuda(original, storage, *args, **kwargs):
    if gpu_of_storage(storage) is None:
        return original(storage, *args, **kwargs)
    refuse_to_share()


def refuse_to_share():
    """Raises NotImplementedError."""
    raise NotImplementedError(
        "GPU memory shared between processes (CUDA IPC) is not modelled by virtual GPUs: send tensor.cpu()"
    )


def meta_storage(storage):
    """As large, in a dry run: on a GPU nothing has values there."""
    return torch.UntypedStorage(storage.nbytes(), device="meta")
