"""A collective of one rank, in one form (`Call`): read from the arguments of c10d's operations, told to other ranks, refused as by NCCL.

Python's functions, DDP's C++ reducer, FSDP and DTensor all pass through the dispatcher's operations `c10d::...`, whose names
and arguments change least from version to version. `collectives` has the table of which reader goes with which.

    read(collective, args, size)      args: the operation's, by name; size: of the group
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import distributed as dist

from virtualgpu._compat import distributed as _compat
from virtualgpu._compat import suggest_memory_format
from virtualgpu.distributed.shared_clock import Signature
from virtualgpu.engine.cuda_checks import FLOAT8


@dataclass(frozen=True, eq=False)
class Collective:
    """What there is to know of one kind of collective (`timing.nccl` has its cost): a row of the table in `collectives`.

    operations: those of c10d, and how to read each. functions: those of _c10d_functional, and what each makes. carry: how gloo carries
    the numbers. checks: what NCCL refuses of this kind. splits: what a rank gives each of the others,
    and takes, where that may differ. scatters: this rank's own part is the output, not the input. root: "from" or "to" one rank.
    pairwise: what one rank gives must be what another takes. number: its place in the table. alike: what comes out where all ranks give what this one gives,
    and whether that is known; None: no rank knows what comes out in a dry run.
    """

    kind: str
    operations: Mapping[str, Callable]
    carry: Callable
    functions: Mapping[str, Callable] = field(default_factory=dict)
    checks: tuple[Callable, ...] = ()
    splits: Callable | None = None
    scatters: bool = False
    root: str = ""
    pairwise: bool = False
    alike: Callable | None = None
    number: int = field(default_factory=itertools.count().__next__)


class Call:
    """One collective of this rank.

    pairs: (outputs, inputs) of each tensor that takes part; one list where an operation works in place. nbytes: of the whole, as NCCL
    counts. reduction: a ReduceOp's name, and the factor of a PREMUL_SUM. root: the rank within the group. splits: rows of each rank,
    in what is received and what is sent. tensors: all that take part. outputs: those that are written to.
    """

    def __init__(self, collective: Collective, pairs=(), nbytes: int = 0, op=None, root: int = 0, splits=None):
        self.collective, self.kind = collective, collective.kind
        self.pairs, self.nbytes, self.root, self.splits = pairs, nbytes, root, splits
        self.reduction: tuple[str, float | None] = ("", None)
        if op is not None:
            known = isinstance(op, torch.ScriptObject) and _compat.REDUCTIONS.get(_compat.reduction_number(op))
            self.reduction = known or _compat.reduction(op)
        self.outputs: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self.dtypes: set[torch.dtype] = set()
        for outputs, inputs in pairs:
            self.outputs += outputs
            self.tensors += outputs if outputs is inputs else (*outputs, *inputs)
        for tensor in self.tensors:
            self.dtypes.add(tensor.dtype)

    def uses(self, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those that `rank` gets numbers in, and those that it only reads: where one rank gives, or takes, it in place."""
        filled: list[torch.Tensor] = []
        inputs_alone: list[torch.Tensor] = []
        for outputs, inputs in self.pairs:
            one_way = outputs is inputs and self.collective.root
            keeps = one_way and (rank == self.root) == (self.collective.root == "from")
            (inputs_alone if keeps else filled).extend(outputs)
            if outputs is not inputs:
                inputs_alone.extend(inputs)
        return filled, inputs_alone

    def with_values(self, values: Callable[[torch.Tensor], torch.Tensor]) -> "Call":
        """The same of other tensors: values(tensor) in the place of each."""
        call = Call(self.collective, [tuple([values(t) for t in side] for side in pair) for pair in self.pairs])
        call.nbytes, call.reduction, call.root, call.splits = self.nbytes, self.reduction, self.root, self.splits
        return call


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements together, also of those that share memory (expand)."""
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.numel() * tensor.element_size()
    return nbytes


# -- readers of c10d's operations, by the names of their arguments


def in_place(collective: Collective, args: Mapping, size: int) -> Call:
    """Of tensors that are read and written."""
    pairs = [([tensor],) * 2 for tensor in args["tensors"]]
    return Call(collective, pairs, size_of(args["tensors"]), args.get("reduce_op"), args.get("root_rank", 0))


def parts(collective: Collective, args: Mapping, size: int) -> Call:
    """Of what has a part for each rank on one side, in one tensor or a list, and this rank's part on the other; several of these at once.
    None where only the root has such a list. nbytes counts all ranks' parts."""
    sides = [args[name] for name in list(args)[:2]]
    outputs, inputs = ([side] if isinstance(side, torch.Tensor) else side for side in sides)
    count = max(len(outputs), len(inputs))
    pairs = list(zip(_lists(outputs, count), _lists(inputs, count), strict=True))
    nbytes = size * sum(size_of(pair[0 if collective.scatters else 1]) for pair in pairs)
    return Call(collective, pairs, nbytes, args.get("reduce_op"), args.get("root_rank", 0))


