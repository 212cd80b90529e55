"""Where a tensor lives: a label on its storage; and memory that a collective still fills or reads."""

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from virtualgpu import _compat
from virtualgpu.timing.flops import parts as sparse_parts

# -- Where a tensor lives: a label on its storage.
#
# A storage on a GPU carries an `Allocation` as its Python attribute; it dies with the storage, wherever that was kept (a variable, the
# autograd graph, an optimizer), and gives its block back. A storage without one is the CPU's.
#
# Why a label, and not a subclass of Tensor, or a device of one's own: the tensors stay PyTorch's plain CPU tensors, so that its C++
# (autograd, DDP's reducer, foreach kernels) works on them as it is, numbers equal the CPU's to the last bit, and an operation costs
# microseconds. The price is that C++ itself believes they are on the CPU; where that shows, a stand-in says otherwise.

ALLOCATION, PINNED = "_virtual_allocation", "_virtual_pinned"  # attributes of a storage


class Allocation:
    """Lives on `gpu`, with so many bytes. Gives its memory back when it goes.

    done: when the last operation that wrote here ends; kept where several streams are used. inferred: C++ made it in a backward
    pass without saying where; it moves to whatever it meets. used_on: the stream of a leaf's first use, on which autograd adds up
    its gradient. chunk: of a recurrent layer's weight, which buffer of cuDNN's it is in, and where (`engine.rnn.flatten`).
    """

    __slots__ = ("block", "chunk", "done", "gpu", "inferred", "nbytes", "used_on")

    def __init__(self, gpu, nbytes: int, inferred: bool = False):
        self.gpu, self.nbytes, self.done, self.inferred = gpu, nbytes, 0.0, inferred
        self.used_on = self.chunk = None
        self.block = None  # so that a failing malloc leaves nothing to free
        self.block = gpu.malloc(nbytes)

    def used_in_forward(self, stream) -> None:
        """A leaf was used on this stream; the first use counts."""
        self.used_on = self.used_on or stream

    def written_until(self, end: float) -> None:
        """An operation that wrote here ends then."""
        self.done = end

    def __del__(self):
        if self.block is not None:
            self.gpu.free(self.block)


# The CPU's, unless it says otherwise; stays, so that no thread ever misses it
torch.UntypedStorage._virtual_allocation = None
torch.UntypedStorage._virtual_pinned = False


def tensors_of(args, kwargs) -> list[torch.Tensor]:
    """Every tensor among the arguments, those in lists included, in order."""
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    tensors.append(item)  # on the way of every operation, a function less
    return tensors


def storage_of(tensor: torch.Tensor):
    """A tensor's storage, through wrappers (torch.func's, DTensor and its kind) and, for a sparse tensor, that of its values.

    None where there is none.
    """
    plain = type(tensor) in PLAIN_TYPES
    if not plain and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            return storage_of(getattr(tensor, name))
    try:
        if plain:
            return tensor.untyped_storage()
        with _compat.without_function_subclasses():  # nobody's concern: a lazy module's parameter refuses it
            return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        if _compat.is_functorch_wrapped(tensor):
            return storage_of(_compat.functorch_unwrap(tensor))
        parts = sparse_parts(tensor)
        return storage_of(parts[-1]) if parts else None


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # of tensors that are no subclass


def is_plain(tensor: torch.Tensor) -> bool:
    """Is it neither a subclass nor what torch.func wraps?"""
    return type(tensor) in PLAIN_TYPES and not _compat.is_functorch_wrapped(tensor)


def gpu_of_storage(storage):
    """The GPU on which a storage is; None: on the CPU."""
    allocation = getattr(storage, ALLOCATION, None)
    return None if allocation is None else allocation.gpu


def gpu_of(tensor: torch.Tensor):
    """The GPU on which a tensor lives; None: on the CPU."""
    if type(tensor) in PLAIN_TYPES:  # as storage_of, written out for speed
        try:
            allocation = tensor.untyped_storage()._virtual_allocation
        except RuntimeError:
            allocation = getattr(storage_of(tensor), ALLOCATION, None)
    else:
        allocation = getattr(storage_of(tensor), ALLOCATION, None)
    return None if allocation is None else allocation.gpu


def allocation_of(tensor: torch.Tensor):
    """The label of a plain tensor's storage; of a sparse one, that of its values. None: the CPU's."""
    try:
        return tensor.untyped_storage()._virtual_allocation
    except NotImplementedError:
        parts = sparse_parts(tensor)
        return allocation_of(parts[-1]) if parts else None


def set_allocation(storage, allocation) -> None:
    """Put a label on a storage; None: the CPU's."""
    storage._virtual_allocation = allocation


