"""The numbers of a collective: gloo carries them between the ranks' processes, as memory without shape, as NCCL does.

What gloo lacks is made from what it has: an average is a sum that is divided, a reduce_scatter an all_reduce of which each rank
keeps its part (as gloo itself does it), an all_to_all of lists one of a single tensor. Copies travel as bytes, whatever their type.
"""

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed as dist

from virtualgpu._compat import distributed as _compat
from virtualgpu._compat import tree_leaves
from virtualgpu.distributed.calls import Call


class Transfer:
    """A collective whose numbers are on their way: `wait()` returns when they have come, and raises what gloo does."""

    def __init__(self):
        self.works: list = []
        self.last: list[Callable[[], None]] = []  # what is left to do then
        self.call: Call | None = None  # keeps its tensors

    def carry(self, operation, *arguments) -> None:
        """Begin an operation of gloo's group."""
        with _held:  # of several threads each has groups of its own
            HELD[:] = [tensor for tensor in HELD if tensor() is not None]
            HELD.extend(weakref.ref(tensor) for tensor in tree_leaves(arguments) if isinstance(tensor, torch.Tensor))
        self.works.append(operation(*arguments))

    def wait(self) -> None:
        """Blocks until gloo is done, then does what is left to do. Called again, it has nothing to do."""
        works, self.works = self.works, []
        for work in works:
            work.wait()
        last, self.last = self.last, []
        for step in last:
            step()


LOST: list[Call] = []  # gloo may still write into their tensors: its transfer failed
_held = threading.Lock()
HELD: list[weakref.ref] = []  # what gloo's threads were given, and may not have let go of


def let_go(seconds: float = 2.0) -> None:
    """Wait until gloo's threads hold no tensor; after a transfer that failed, for so long at most.

    They do so a moment after a transfer is done, and need the interpreter for it: one that ends first takes the process with it
    ("terminate called without an active exception").
    """
    until = time.monotonic() + seconds
    while any(tensor() is not None for tensor in HELD) and time.monotonic() < until:
        time.sleep(0.001)


