"""nn.DataParallel and torch.cuda.comm: their copies, which PyTorch has in C++ (`torch/csrc/cuda/comm.cpp`), with memory and time.

Where `torch.cuda.nccl.is_available` says yes (tensors that are contiguous and dense, each on a GPU of its own), a broadcast and a
reduction are one kernel of NCCL on the current stream of each GPU; else each copy goes from one GPU to one other, in turn, as all do
that scatter and gather. A reduction needs room for its result alone. Numbers are added up in the order of the GPUs either way.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.cuda import nccl

from virtualgpu import _compat, environment
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.storage import allocation_of
from virtualgpu.engine.values import invalidate
from virtualgpu.hardware.machine import Fabric, slowest
from virtualgpu.timing.host import BROADCAST, REPLICATED
from virtualgpu.timing.nccl import seconds
from virtualgpu.torch_api.patches import Patches, standing_in


def install(machine: Machine, patches: Patches) -> None:
    """Add the C functions behind torch.cuda.comm."""
    comm = Comm(machine)
    for name in ("broadcast", "broadcast_coalesced", "scatter", "gather"):
        patches.add(_compat.C, f"_{name}", getattr(comm, name))
    patches.add(_compat.C, "_nccl_reduce", comm.reduce)
    Broadcast = _compat.parallel_functions.Broadcast
    backward = standing_in(Broadcast.backward, comm.broadcast_backward)
    patches.replace(Broadcast, "backward", staticmethod(backward))
    patches.stand_in(torch.nn.Module, _compat.REPLICATE, replicate, machine)


def replicate(machine: Machine, original, module: torch.nn.Module) -> torch.nn.Module:
    """One module of one replica: with its children, parameters and buffers, which Python sets one by one."""
    machine.clock.spend(REPLICATED * machine.clock.costs.forward)
    return original(module)


class Comm:
    """The functions, under the names that torch.cuda.comm and torch.cuda.nccl give them. A device is an index; None: the current GPU."""

    def __init__(self, machine: Machine):
        self.machine = machine

    def _device(self, index: int | None) -> torch.device:
        gpu = self.machine.gpu("cuda" if index is None else index)
        return torch.device("cpu") if gpu is None else gpu.device

    def broadcast(self, tensor, devices: Sequence) -> list[torch.Tensor]:
        """The tensor itself where it is already, copies elsewhere."""
        targets = [self._device(d if isinstance(d, int) else torch.device(d).index) for d in devices]
        if targets and targets[0] != tensor.device and tensor.is_cuda:
            raise RuntimeError("Expected first device in `devices` to be the same as `tensor.device`")
        values = tensor.detach()
        with _broadcasting(self.machine, values, [target for target in targets if target != tensor.device]):
            return [tensor if target == tensor.device else values.to(target, non_blocking=True) for target in targets]

    def broadcast_backward(self, original, ctx, *gradients):
        """Zeros that C++ made for a copy that nobody used are on that copy's GPU."""
        for index, gradient in enumerate(gradients):
            allocation = None if gradient is None else allocation_of(gradient)
            if allocation is not None and (allocation.inferred or allocation.gpu is None):
                self.machine.place(gradient, self.machine.gpus[ctx.target_gpus[index // ctx.num_inputs]])
        return original(ctx, *gradients)

    def reduce(self, inputs, output, root: int, op: int, streams, comms) -> None:
        """torch.cuda.nccl.reduce. Raises NotImplementedError for another operation than a sum, for streams and communicators."""
        if op or streams or comms:
            raise NotImplementedError(
                "torch.cuda.nccl.reduce with another operation than SUM, with streams or communicators is not modelled by virtual GPUs: "
                "leave them out"
            )
        with torch.no_grad(), self.machine.untracked():
            if self.machine.dry:
                invalidate([output], "reduce")
            else:
                total = inputs[root].clone()
                for index, other in enumerate(inputs):
                    if index != root:
                        total.add_(other)
                output.copy_(total)
        _book(self.machine, "reduce", inputs[root].nbytes, [tensor.device for tensor in inputs])

    def broadcast_coalesced(self, tensors, devices: Sequence[int], buffer_size: int = 10 << 20) -> list[list]:
        """Tensors of one type travel together, in buffers of that size; what arrives are views of them."""
        columns: list[list] = [[None] * len(tensors) for _ in devices]
        if not all(tensor.get_device() == devices[0] for tensor in tensors):
            raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
        columns[0] = list(tensors)
        self.machine.clock.spend(BROADCAST * self.machine.clock.costs.forward * len(tensors))
        targets = [self._device(index) for index in devices[1:]]
        for chunk in _chunks(tensors, buffer_size):
            parts = [tensors[index].detach() for index in chunk]
            if parts[0].is_sparse:
                for column, target in zip(columns[1:], targets, strict=True):
                    for index, part in zip(chunk, parts, strict=True):
                        column[index] = part.to(target)
                continue
            flat = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
            with _broadcasting(self.machine, flat, targets):
                copies = [flat.to(target, non_blocking=True) for target in targets]
            for column, copy in zip(columns[1:], copies, strict=True):
                views = [copy] if len(parts) == 1 else copy.split([part.numel() for part in parts])
                for index, part, view in zip(chunk, parts, views, strict=True):
                    # data: a version counter each
                    column[index] = view.view(part.shape).data if len(parts) > 1 else view
        return columns

    def scatter(self, tensor, devices: Sequence[int], chunk_sizes=None, dim: int = 0, streams=None) -> tuple:
        """Parts of a tensor, each on a device, copied on its stream where there are streams."""
        if chunk_sizes is not None and len(chunk_sizes) != len(devices):
            raise RuntimeError(
                "Expected devices and chunk_sizes to be of same length, but got "
                f"len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
            )
        if not devices:
            raise RuntimeError("Expected at least one device to scatter to")
        pieces = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
        copies = []
        for index, piece in enumerate(pieces):
            with torch.cuda.stream(streams[index] if streams else None):
                copies.append(piece.to(self._device(devices[index]), non_blocking=True, copy=False))
        return tuple(copies)

    def gather(self, tensors, dim: int, destination: int | None = None) -> torch.Tensor:
        """One tensor of all; destination -1: on the CPU."""
        if not tensors:
            raise RuntimeError("Expected at least one tensor to gather from")
        target = torch.device("cpu") if destination == -1 else self._device(destination)
        first, size = tensors[0], list(tensors[0].shape)
        dim %= first.dim()
        for index, tensor in enumerate(tensors):
            if not tensor.is_cuda:
                raise RuntimeError(
                    f"Expected all input tensors to be CUDA tensors, but tensor at index {index} has device '{tensor.device}'"
                )
            if tensor.dim() != len(size):
                raise RuntimeError(
                    f"Expected all input tensors to have the same number of dimensions, but input {index} has {tensor.dim()} "
                    f"dimensions and first input has {len(size)} dimensions"
                )
            if _others(tensor, dim) != _others(first, dim):
                raise RuntimeError(
                    f"Input tensor at index {index} has invalid shape {list(tensor.shape)}, but expected {size}"
                )
        sizes = [tensor.shape[dim] for tensor in tensors]
        size[dim] = sum(sizes)
        last = first.dim() == 4 and all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)
        layout = torch.channels_last if last else torch.contiguous_format
        out = torch.empty(size, dtype=first.dtype, device=target, memory_format=layout)
        with torch.no_grad():
            for tensor, part in zip(tensors, out.split(sizes, dim), strict=True):
                part.copy_(tensor, non_blocking=True)
        return out


def _others(tensor: torch.Tensor, dim: int) -> list[int]:
    """The sizes of all other dimensions."""
    return [size for other, size in enumerate(tensor.shape) if other != dim]


@contextlib.contextmanager
def _broadcasting(machine: Machine, tensor: torch.Tensor, targets: list[torch.device]) -> Iterator[None]:
    """The copies in here, to `targets`, are one broadcast, where NCCL can do it."""
    apart = len({tensor.device, *targets}) == 1 + len(targets)
    if not (targets and apart and nccl.is_available([tensor]) and all(target.type == "cuda" for target in targets)):
        yield
        return
    with machine.local.by_nccl():
        yield
    _book(machine, "broadcast", tensor.nbytes, [tensor.device, *targets])


def _book(machine: Machine, kind: str, nbytes: int, devices: list[torch.device]) -> None:
    gpus = [machine.gpus[device.index] for device in devices]
    level = environment.peer_to_peer()
    fabric = slowest([Fabric.of(gpu.spec, None, level).shared_by(len(gpus), len(gpus)) for gpu in gpus])
    fraction = max(fabric.blocks / gpu.spec.processors for gpu in gpus)
    lasts = seconds(kind, nbytes, len(gpus), fabric)
    machine.clock.collectives.together([gpu.index for gpu in gpus], lasts, f"{kind} {nbytes / 2**20:.4g} MiB", fraction)


def _chunks(tensors, limit: int) -> list[list[int]]:
    """Indices of tensors of one type, in order, as many together as `limit` bytes hold."""
    chunks: dict[tuple, tuple[list[int], int]] = {}
    full = []
    for index, tensor in enumerate(tensors):
        size, kind = tensor.numel() * tensor.element_size(), (tensor.dtype, tensor.is_sparse)
        chunk, filled = chunks.get(kind, ([], 0))
        if chunk and filled + size > limit:
            full.append(chunk)
            chunk, filled = [], 0
            del chunks[kind]
        chunks[kind] = ([*chunk, index], filled + size)
    return full + [chunk for chunk, _ in chunks.values()]
