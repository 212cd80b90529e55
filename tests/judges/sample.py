"""One sample of an operation, run forward and backward on a device, and what came of it."""

import copy
import itertools
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_flatten

# Dtypes to try where an operation knows no float32, the first that CPU and GPU both have.
DTYPES = [torch.float32, torch.complex64, torch.int64, torch.bool, torch.float16, torch.float8_e4m3fn]
# Their tensor arguments have to be on the CPU; with others PyTorch raises RuntimeError.
HOST_ARGUMENTS = {"tensor_split"}
# Equal to Python, and of different types to PyTorch
ALIKE = (True, 1, 1.0, 1 + 0j)


@dataclass
class Run:
    """Results and gradients as flat lists, all that was put on the device, and what memory and clock said there."""

    structure: str
    results: list
    gradients: list
    cotangents: list
    moved: list
    allocated: int = 0  # bytes, in whole blocks
    requested: int = 0  # bytes, before rounding
    peak: int = 0
    seconds: float = 0.0

    @property
    def tensors(self) -> list[torch.Tensor]:
        values = [*self.moved, *self.results, *self.gradients, *self.cotangents]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def shapes(self) -> list:
        """Shape, dtype and place of each result and gradient; the type of what is no tensor."""
        return [
            (tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else type(value).__name__
            for value in (*self.results, *self.gradients)
        ]


def dtype_of(op) -> torch.dtype | None:
    """float32, or another dtype that the operation has on both CPU and GPU; None where the CPU has none."""
    cpu, cuda = op.supported_dtypes("cpu"), op.supported_dtypes("cuda")
    if not cpu and op.variant_test_name == "without_cudnn":  # a switch of the GPU's; the CPU computes the same
        cpu = cuda
    both = cpu & cuda or cpu
    return next((dtype for dtype in [*DTYPES, *sorted(both, key=str)] if dtype in both), None)


def samples(op, dtype: torch.dtype, everything: bool):
    """The samples of an operation, on the CPU; unless `everything`, one of the first few."""
    wants_gradients = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", dtype, requires_grad=wants_gradients)
    if everything:
        yield from made
        return
    first = list(itertools.islice(made, 4))
    larger = [sample for sample in first if _numel(sample.input) > 1]  # a single number would show less
    yield from (larger or first)[:1]


def with_other_numbers(sample):
    """Samples like this one, with each of ALIKE for one of its numbers, or for a tensor that may be a number as well: of its first
    three arguments."""
    places = [(sample.args, at) for at in range(len(sample.args))] + [(sample.kwargs, name) for name in sample.kwargs]
    numbers = [(owner, at) for owner, at in places if isinstance(owner[at], (complex, float, int, torch.Tensor))]
    for owner, at in numbers[:3]:
        for number in ALIKE:
            other = copy.copy(sample)
            if owner is sample.args:
                other.args = (*sample.args[:at], number, *sample.args[at + 1 :])
            else:
                other.kwargs = {**sample.kwargs, at: number}
            yield other


def run(op, sample, place: torch.device, cotangents: list | None = None, backward: bool = True) -> Run:
    """The operation on `place`, forward and, where inputs want gradients and `backward`, backward, from the same seed.

    cotangents: those of an earlier run; unless given, random numbers are drawn. Raises what the operation raises.
    """
    seen: dict = {}
    given, args, kwargs = (_moved(value, place, seen) for value in (sample.input, sample.args, sample.kwargs))
    if op.name in HOST_ARGUMENTS:
        args = sample.args
    moved = [new for _, new in seen.values()]
    leaves = [tensor for tensor in moved if tensor.requires_grad]
    torch.manual_seed(0)
    if place.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    with torch.backends.cudnn.flags(enabled="without_cudnn" not in op.variant_test_name):
        out = op(given, *args, **kwargs)
    results, structure = tree_flatten(out)
    found = Run(str(structure), [], [], [], moved)
    ends = _ends(sample.output_process_fn_grad(out)) if leaves and backward else []
    if ends:
        drawn = [_cotangent(tensor) for tensor in ends] if cotangents is None else cotangents
        found.cotangents = [_moved(cotangent, place, {}) for cotangent in drawn]
        found.gradients = list(torch.autograd.grad(ends, leaves, found.cotangents, allow_unused=True))
    found.results = [value.detach() if isinstance(value, torch.Tensor) else value for value in results]
    if place.type == "cuda":
        end.record()
        torch.cuda.synchronize()
        found.seconds = start.elapsed_time(end) / 1e3
        del out, results, ends, given, args, kwargs  # the graph goes, and what it kept
        found.allocated, found.peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        found.requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return found


def _ends(out) -> list[torch.Tensor]:
    """The results that a backward pass can start from."""
    tensors = [value for value in tree_flatten(out)[0] if isinstance(value, torch.Tensor) and value.requires_grad]
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _numel(value) -> int:
    return sum(tensor.numel() for tensor in tree_flatten(value)[0] if isinstance(tensor, torch.Tensor))


def _moved(value, place: torch.device, seen: dict):
    """The same value with its tensors, and devices that are named, on `place`: new leaves. A tensor met twice stays one."""
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            new = value.detach().to(place, copy=True).requires_grad_(value.requires_grad)
            seen[id(value)] = value, new
        return seen[id(value)][1]
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return place
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, place, seen) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_moved(item, place, seen) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, place, seen) for key, item in value.items()}
    return value


def _cotangent(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    generator = torch.Generator().manual_seed(1)
    dtype = tensor.dtype if tensor.is_complex() or tensor.dtype.itemsize > 1 else torch.float32
    return torch.randn(tensor.shape, dtype=dtype, generator=generator).to(tensor.dtype)