def start(gloo, call: Call, rank: int, size: int, timeout: timedelta) -> Transfer:
    """Begin to carry the numbers. Tensors are taken as what they really are: call it untracked."""
    transfer = Transfer()
    transfer.call = call
    CARRIERS[call.kind](gloo, call, rank, size, transfer, timeout)
    return transfer


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory in order, whatever the strides; what arrives there does not count as a change by autograd.

    It does not keep the memory: gloo's threads hold what they carried a moment longer than `wait()`, and a GPU's bytes would stay
    allocated until then. Who carries keeps the tensor.
    """
    if not tensor.numel():
        return tensor.data.view(-1)
    address = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
    memory = (ctypes.c_byte * tensor.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=tensor.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor).view(torch.uint8)


def _put(target: torch.Tensor, memory: torch.Tensor) -> Callable[[], None]:
    return lambda: flat(target).copy_(memory)


class _Reduction:
    """An operation of NCCL by those of gloo: what happens to a tensor before and after."""

    def __init__(self, call: Call, size: int):
        self.name, self.factor = call.reduction
        self.size = size

    def op(self, tensor: torch.Tensor):
        if tensor.dtype is torch.bool and self.name == "SUM":
            return dist.ReduceOp.MAX  # or, as NCCL has it
        return getattr(dist.ReduceOp, "SUM" if self.name in ("AVG", "PREMUL_SUM") else self.name)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """As a type that gloo can add up."""
        memory = flat(tensor)
        if memory.dtype is torch.bool:
            return memory.view(torch.uint8)
        return torch.view_as_real(memory).view(-1) if memory.is_complex() else memory

    def before(self, memory: torch.Tensor) -> None:
        if self.name == "PREMUL_SUM":
            memory.mul_(self.factor)

    def after(self, memory: torch.Tensor) -> None:
        if self.name == "AVG":
            if memory.is_floating_point():
                memory.div_(self.size)
            else:
                memory.div_(self.size, rounding_mode="trunc")


def _all_reduce(gloo, call, rank, size, transfer, timeout):
    reduction = _Reduction(call, size)
    for outputs, _ in call.pairs:
        memory = reduction.view(outputs[0])
        reduction.before(memory)
        if memory.numel():
            _carry_sum(gloo, memory, reduction.op(outputs[0]), transfer, timeout)
        transfer.last.append(lambda memory=memory: reduction.after(memory))


def _carry_sum(gloo, memory, op, transfer, timeout):
    options = _options(dist.AllreduceOptions, timeout)
    options.reduceOp = op
    transfer.carry(gloo.allreduce, [memory], options)


def _reduce_scatter(gloo, call, rank, size, transfer, timeout):
    reduction = _Reduction(call, size)
    for outputs, inputs in call.pairs:
        views = [reduction.view(tensor) for tensor in inputs]
        memory = torch.cat(views) if len(views) > 1 else views[0].clone()
        target = reduction.view(outputs[0])
        begin = sum(view.numel() for view in views[:rank]) if len(views) > 1 else rank * target.numel()
        part = memory[begin : begin + target.numel()]
        reduction.before(memory)
        if memory.numel():
            _carry_sum(gloo, memory, reduction.op(outputs[0]), transfer, timeout)
        transfer.last.append(lambda part=part: reduction.after(part))
        transfer.last.append(lambda part=part, target=target: target.copy_(part))


def _reduce(gloo, call, rank, size, transfer, timeout):
    reduction = _Reduction(call, size)
    options = _options(dist.ReduceOptions, timeout)
    options.rootRank = call.root
    for outputs, _ in call.pairs:
        target = reduction.view(outputs[0])
        memory = target.clone()
        reduction.before(memory)
        options.reduceOp = reduction.op(outputs[0])
        if memory.numel():
            transfer.carry(gloo.reduce, [memory], options)
        if rank == call.root:
            transfer.last.append(lambda memory=memory: reduction.after(memory))
            transfer.last.append(lambda memory=memory, target=target: target.copy_(memory))


def _broadcast(gloo, call, rank, size, transfer, timeout):
    options = _options(dist.BroadcastOptions, timeout)
    options.rootRank, options.rootTensor = call.root, 0
    for outputs, _ in call.pairs:
        if outputs[0].numel():
            transfer.carry(gloo.broadcast, [_bytes(outputs[0])], options)


def _all_gather(gloo, call, rank, size, transfer, timeout):
    for outputs, inputs in call.pairs:
        sizes = {tensor.numel() for tensor in (*outputs, *inputs)}
        if len(outputs) > 1 and len(sizes) > 1:  # NCCL: a broadcast from each rank
            flat(outputs[rank]).copy_(flat(inputs[0]))
            for root, output in enumerate(outputs):
                _broadcast(gloo, Call("broadcast", [([output], [output])], root=root), rank, size, transfer, timeout)
            continue
        given = _bytes(inputs[0]).clone() if len(outputs) == 1 else _bytes(inputs[0])  # it may be a part of the output
        whole = _bytes(outputs[0]) if len(outputs) == 1 else given.new_empty(given.numel() * size)
        if given.numel():
            transfer.carry(_compat.allgather_flat(gloo), whole, given, _options(_compat.AllgatherOptions, timeout))
        if len(outputs) > 1:
            for output, part in zip(outputs, whole.chunk(size) if given.numel() else [], strict=False):
                transfer.last.append(_put(output, part.view(output.dtype)))


def _gather(gloo, call, rank, size, transfer, timeout):
    options = _options(dist.GatherOptions, timeout)
    options.rootRank = call.root
    for outputs, inputs in call.pairs:
        given = _bytes(inputs[0])
        if len(outputs) == 1 and size > 1:  # into one tensor
            parts = list(_bytes(outputs[0]).chunk(size)) if rank == call.root else []
        else:
            parts = [torch.empty_like(given) for _ in outputs]
            transfer.last += [
                _put(output, part.view(output.dtype)) for output, part in zip(outputs, parts, strict=True)
            ]
        if given.numel():
            transfer.carry(gloo.gather, [parts] if rank == call.root else [], [given], options)


def _scatter(gloo, call, rank, size, transfer, timeout):
    options = _options(dist.ScatterOptions, timeout)
    options.rootRank = call.root
    for outputs, inputs in call.pairs:
        parts = [[_bytes(tensor) for tensor in inputs]] if rank == call.root else []
        if outputs[0].numel():
            transfer.carry(gloo.scatter, [_bytes(outputs[0])], parts, options)


def _all_to_all(gloo, call, rank, size, transfer, timeout):
    (outputs, inputs) = call.pairs[0]
    if call.splits is None:
        given = torch.cat([_bytes(tensor) for tensor in inputs])
        splits = [[tensor.nbytes for tensor in side] for side in (outputs, inputs)]
        whole = given.new_empty(sum(splits[0]))
    else:
        given, whole = _bytes(inputs[0]), _bytes(outputs[0])
        rows = [tensor.nbytes // tensor.shape[0] if tensor.numel() else 0 for tensor in (outputs[0], inputs[0])]
        splits = [[row * each for each in side] for row, side in zip(rows, call.splits, strict=True)]
    options = _options(dist.AllToAllOptions, timeout)
    transfer.carry(gloo.alltoall_base, whole, given, *splits, options)
    if call.splits is None:
        parts = whole.split(splits[0])
        transfer.last += [_put(output, part.view(output.dtype)) for output, part in zip(outputs, parts, strict=True)]


def _barrier(gloo, call, rank, size, transfer, timeout):
    options = _options(dist.BarrierOptions, timeout)
    transfer.carry(gloo.barrier, options)


def _options(kind, timeout: timedelta):
    options = kind()
    with contextlib.suppress(AttributeError):
        options.timeout = timeout
    return options


CARRIERS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}