def _lists(side, count: int) -> list[list[torch.Tensor]]:
    return [[one] if isinstance(one, torch.Tensor) else list(one) for one in side] or [[] for _ in range(count)]


def parts_by_rank(collective: Collective, args: Mapping, size: int) -> Call:
    """A list for each rank, with an output for each input."""
    return parts(
        collective, {"outputs": list(zip(*args["output_lists"], strict=True)), "inputs": args["input_list"]}, size
    )


def rows(collective: Collective, args: Mapping, size: int) -> Call:
    """One tensor on each side, of which each rank has some rows. Raises RuntimeError for splits that are not all of them."""
    tensors, splits = (args["output"], args["input"]), []
    for name, tensor in zip(("output", "input"), tensors, strict=True):
        count = tensor.shape[0] if tensor.dim() else 0
        sizes = list(args[f"{name}_split_sizes"]) or [count // size] * size
        if len(sizes) != size or sum(sizes) != count:
            raise RuntimeError(
                f"Split sizes doesn't match total dim 0 size: {name} has {count} rows, and splits {sizes}"
            )
        splits.append(sizes)
    output, source = tensors
    return Call(collective, [([output], [source])], size_of([source]), splits=tuple(splits))


def a_tensor_each(collective: Collective, args: Mapping, size: int) -> Call:
    """A tensor for each rank on both sides."""
    inputs = list(args["input_tensors"])
    return Call(collective, [(list(args["output_tensors"]), inputs)], size_of(inputs))


# -- what a rank gives and takes


class Splits(NamedTuple):
    """Elements that a rank gives to each rank, and takes from each."""

    gives: list[int]
    takes: list[int]


def splits_of_rows(call: Call, rank: int, size: int) -> Splits | None:
    """Of an all_to_all; None where each rank gives each of the others as much as it takes from it, as nearly always."""
    outputs, inputs = call.pairs[0]
    if call.splits is None:
        gives, takes = ([tensor.numel() for tensor in side] for side in (inputs, outputs))
    else:
        width = [tensor.numel() // tensor.shape[0] if tensor.numel() else 0 for tensor in (inputs[0], outputs[0])]
        gives, takes = ([row * part for part in side] for row, side in zip(width, reversed(call.splits), strict=True))
    return None if len({*gives, *takes}) <= 1 else Splits(gives, takes)


def splits_of_parts(call: Call, rank: int, size: int) -> Splits | None:
    """Of lists with a tensor for each rank; None where all are alike."""
    scatters = call.collective.scatters
    if size > 1 and all(len(inputs if scatters else outputs) == 1 for outputs, inputs in call.pairs):
        return None  # in one tensor, whose size the checks know
    mine, all_parts, uneven = 0, [0] * size, False
    for outputs, inputs in call.pairs:
        (one,), many = (outputs, inputs) if scatters else (inputs, outputs)
        count = one.numel()
        counts = [count] * size if len(many) == 1 else [tensor.numel() for tensor in many]
        uneven = uneven or any(other != count for other in counts)
        mine += count
        all_parts = [total + other for total, other in zip(all_parts, counts, strict=True)]
    if not uneven:
        return None
    return Splits(all_parts, [all_parts[rank]] * size) if scatters else Splits([mine] * size, all_parts)


# -- What a rank tells the others of its call, in four whole numbers (`Signature`); `collectives` compares them.


DTYPES_BY_NUMBER = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
REDUCTIONS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES_BY_NUMBER)}
REDUCTION_NUMBERS = {name: number for number, name in enumerate(REDUCTIONS)}
KINDS = 64  # of collectives, at most


