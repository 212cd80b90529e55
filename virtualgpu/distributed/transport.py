"""The numbers of a collective: gloo carries them between the ranks' processes, as memory without shape, as NCCL does.

What gloo lacks is made from what it has: an average is a sum that is divided, a reduce_scatter an all_reduce of which each rank
keeps its part (as gloo itself does it), an all_to_all of lists one of a single tensor. Copies travel as bytes, whatever their type.

The table's rows have `carry(transfer, call)`, by gloo, and `alike(call, rank, size)`: what comes out where all ranks give what this one
gives, for a rank that is played alone, and whether that is known. In a dry run ranks tell each other counts and sizes in small tensors.
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
from torch import distributed as dist

from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed.calls import Call, size_of
from virtualgpu.distributed.shared_clock import real_sleep, real_time
from virtualgpu.engine import values
from virtualgpu.engine.cuda_checks import FLOAT8
from virtualgpu.engine.storage import reach


class Transfer:
    """A collective whose numbers are on their way: `wait()` returns when they have come, and raises what gloo does; then `finish()`.

    Tensors are taken as what they really are: make and finish it untracked, or in the dispatcher.
    """

    def __init__(self, gloo, call: Call, rank: int, size: int, timeout: timedelta):
        self.gloo, self.rank, self.size, self.timeout = gloo, rank, size, timeout
        self.call = call  # keeps its tensors
        self._works: list = []
        self.last: list[tuple[Callable, tuple]] = []  # what is left to do then
        call.collective.carry(self, call)

    def begin(self, operation: str, options, *arguments) -> None:
        """Begin an operation of gloo's group."""
        hold(arguments)
        if hasattr(options, "timeout"):
            options.timeout = self.timeout
        self._works.append(getattr(self.gloo, operation)(*arguments, options))

    def then(self, function: Callable, *args) -> None:
        """Call this when the numbers have come."""
        self.last.append((function, args))

    def wait(self) -> None:
        """Blocks until gloo is done."""
        works, self._works, self.gloo = self._works, [], None
        for work in works:
            work.wait()

    def finish(self) -> None:
        """What is left to do then."""
        last, self.last = self.last, []
        for function, args in last:
            function(*args)


data_ptr = torch.UntypedStorage.data_ptr  # where the numbers are: a program is told the address on its GPU
LOST: list[Call] = []  # gloo may still write into their tensors: its transfer failed
_lock = threading.Lock()  # of several threads each has groups of its own
HELD: list[weakref.ref] = []  # what gloo's threads were handed, and may not have let go of


def hold(values: Iterable) -> None:
    """Note tensors, also in lists, that gloo's threads are handed."""
    with _lock:
        if len(HELD) > 100:
            HELD[:] = [tensor for tensor in HELD if tensor() is not None]
        values = list(values)
        for value in values:  # the list grows meanwhile
            if isinstance(value, torch.Tensor):
                HELD.append(weakref.ref(value))
            elif isinstance(value, (list, tuple)):
                values += value


def let_go(seconds: float = 2.0) -> None:
    """Wait until gloo's threads hold no tensor; after a transfer that failed, for so long at most.

    They do so a moment after a transfer is done, and need the interpreter for it: one that ends first takes the process with it
    ("terminate called without an active exception").
    """
    until = real_time() + seconds
    while any(tensor() is not None for tensor in HELD) and real_time() < until:
        real_sleep(0.001)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory in order, whatever the strides; what arrives there does not count as a change by autograd.

    It does not keep the memory: gloo's threads hold what they carried a moment longer than `wait()`, and a GPU's bytes would stay
    allocated until then. Who carries keeps the tensor.
    """
    if not tensor.numel():
        return tensor.data.view(-1)
    address = data_ptr(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()
    memory = (ctypes.c_byte * tensor.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=tensor.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor).view(torch.uint8)


# -- reductions


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory, as a type that gloo can add up."""
    memory = flat(tensor)
    if memory.dtype is torch.bool:
        return memory.view(torch.uint8)
    return torch.view_as_real(memory).view(-1) if memory.is_complex() else memory


