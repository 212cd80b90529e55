"""nn.DataParallel and torch.cuda.comm: their copies, which PyTorch has in C++ (`torch/csrc/cuda/comm.cpp`), with memory and time.

Where `torch.cuda.nccl.is_available` says yes (tensors that are contiguous and dense, each on a GPU of its own), a broadcast and a
reduction are one kernel of NCCL on the current stream of each GPU; else each copy goes from one GPU to one other, in turn, as all do
that scatter and gather. A reduction needs room for its result alone. Numbers are added up in the order of the GPUs either way.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.cuda import nccl

from virtualgpu import environment
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.values import invalidate
from virtualgpu.timing.nccl import Fabric, seconds, slowest
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Add the C functions behind torch.cuda.comm."""

    def device(index: int | None) -> torch.device:
        gpu = machine.gpu("cuda" if index is None else index)
        return torch.device("cpu") if gpu is None else gpu.device

    def broadcast(tensor, devices: Sequence) -> list[torch.Tensor]:
        """The tensor itself where it is already, copies elsewhere."""
        targets = [device(d if isinstance(d, int) else torch.device(d).index) for d in devices]
        if targets and targets[0] != tensor.device and tensor.is_cuda:
            raise RuntimeError("Expected first device in `devices` to be the same as `tensor.device`")
        whole = tensor.detach()
        with _broadcasting(machine, whole, [target for target in targets if target != tensor.device]):
            return [tensor if where == tensor.device else whole.to(where, non_blocking=True) for where in targets]

    def broadcast_out(tensor, out: Sequence[torch.Tensor]):
        for at, target in enumerate(out):
            if not target.is_cuda:
                raise RuntimeError(
                    f"Expected all output tensors to be CUDA tensors, but output tensor at index {at} has device '{target.device}'"
                )
            if target.shape != tensor.shape:
                raise RuntimeError(
                    f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, but output tensor at "
                    f"index {at} has shape {list(target.shape)}"
                )
        by_nccl = nccl.is_available([tensor, *out])
        with _broadcasting(machine, tensor, [target.device for target in out] if by_nccl else []):
            for target in out:
                target.copy_(tensor, non_blocking=True)
        return list(out)

    def reduce(inputs, output, root: int, op: int, streams, comms) -> None:
        if op or streams or comms:
            raise NotImplementedError(
                "torch.cuda.nccl.reduce with another operation than SUM, with streams or communicators is not modelled by virtual GPUs: "
                "leave them out"
            )
        with torch.no_grad(), machine.untracked():
            if machine.dry:
                invalidate([output])
            else:
                total = inputs[root].clone()
                for other in (tensor for at, tensor in enumerate(inputs) if at != root):
                    total.add_(other)
                output.copy_(total)
        _book(machine, "reduce", inputs[root].nbytes, [tensor.device for tensor in inputs])

    def broadcast_coalesced(tensors, devices: Sequence[int], buffer_size: int = 10 << 20) -> list[list[torch.Tensor]]:
        """Tensors of one type travel together, in buffers of that size; what arrives are views of them."""
        found: list[list] = [[None] * len(tensors) for _ in devices]
        if not all(tensor.get_device() == devices[0] for tensor in tensors):
            raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
        found[0] = list(tensors)
        for chunk in _chunks(tensors, buffer_size):
            if tensors[chunk[0]].is_sparse:
                for column, index in zip(found[1:], devices[1:], strict=True):
                    for at in chunk:
                        column[at] = tensors[at].detach().to(device(index))
                continue
            parts = [tensors[at].detach() for at in chunk]
            flat = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
            with _broadcasting(machine, flat, [device(index) for index in devices[1:]]):
                copies = [flat.to(device(index), non_blocking=True) for index in devices[1:]]
            for column, arrived in zip(found[1:], copies, strict=True):
                views = [arrived] if len(parts) == 1 else arrived.split([part.numel() for part in parts])
                for at, part, view in zip(chunk, parts, views, strict=True):
                    column[at] = view.view(part.shape).data if len(parts) > 1 else view  # data: a version counter each
        return found

    def scatter(
        tensor, devices: Sequence[int], chunk_sizes=None, dim: int = 0, streams=None
    ) -> tuple[torch.Tensor, ...]:
        if chunk_sizes is not None and len(chunk_sizes) != len(devices):
            raise RuntimeError(
                f"Expected devices and chunk_sizes to be of same length, but got len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
            )
        if not devices:
            raise RuntimeError("Expected at least one device to scatter to")
        pieces = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
        found = []
        for at, piece in enumerate(pieces):
            stream = streams[at] if streams else None
            with torch.cuda.stream(stream):
                found.append(piece.to(device(devices[at]), non_blocking=True, copy=False))
        return tuple(found)

    def scatter_out(tensor, out: Sequence[torch.Tensor], dim: int = 0, streams=None) -> tuple[torch.Tensor, ...]:
        if not out:
            raise RuntimeError("Expected at least one output tensor to scatter to")
        for at, target in enumerate(out):
            if not target.is_cuda:
                raise RuntimeError(
                    f"Expected all output tensors to be CUDA tensors, but output tensor at index {at} has device '{target.device}'"
                )
        at_dim = dim % tensor.dim()
        for at, target in enumerate(out):
            others = [n for d, n in enumerate(target.shape) if d != at_dim]
            if target.dim() != tensor.dim() or others != [n for d, n in enumerate(tensor.shape) if d != at_dim]:
                raise RuntimeError(
                    f"Output tensor at index {at} has incorrect shape: {list(target.shape)}, where only dimension {dim} may differ from "
                    f"{list(tensor.shape)}"
                )
        if sum(target.shape[dim] for target in out) != tensor.shape[dim]:
            raise RuntimeError(
                f"Total size for output tensors along scatter dim {at_dim} does not match the input's {tensor.shape[dim]}"
            )
        for target, piece in zip(out, tensor.split([target.shape[dim] for target in out], dim), strict=True):
            target.copy_(piece, non_blocking=True)
        return tuple(out)

    def gather(tensors, dim: int, destination: int | None = None) -> torch.Tensor:
        if not tensors:
            raise RuntimeError("Expected at least one tensor to gather from")
        where = torch.device("cpu") if destination == -1 else device(destination)
        size, dim = list(tensors[0].shape), dim % tensors[0].dim()
        for at, tensor in enumerate(tensors):
            if not tensor.is_cuda:
                raise RuntimeError(
                    f"Expected all input tensors to be CUDA tensors, but tensor at index {at} has device '{tensor.device}'"
                )
            if tensor.dim() != len(size):
                raise RuntimeError(
                    f"Expected all input tensors to have the same number of dimensions, but input {at} has {tensor.dim()} "
                    f"dimensions and first input has {len(size)} dimensions"
                )
            if [n for d, n in enumerate(tensor.shape) if d != dim] != [n for d, n in enumerate(size) if d != dim]:
                raise RuntimeError(
                    f"Input tensor at index {at} has invalid shape {list(tensor.shape)}, but expected {size}"
                )
        size[dim] = sum(tensor.shape[dim] for tensor in tensors)
        last = all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors if tensor.dim() == 4)
        layout = torch.channels_last if tensors[0].dim() == 4 and last else torch.contiguous_format
        out = torch.empty(size, dtype=tensors[0].dtype, device=where, memory_format=layout)
        return gather_out(tensors, out, dim)

    def gather_out(tensors, out, dim: int) -> torch.Tensor:
        if out.shape[dim] != sum(tensor.shape[dim] for tensor in tensors):
            raise RuntimeError(
                f"Expected out tensor to have {sum(t.shape[dim] for t in tensors)} at dim {dim}, but got {out.shape[dim]}"
            )
        with torch.no_grad():
            for tensor, place in zip(tensors, out.split([tensor.shape[dim] for tensor in tensors], dim), strict=True):
                place.copy_(tensor, non_blocking=True)
        return out

    functions = [broadcast, broadcast_out, broadcast_coalesced, scatter, scatter_out, gather, gather_out]
    for function in functions:
        patches.add(torch._C, f"_{function.__name__}", function)
    patches.add(torch._C, "_nccl_reduce", reduce)


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
    reach = environment.peer_to_peer()
    fabric = slowest([Fabric.of(gpu.spec, None, reach).shared_by(len(gpus), len(gpus)) for gpu in gpus])
    share = max(fabric.blocks / gpu.spec.processors for gpu in gpus)
    lasts = seconds(kind, nbytes, len(gpus), fabric)
    machine.clock.collectives.together([gpu.index for gpu in gpus], lasts, f"{kind} {nbytes / 2**20:.4g} MiB", share)


def _chunks(tensors, limit: int) -> list[list[int]]:
    """Indices of tensors of one type, in order, as many together as `limit` bytes hold."""
    open_chunks: dict[tuple, list[int]] = {}
    filled: dict[tuple, int] = {}
    done = []
    for at, tensor in enumerate(tensors):
        size, kind = tensor.numel() * tensor.element_size(), (tensor.dtype, tensor.is_sparse)
        if open_chunks.get(kind) and filled[kind] + size > limit:
            done.append(open_chunks.pop(kind))
            filled[kind] = 0
        open_chunks.setdefault(kind, []).append(at)
        filled[kind] = filled.get(kind, 0) + size
    return done + list(open_chunks.values())
