"""Operations that are bound by memory: how often they move their tensors, as a table (`data/memory_bound.csv`), and the few that need more.

Its traffic factors and cycles are what single kernels took on an H100 (tests/gpu/memory_table.py), and so are the cycles of a multiprocessor here.
An **elementwise** kernel where all tensors are alike reads 16 bytes at once and memory holds it up. Where a tensor is broadcast or lies
otherwise, a thread works out the place of each number in each tensor by divisions, for 4 numbers of 16 bits or 2 of 32; where types differ,
it converts number by number (aten/src/ATen/native/cuda/CUDALoops.cuh: gpu_kernel_impl_nocast, gpu_kernel_impl).
"""

import functools
import itertools
from math import ceil, prod

import torch
from torch import Tensor

from virtualgpu.timing import reductions
from virtualgpu.timing.kernels import Kernels, Kind, read_table

ORDINARY = Kind()  # each tensor moved once, and nothing beside
ELEMENTWISE = Kind(elementwise=True)
SHORT = 1 << 18  # bytes: an elementwise kernel that lasts no longer than its launch, however it reads them
# Bytes of a row of a softmax beyond which it is read once more for the maximum and once for the sum: Liger-Kernel's cross entropy on an A100
# (BSD 2-Clause, 2024), 16384 rows of float32 in PyTorch: 1,100 GB/s with 64 KiB a row, 820 to 830 with 128 KiB and more; an H100 reads rows
# of 98 KiB once, and of 125 KiB more often
ROW = 112 << 10


def seconds(kernels: Kernels, kind: Kind, args, tensors, nbytes: float) -> float:
    """What an operation of that kind takes. tensors: all that go in or come out, what comes out last; nbytes: theirs, once."""
    cycles = one_by_one(tensors) if kind.elementwise and nbytes > SHORT else 0.0
    if kind.cycles:
        cycles = max(cycles, kind.cycles * max(tensor.numel() for tensor in tensors))
    if kind.step:
        cycles = max(cycles, through_planes(kernels, kind.step, tensors[0], tensors[-1]))
    if kind.elementwise or kernels.peak:
        return kernels.moving(nbytes, kind, cycles)
    copied = sum(copying(kernels, tensor) for tensor in copied_first(kind, args)) if kind.copied else 0.0
    if kind.model is not None and tensors[0].numel() and all(tensor.layout is torch.strided for tensor in tensors):
        return kind.model(kernels, args, tensors) + copied
    rows = tensors[:-1] if kind.wide_traffic and tensors[0].dim() else []  # the backward pass reads two tensors
    if sum(tensor.shape[-1] * tensor.itemsize for tensor in rows) > ROW:
        kind = kind._replace(traffic=kind.wide_traffic)
    return kernels.moving(nbytes, kind, cycles) + copied


def copied_first(kind: Kind, args) -> list[Tensor]:
    """Arguments that are made to lie close (contiguous in SoftMax.cu, expect_contiguous in layer_norm_kernel.cu)."""
    return [args[at] for at in kind.copied if not args[at].is_contiguous()]


def copying(kernels: Kernels, tensor: Tensor) -> float:
    """What makes it lie close."""
    shape = tensor.shape
    cycles = _places((shape, close(shape)), ((shape, tensor.stride()),), tensor.itemsize)
    return kernels.moving(2 * tensor.nbytes, ELEMENTWISE, cycles)


# Cycles for each number that is written, by its bytes, where two tensors take part and lie in two stretches of even steps; what each tensor
# beside them takes, and each dimension more (slices, windows and heads that are copied, one image or none read beside a gate, a row or column
# broadcast). Liger-Kernel's rotary embedding in bfloat16 on an A100-80GB takes as long (BSD 2-Clause, 2024; twice its bytes)
WRITTEN, BESIDE, DIMENSION = {2: 0.475, 4: 0.64}, {2: 0.175, 4: 0.25}, {2: 0.105, 4: 0.05}
# On top where neighbours of the result lie apart in what is read: a warp's load asks for 32 pieces of SECTOR bytes, of which a block uses what
# its rows have beside each other (copies to channels last of 64 to 256 channels: 1.2 to 2 in all; a transposed matrix 2.1 in 32 bits, 1.9 in 16)
APART, PIECE, SECTOR, BLOCK = 0.46, 0.9, 32, 128
CONVERTED = 0.145  # a byte, where 16 bits are read for 32 (Liger-Kernel's RMS norm on an A100: 6.9 bytes in a cycle)