def _begin_reduction(transfer: Transfer, call: Call, memory: torch.Tensor, dtype: torch.dtype, to_root: bool) -> None:
    """gloo reduces this memory of elements of `dtype`; an average is divided when that is done."""
    name, factor = call.reduction
    options = dist.ReduceOptions() if to_root else dist.AllreduceOptions()
    if to_root:
        options.rootRank = call.root
    if dtype is torch.bool and name == "SUM":
        options.reduceOp = dist.ReduceOp.MAX  # or, as NCCL has it
    else:
        options.reduceOp = getattr(dist.ReduceOp, "SUM" if name in ("AVG", "PREMUL_SUM") else name)
    narrow = memory
    if dtype in FLOAT8:
        memory = narrow.float()  # gloo does not add up FP8; NCCL rounds each sum of two, this the last one
    if name == "PREMUL_SUM":
        memory.mul_(factor)
    if memory.numel():
        transfer.begin("reduce" if to_root else "allreduce", options, [memory])
    if name == "AVG":
        rounding = None if memory.is_floating_point() else "trunc"
        transfer.then(functools.partial(memory.div_, transfer.size, rounding_mode=rounding))
    if memory is not narrow:
        transfer.then(narrow.copy_, memory)


def all_reduce(transfer: Transfer, call: Call) -> None:
    """In the tensors' own memory."""
    for outputs, _ in call.pairs:
        _begin_reduction(transfer, call, _summable(outputs[0]), outputs[0].dtype, to_root=False)


def reduce_scatter(transfer: Transfer, call: Call) -> None:
    """An all_reduce of which each rank keeps its part."""
    for (output,), inputs in call.pairs:
        views, target = [_summable(tensor) for tensor in inputs], _summable(output)
        if len(views) > 1:
            memory, begin = torch.cat(views), sum(view.numel() for view in views[: transfer.rank])
        else:
            memory, begin = views[0].clone(), transfer.rank * target.numel()
        _begin_reduction(transfer, call, memory, output.dtype, to_root=False)
        transfer.then(target.copy_, memory[begin : begin + target.numel()])


def reduce(transfer: Transfer, call: Call) -> None:
    """In a copy: only the root's tensor changes."""
    for (output,), _ in call.pairs:
        target = _summable(output)
        memory = target.clone()
        _begin_reduction(transfer, call, memory, output.dtype, to_root=True)
        if transfer.rank == call.root:
            transfer.then(target.copy_, memory)


# -- copies


def broadcast(transfer: Transfer, call: Call) -> None:
    """From the root's tensors to the others'."""
    for outputs, _ in call.pairs:
        _begin_broadcast(transfer, outputs[0], call.root)