def signature_of(call: Call, splits: "Splits | None") -> Signature:
    """Its bytes and kind, its elements, bits (pairs, root, reduction, dtype, and are there splits?), and a checksum of several tensors.
    Equal signatures without splits are equal calls."""
    side = 0 if call.collective.scatters else 1
    parts = call.pairs[0][side] if call.pairs else ()
    dtype, count, several = (DTYPE_NUMBERS[parts[0].dtype], parts[0].numel(), 0) if parts else (0, 0, 0)
    if len(call.pairs) > 1 or len(parts) > 1:
        tensors = [tensor for pair in call.pairs for tensor in pair[side]]
        count = sum(tensor.numel() for tensor in tensors)
        if call.kind != "all_to_all":  # there it is all the same which rank has a tensor for each, and which a part
            several = zlib.crc32(repr([(tensor.numel(), DTYPE_NUMBERS[tensor.dtype]) for tensor in tensors]).encode())
    bits = (len(call.pairs) << 20 | call.root & 0xFFFFF) << 8 | REDUCTION_NUMBERS[call.reduction[0]]
    bits = (bits << 8 | dtype) << 1 | (splits is not None)
    return call.nbytes * KINDS + call.collective.number, count, bits, several


# -- What NCCL's process group refuses, as it says it (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).

REFUSED = ("BAND", "BOR", "BXOR")  # NCCL has none of them
# The dtypes that it has (`ncclDataType`); torch/csrc/cuda/nccl.cpp, by which the kinds of COPIED go, names the same
DTYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip
INVALID_ARGUMENT = ("ProcessGroupNCCL.cpp:3780", "invalid argument", "Invalid value for an argument.")
COPIED = ("all_to_all", "gather", "scatter")
SUMMED = {torch.float8_e4m3fn, torch.float8_e5m2}  # of FLOAT8, from Hopper on; all are copied
UNSUMMED = FLOAT8 - SUMMED
DENSE = "Please use dense tensors instead."
OF_COMPLEX = ("SUM", "AVG", "PREMUL_SUM")  # the others would reduce both halves of a number on their own


def check(call: Call, rank: int, size: int) -> None:
    """Raises PyTorch's error for a collective that this rank of so many cannot begin."""
    for refuse in call.collective.checks:
        refuse(call, rank, size)
    for outputs, inputs in call.pairs:
        for side in (outputs,) if outputs is inputs else (outputs, inputs):
            for tensor in side:
                if tensor.layout is not torch.strided:
                    if call.kind == "all_reduce":
                        raise RuntimeError(f"NCCL does not support all_reduce with sparse tensors. {DENSE}")
                    raise ValueError("Tensors must be CUDA and dense")
                if tensor.is_contiguous():
                    continue
                if len(side) == 1:
                    _contiguous(tensor)
                if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                    raise ValueError("Tensors must be non-overlapping and dense")


def check_what_nccl_has(call: Call, size: int, capability: tuple[int, int]) -> None:
    """Raises PyTorch's error for a root and for dtypes that gloo would refuse in its own way, or not at all.

    capability: the GPU's.
    """
    if call.kind in ("broadcast", "reduce") and not 0 <= call.root < size:
        message = f"{call.kind.capitalize()} : invalid root {call.root} (root should be in the 0..{size} range)"
        raise refused_by_nccl(*INVALID_ARGUMENT, message)
    if call.reduction[0] and capability < (9, 0) and call.dtypes & SUMMED:
        # of its taskAppend, enqueue.cc; copies of FP8 are refused by NCCL 2.27 and before alone
        raise refused_by_nccl(*INVALID_ARGUMENT, "FP8 reduction support begins with sm90 capable devices.")
    for tensor in () if call.dtypes <= DTYPES else call.tensors:
        if tensor.dtype not in DTYPES and not tensor.is_complex():  # a complex number is sent as two
            name = str(tensor.dtype).removeprefix("torch.").replace("uint", "UInt")
            name = "Short" if name == "int16" else name[0].upper() + name[1:]
            if call.kind in COPIED:
                raise RuntimeError(f"Unconvertible NCCL type {name}")
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {name}")