def one_by_one(tensors) -> float:
    """Cycles in all of a kernel that works out places; 0 for any other. tensors: what it reads, and last what it writes."""
    output = tensors[-1]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return 0.0
    inputs, result = (
        [tensor for tensor in tensors if tensor is not output and tensor.dim()],
        (output.shape, output.stride()),
    )
    layouts = tuple((tensor.shape, tensor.stride()) for tensor in inputs)
    if output.dim() and any(layout != result for layout in layouts):
        return _places(result, layouts, output.itemsize)
    widened = output.itemsize == 4 and any(tensor.itemsize == 2 for tensor in inputs)
    return CONVERTED * sum(tensor.nbytes for tensor in tensors) if widened else 0.0


def close(shape) -> tuple[int, ...]:
    """Strides of a tensor whose numbers lie close, in the order of its dimensions."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


@functools.lru_cache(4096)
def _places(output, inputs, size: int) -> float:
    """Of a result and of what is read, (shape, strides) each."""
    shape, strides = output
    if size not in WRITTEN:
        return 0.0
    steps = [tuple(0 if one == 1 else step for one, step in zip(*layout, strict=True)) for layout in inputs]
    expanded = [(0,) * (len(shape) - len(step)) + step for step in steps]  # for the dimensions of the result
    each = WRITTEN[size] + BESIDE[size] * (len(inputs) - 1)
    each += DIMENSION[size] * max(0, _stretches(shape, [strides, *expanded]) - 2)
    along, whole = (
        _innermost(shape, strides),
        [one for one in inputs if prod(one[0]) == prod(shape) and 0 not in one[1]],
    )
    if any(_innermost(*layout) != along for layout in whole):
        beside = BLOCK * 8 / size / (shape[along] if along is not None else 1)
        each += APART + PIECE / min(SECTOR / size, max(1.0, beside))
    return prod(shape) * each


def _stretches(shape, layouts) -> int:
    """Dimensions that are left where neighbours that follow each other in every tensor are one (TensorIterator's coalescing)."""
    order = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: layouts[0][dim])
    pairs = itertools.pairwise(order)
    return bool(order) + sum(any(steps[dim] != steps[low] * shape[low] for steps in layouts) for low, dim in pairs)


def _innermost(shape, strides) -> int | None:
    """The dimension along which memory runs."""
    return next((dim for dim in reversed(range(len(shape))) if strides[dim] == 1 and shape[dim] > 1), None)


# A row that is looked up (1.6e9 rows of 64 numbers a second), and a number of a gradient that is added to its row, beside zeros and sorting
LOOKED_UP, EMBEDDING = 163, 4.7
JOINED = {2: 1.0, 4: 1.13}  # a number that cat moves so
FEW_INDICES = 3072  # up to so many, embedding_backward_feature_kernel; more are sorted (Embedding.cu)
# Kernels: thrust::sort_by_key and four more (EmbeddingBackwardKernel.cu); in a profile (EmbeddingBag.cu)
SORTING, SORTING_BAGS = 12, 29


def looked_up(kernels: Kernels, args, tensors) -> float:
    """An embedding, or what picks whole rows. x[i] has the same kernel for rows of 16 bytes at a time (fast_gather_kernel_eligible)."""
    x, index = tensors[0], tensors[1]
    fast = not isinstance(args[1], (list, tuple)) or (
        len(args[1]) == 1 and index.dtype.is_signed and x.dim() > 1 and not prod(x.shape[1:]) * x.itemsize % 16
    )
    return kernels.spec.kernel + kernels.working(2 * tensors[-1].nbytes, LOOKED_UP * index.numel() * fast)


def written(kernels: Kernels, args, tensors) -> float:
    """A loss of labels reads one number of each row, or writes it after zeros: its result alone counts."""
    return kernels.spec.kernel + kernels.filling(tensors[-1].nbytes)


def joined(kernels: Kernels, args, tensors) -> float:
    """cat(parts, dim): where a part does not lie close, each place is worked out (CatArrayBatchedCopy)."""
    numbers, size = tensors[-1].numel(), tensors[-1].itemsize
    apart = not all(part.is_contiguous() or (part.dim() == 4 and part.stride(1) == 1) for part in args[0])
    return kernels.spec.kernel + kernels.working(2 * tensors[-1].nbytes, JOINED.get(size, JOINED[4]) * numbers * apart)


def few_indices(args) -> bool:
    """Of embedding_dense_backward(gradient, indices, rows, padding, by_frequency): one kernel, and another makes zeros."""
    return args[1].numel() <= FEW_INDICES and not args[4]