def _begin_broadcast(transfer: Transfer, tensor: torch.Tensor, root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    if tensor.numel():
        transfer.begin("broadcast", options, [_bytes(tensor)])


def all_gather(transfer: Transfer, call: Call) -> None:
    """Into one tensor, or a list; of unlike sizes, a broadcast from each rank, as NCCL does it."""
    for outputs, (part,) in call.pairs:
        if len(outputs) > 1 and len({tensor.numel() for tensor in (*outputs, part)}) > 1:
            flat(outputs[transfer.rank]).copy_(flat(part))
            for root, output in enumerate(outputs):
                _begin_broadcast(transfer, output, root)
        elif len(outputs) == 1:
            memory = _bytes(part).clone()  # it may be a part of the output
            if memory.numel():
                transfer.begin("_allgather_base", _compat.AllgatherOptions(), _bytes(outputs[0]), memory)
        elif part.numel():
            memory = _bytes(part)
            gathered = memory.new_empty(memory.numel() * transfer.size)
            transfer.begin("_allgather_base", _compat.AllgatherOptions(), gathered, memory)
            for output, chunk in zip(outputs, gathered.chunk(transfer.size), strict=False):
                transfer.then(flat(output).copy_, chunk.view(output.dtype))


def gather(transfer: Transfer, call: Call) -> None:
    """Into one tensor, or a list, of the root."""
    options, is_root = dist.GatherOptions(), transfer.rank == call.root
    options.rootRank = call.root
    for outputs, inputs in call.pairs:
        memory = _bytes(inputs[0])
        if len(outputs) == 1 and transfer.size > 1:
            chunks = list(_bytes(outputs[0]).chunk(transfer.size)) if is_root else []
        else:
            chunks = [torch.empty_like(memory) for _ in outputs]
            for output, chunk in zip(outputs, chunks, strict=True):
                transfer.then(flat(output).copy_, chunk.view(output.dtype))
        if memory.numel():
            transfer.begin("gather", options, [chunks] if is_root else [], [memory])


def scatter(transfer: Transfer, call: Call) -> None:
    """From a list of the root."""
    options = dist.ScatterOptions()
    options.rootRank = call.root
    for (output,), inputs in call.pairs:
        chunks = [[_bytes(tensor) for tensor in inputs]] if transfer.rank == call.root else []
        if output.numel():
            transfer.begin("scatter", options, [_bytes(output)], chunks)


def all_to_all(transfer: Transfer, call: Call) -> None:
    """Rows of one tensor, or tensors of a list, which travel as one."""
    outputs, inputs = call.pairs[0]
    if call.splits is not None:
        widths = [tensor.nbytes // tensor.shape[0] if tensor.numel() else 0 for tensor in (outputs[0], inputs[0])]
        splits = [[width * rows for rows in side] for width, side in zip(widths, call.splits, strict=True)]
        transfer.begin("alltoall_base", dist.AllToAllOptions(), _bytes(outputs[0]), _bytes(inputs[0]), *splits)
        return
    source = torch.cat([_bytes(tensor) for tensor in inputs])
    takes, gives = ([tensor.nbytes for tensor in side] for side in (outputs, inputs))
    received = source.new_empty(sum(takes))
    transfer.begin("alltoall_base", dist.AllToAllOptions(), received, source, takes, gives)
    for output, chunk in zip(outputs, received.split(takes), strict=True):
        transfer.then(flat(output).copy_, chunk.view(output.dtype))


def barrier(transfer: Transfer, call: Call) -> None:
    """Nothing but the meeting."""
    transfer.begin("barrier", dist.BarrierOptions())


# -- where all ranks are alike


def all_reduce_alike(call: Call, rank: int, size: int) -> bool:
    """A sum and a product count all ranks; others leave a tensor as it is."""
    name, factor = call.reduction
    for tensor in call.outputs:
        numbers = tensor.float() if tensor.dtype in FLOAT8 else tensor
        if name == "PREMUL_SUM":
            numbers.mul_(factor)
        if name in ("SUM", "PREMUL_SUM") and tensor.dtype is not torch.bool:
            numbers.mul_(size)
        elif name == "PRODUCT":
            numbers.pow_(size)
        if numbers is not tensor:
            tensor.copy_(numbers)
    return True


def reduce_alike(call: Call, rank: int, size: int) -> bool:
    """In the root's tensor."""
    return rank != call.root or all_reduce_alike(call, rank, size)


def reduce_scatter_alike(call: Call, rank: int, size: int) -> bool:
    """This rank's part, which all ranks have."""
    _take_part(call, rank)
    return all_reduce_alike(call, rank, size)


def scatter_alike(call: Call, rank: int, size: int) -> bool:
    """This rank's part; what another rank scatters is not known."""
    if rank == call.root:
        _take_part(call, rank)
    return rank == call.root


def _take_part(call: Call, rank: int) -> None:
    for (output,), inputs in call.pairs:
        begin = rank * output.numel() if len(inputs) == 1 else sum(part.numel() for part in inputs[:rank])
        flat(output).copy_(torch.cat([flat(part) for part in inputs])[begin : begin + output.numel()])


def broadcast_alike(call: Call, rank: int, size: int) -> bool:
    """What another rank broadcasts is not known."""
    return rank == call.root


def all_gather_alike(call: Call, rank: int, size: int) -> bool:
    """This rank's part in each place; not known where parts have unlike sizes."""
    for outputs, (part,) in call.pairs:
        if len(outputs) == 1:
            flat(outputs[0]).view(-1, part.numel())[:] = flat(part)
        elif any(output.numel() != part.numel() for output in outputs):
            return False
        else:
            for output in outputs:
                flat(output).copy_(flat(part))
    return True


# -- What ranks tell each other in a dry run: counts, sizes and measured times, small tensors whose values stand beside them. Each says whether
# it knows its own: where one does not, nobody knows what comes of them.

LARGEST = 8 * values.LIMIT  # bytes of a message that is carried


def carry_known(gloo, call: Call, rank: int, size: int, timeout: timedelta) -> Transfer | None:
    """The same of values, in a dry run; None where none are on their way: there are too many, they are of a kind whose results are not alike
    on all ranks, or the others are like this one, which is played alone (gloo: None). Call it untracked."""
    from_root = call.collective.root == "from"
    given = [] if from_root and rank != call.root else [tensor for _, inputs in call.pairs for tensor in inputs]
    filled, origin = call.uses(rank)[0], values.origin_of(given) or call.kind
    known = all(values.known_of(tensor) is not None for tensor in given)
    alike = call.collective.alike
    if alike is None or not _is_carried(call):
        values.told(call.outputs, origin)
        return None
    of_values = call.with_values(values.room_for)
    if gloo is None:
        values.told(filled, None if known and alike(of_values, rank, size) else origin)
        return None
    transfer = Transfer(gloo, of_values, rank, size, timeout)  # and after the values, whether all are known
    unknown, options = torch.tensor([not known], dtype=torch.uint8, device="cpu"), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    transfer.begin("allreduce", options, [unknown])
    transfer.then(lambda: values.told(filled, origin if unknown.item() else None))
    return transfer


def _is_carried(call: Call) -> bool:
    """The same on all ranks: it goes by what their tensors have in common."""
    if not call.tensors:
        return False
    if call.collective.root and call.collective.checks:
        nbytes = call.nbytes  # of a gather or scatter: all parts are of one size
    else:
        nbytes = size_of(call.tensors if call.collective.scatters else call.outputs)
    counts = all(tensor.dtype in values.COUNTS for tensor in call.tensors)
    return nbytes <= (values.LIMIT * call.tensors[0].element_size() if counts else values.SMALL)


def message_of(tensor: torch.Tensor, sends: bool) -> torch.Tensor | None:
    """What a message carries in this tensor's place: its values, or as many bytes that nobody reads, since sender and receiver need
    to agree on a message's bytes alone; and whether it has none. None: it is large, and carries nothing.
    """
    if tensor.nbytes > LARGEST:
        return None
    message = torch.zeros(extent(tensor) + 1, dtype=torch.uint8, device="cpu")
    known = values.known_of(tensor) if sends else None
    if known is None:
        message[-1] = 1
    else:
        message[:-1] = flat(known).view(torch.uint8)[: extent(tensor)]
    return message


def hear(tensor: torch.Tensor, message: torch.Tensor) -> None:
    """It has what came by a message. Call it untracked."""
    if not message[-1]:
        flat(values.room_for(tensor)).view(torch.uint8)[: extent(tensor)] = message[:-1]
        values.told([tensor])


def extent(tensor: torch.Tensor) -> int:
    """How many bytes of memory the tensor reaches over: fewer than its elements have where these share memory (expand)."""
    return tensor.element_size() * reach(tensor)