def refused_by_nccl(source: str, kind: str, meaning: str, message: str) -> dist.DistBackendError:
    """PyTorch's error where NCCL itself refuses (as 2.11 says it on an H100, 2026-11-26). source: PyTorch's file that called it."""
    name = "".join(part.capitalize() for part in kind.split())
    version = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/{source}, {kind} (run with NCCL_DEBUG=WARN for details), "
        f"NCCL version {version}\nnccl{name}: {meaning}\nLast error:\n{message}"
    )


def _contiguous(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous(memory_format=suggest_memory_format(tensor)):
        raise ValueError("Tensors must be contiguous")


# -- of rows


def check_contiguous(call: Call, rank: int, size: int) -> None:
    """Also in lists."""
    for tensor in call.tensors:
        if tensor.layout is torch.strided:
            _contiguous(tensor)


def check_reduction(call: Call, rank: int, size: int) -> None:
    """Operations that NCCL has for these dtypes."""
    name, _ = call.reduction
    if name in REFUSED:
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    if call.dtypes & UNSUMMED:
        raise RuntimeError("Unsupported Float8 type for NCCL reduction")
    if name == "AVG" and torch.bool in call.dtypes:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if name not in OF_COMPLEX and any(dtype.is_complex for dtype in call.dtypes):
        raise RuntimeError(f"{call.kind} does not support {name} on complex tensors")


def check_parts(call: Call, rank: int, size: int) -> None:
    """An all_gather's outputs and a reduce_scatter's inputs: a list of as many tensors as ranks, or one tensor of their size."""
    scatters = call.collective.scatters
    way = "input" if scatters else "output"
    for outputs, inputs in call.pairs:
        (part,), many = (outputs, inputs) if scatters else (inputs, outputs)
        if len(many) not in (1, size):
            raise ValueError(f"{call.kind}: invalid {way} tensor list (expected length {size}, got {len(many)})")
        if len(many) == 1 and part.dtype != many[0].dtype:
            raise TypeError(UNLIKE_PARTS[scatters][0])
        if len(many) == 1 and part.numel() * size != many[0].numel():
            raise ValueError(UNLIKE_PARTS[scatters][1])


UNLIKE_PARTS = {
    True: (
        "input tensor must be the same type as the output tensor.",
        "input tensor must be the same size as output size times world size",
    ),
    False: (
        "output tensor must have the same type as input tensor",
        "output tensor size must be equal to world_size times input tensor size",
    ),
}


def check_rooted(call: Call, rank: int, size: int) -> None:
    """The root of a gather or scatter gives a list with a tensor for each rank, the others give none."""
    name, scatters = f"ProcessGroupNCCL::{call.kind}", call.collective.scatters
    if not 0 <= call.root < size:
        raise ValueError(f"{name}: invalid root rank: {call.root}")
    way = "input" if scatters else "output"
    for outputs, inputs in call.pairs:
        many, (one, *_) = (inputs, outputs) if scatters else (outputs, inputs)
        if rank != call.root:
            if many:
                raise ValueError(f"{name}: requires empty {way} on non-root")
            continue
        if len(many) == 1 and size > 1 and many[0].numel() == one.numel() * size:
            continue  # into a single tensor
        if len(many) != size:
            raise ValueError(
                f"{name}: Incorrect {way} list size {len(many)}. "
                f"{way.capitalize()} list size should be {size}, same as size of the process group."
            )
        for index, tensor in enumerate(many):
            for what, wanted, found in (("type", one.dtype, tensor.dtype), ("size", one.shape, tensor.shape)):
                if found != wanted:
                    # of sizes as c10d's toString has it (Utils.hpp): one without a comma
                    texts = [f"({', '.join(map(str, it))})" if what == "size" else it for it in (wanted, found)]
                    raise ValueError(
                        f"{name}: invalid tensor {what} at index {index} (expected {texts[0]}, got {texts[1]})"
                    )