def embedding_backward(kernels: Kernels, args, tensors) -> float:
    """Sorted indices, then sums of equal ones."""
    return _added(kernels, tensors, *((2, 0) if few_indices(args) else (SORTING, args[0].numel())))


def embedding_bag_backward(kernels: Kernels, args, tensors) -> float:
    """Sorted, counted and put in order first; a bag's gradient is added for each of its indices, a sparse one is not added up."""
    return _added(kernels, tensors, SORTING_BAGS, 0 if args[9] else args[1].numel() * args[0].shape[-1])


def _added(kernels: Kernels, tensors, launches: int, numbers: int) -> float:
    moving = kernels.streaming(sum(tensor.nbytes for tensor in tensors))
    return launches * kernels.spec.kernel + moving + EMBEDDING * numbers / kernels.cycles


NEAR = 0.64  # of a step, where a line of the cache holds many images; what comes from memory takes a step more


def through_planes(kernels: Kernels, step: float, inputs: Tensor, output: Tensor) -> float:
    """Cycles of all multiprocessors where a thread for each place of an image goes through all images and channels (UpSampleBilinear2d.cu)."""
    small, large = (inputs, output) if inputs.nbytes < output.nbytes else (output, inputs)
    if large.stride(1) == 1 and not large.is_contiguous():
        return 0.0  # channels last: a thread for each number
    spec, apart = kernels.spec, min(1.0, prod(small.shape[2:]) * small.itemsize / LINE)
    rounds = ceil(prod(large.shape[2:]) / (spec.processors * spec.limits.threads))
    step *= NEAR + (1 - NEAR + kernels.lost(inputs.nbytes + output.nbytes)) * apart
    return spec.processors * rounds * prod(large.shape[:2]) * step


# Numbers that threads add to memory by atomic operations: the second-level cache adds, and to one line of LINE bytes one after the other.
# Cycles from one addition to a line to its next, in which a multiprocessor does one for a warp, for each line that they meet, and of a
# multiprocessor for each addition, where all of them are at work: red.add.f32; two numbers of 16 bits at once (fastAtomicAdd in KernelUtils.cuh)
LINE, WARP, ADDING_BLOCK = 128, 32, 1024
ADDING, ADDING_PAIRS = (2.6, 8.0, 0.75), (4.4, 8.0, 1.3)
MEETING, FEW_MEET = 0.25, 0.65  # where fewer than four threads meet at a number, a line takes a part of the time


def bilinear_backward(kernels: Kernels, args, tensors) -> float:
    """upsample_bilinear2d_backward_out_frame: a thread for each number of the gradient adds to four, after zeros."""
    gradient, output = tensors[0], tensors[-1]
    spec, additions = kernels.spec, 4 * gradient.numel()
    line, warp, each = ADDING_PAIRS if output.itemsize == 2 else ADDING
    lines, at_once = output.nbytes / LINE, spec.processors * spec.limits.threads / prod(gradient.shape[2:])
    if output.stride(1) != 1 or output.is_contiguous():  # the images whose gradients the threads that run together have
        lines = min(lines, at_once * prod(output.shape[2:]) * output.itemsize / LINE)
    apart = output.shape[-1] / gradient.shape[-1]  # numbers, from a thread's to its neighbour's
    met = max(1.0, WARP * apart * output.itemsize / LINE)
    blocks = min(max(1.0, gradient.numel() / ADDING_BLOCK), spec.processors)
    line *= (1.0 if apart <= MEETING else FEW_MEET) / max(1.0, lines)
    cycles = additions * max(line, warp * met / WARP / blocks, each / spec.processors)
    return kernels.filling(output.nbytes) + spec.kernel + max(kernels.took(cycles), kernels.streaming(gradient.nbytes))


def _kind(row: dict[str, str]) -> Kind:
    traffic, wide_traffic, cycles, step = (
        float(row[column] or 0) for column in ("traffic", "wide_traffic", "cycles", "step")
    )
    training, copied = int(row["training"]) if row["training"] else None, tuple(map(int, row["copied"].split()))
    model, elementwise = MODELS[row["model"]] if row["model"] else None, row["elementwise"] == "yes"
    return Kind(
        traffic, wide_traffic, cycles, row["limit"], int(row["launches"]), training, copied, elementwise, model, step
    )


MODELS = vars(reductions) | globals()
KINDS = {row["operation"]: _kind(row) for row in read_table("memory_bound")}
COPIED = {name: kind for name, kind in KINDS.items() if kind.copied}