def label(tensor: torch.Tensor, allocation) -> None:
    """Put a label on a tensor's storage, or those of a sparse one's parts, without asking for memory."""
    try:
        tensor.untyped_storage()._virtual_allocation = allocation
    except NotImplementedError:
        for part in sparse_parts(tensor):
            label(part, allocation)


def made_by_cpp(tensor: torch.Tensor) -> bool:
    """Did C++ make it for the call that Python is in? See MadeByCpp."""
    allocation = allocation_of(tensor)
    return allocation is not None and allocation.gpu is None and allocation.in_creating_call


def stream_of_leaf(tensor: torch.Tensor):
    """The stream of a leaf's first use; None where it was not noted."""
    return getattr(tensor.untyped_storage()._virtual_allocation, "used_on", None)


def reach(tensor: torch.Tensor) -> int:
    """Elements of memory from a tensor's first to its last, of a tensor that has some: fewer than it has where these share memory (expand)."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def pin(tensor: torch.Tensor) -> None:
    """Mark a tensor's storage as pinned memory of the host."""
    setattr(storage_of(tensor), PINNED, True)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Is its storage marked so?"""
    return getattr(storage_of(tensor), PINNED, False)


def place_output(op, tensor: torch.Tensor, gpu) -> None:
    """A new tensor lives on `gpu`; one that changed its size gets a block of that size. Raises torch.OutOfMemoryError."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        for part in sparse_parts(tensor):
            place_output(op, part, gpu)
        return
    allocation = storage._virtual_allocation
    if allocation is None or allocation.gpu is None:
        if gpu is not None and (op.new or allocation is not None):
            storage._virtual_allocation = Allocation(gpu, storage.nbytes())
    elif op.resizes and allocation.nbytes != storage.nbytes():
        where = allocation.gpu
        allocation = storage._virtual_allocation = None  # its block is free before the next is asked for
        storage._virtual_allocation = Allocation(where, storage.nbytes())


def place_outputs(op, args, out, gpu) -> None:
    """As `place_output`, for an operation with several results."""
    inputs = next((value for value in args if isinstance(value, (list, tuple)) and value), None) if op.foreach else None
    for index, tensor in enumerate(out):
        if isinstance(tensor, (list, tuple)):
            place_outputs(op, args, tensor, gpu)
        elif isinstance(tensor, torch.Tensor) and index != op.host_result:
            if index == op.empty_result:
                label(tensor, Allocation(gpu, 0))
                continue
            if inputs:  # each result where its own input is
                gpu = gpu_of(inputs[index])
            place_output(op, tensor, gpu)


# -- Numbers on their way: the memory that a collective fills, or reads, until they have come.
#
# Collectives of one communicator run one after the other on a GPU, so several may be of one tensor. And all is computed in the program's
# order here, so who uses a tensor without wait() (a race: the sanitizer's concern) gets the numbers that the collective brings. In both
# cases whoever comes second lets the first finish.


class _Part(NamedTuple):
    """Bytes of a storage, from `begin` to `end`."""

    begin: int
    end: int
    fills: bool
    work: Any  # has finish()


class InFlight:
    """Of one machine. parts: of each storage, by its address in C++; the work that uses it keeps it alive."""

    def __init__(self):
        self.parts: dict[int, list[_Part]] = {}
        self._lock = threading.Lock()

    def add(self, work, filled: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> None:
        """From now on until `remove`, `work` fills and reads these."""
        with self._lock:
            for fills, tensors in ((True, filled), (False, read)):
                for tensor in tensors:
                    self.parts.setdefault(_storage(tensor), []).append(_Part(*_extent(tensor), fills, work))

    def remove(self, work, tensors: Iterable[torch.Tensor]) -> None:
        """It is done with them."""
        with self._lock:
            for storage in set(map(_storage, tensors)):
                rest = [part for part in self.parts.pop(storage, []) if part.work is not work]
                if rest:
                    self.parts[storage] = rest

    def let_finish(self, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor] = ()) -> None:
        """Somebody uses `tensors`, and writes to `written`: what fills the former, or reads the latter, finishes first."""
        for writes, used in ((False, tensors), (True, written)):
            for tensor in used:
                parts = self.parts.get(_storage(tensor))
                if parts is None:
                    continue
                begin, end = _extent(tensor)
                for part in list(parts):
                    if (writes or part.fills) and part.begin < end and begin < part.end:
                        part.work.finish()


def _storage(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else _compat.address(storage)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    size, begin = tensor.element_size(), tensor.storage_offset()
    if not tensor.numel():
        return 0, 0
    return begin * size, (begin + reach(tensor)) * size
