"""Operations with numbers: PyTorch's CPU kernels do the work, each GPU draws from its own random numbers, and room is asked for first."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from virtualgpu import _compat, errors
from virtualgpu.engine import cuda_checks, cuda_differences
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import gpu_of

if TYPE_CHECKING:
    from virtualgpu.engine.operations import Operation

# A result below this is made first and counted afterwards: the host can hold it in any case
LARGE = 256 << 20


class Eager:
    """Carries out operations of one GPU's tensors on the CPU."""

    def __init__(self, machine: Machine):
        self.machine = machine

    def run(self, op: Operation, args, kwargs, tensors, gpu: GPU):
        """(the result, what a kernel would print that asserts). Raises torch.OutOfMemoryError before the host allocates."""
        # may the result be larger than the product of two small inputs?
        if op.may_be_large and (op.grows or len(tensors) > 2 or tensors[0].numel() * tensors[-1].numel() * 8 >= LARGE):
            self._require(op, args, kwargs, tensors, gpu)
        try:
            if op.apart:
                if op.random:
                    return self._draw(op, args, kwargs, gpu), ""
                if tensors[0].dtype in cuda_differences.IN_FLOAT32[op.func]:
                    return cuda_differences.run_in_float32(op, args, kwargs, tensors), ""
            return op.on_gpu(*args, **kwargs), ""
        except (IndexError, RuntimeError) as error:
            if shapes := [tensor for tensor in tensors if _compat.is_really_meta(tensor)]:
                raise errors.no_data(made_in_dry_run=any(gpu_of(shape) for shape in shapes)) from None
            if errors.in_kernel(error):
                with self.machine.untracked():
                    return errors.undefined(op.func, op.returns, args, kwargs), errors.assertions(op.name, args)
            if errors.host_refused(error):
                needed = self._result_bytes(op, args, kwargs)
                gpu.require(needed)
                raise errors.host_full(sum(needed), host_free()) from None
            if isinstance(error, NotImplementedError) and "the 'CPU' backend" in str(error):
                raise NotImplementedError(
                    f"{op.func.name()} runs on GPUs alone: PyTorch has no CPU kernel of it, with which virtual GPUs compute. "
                    "Write it with other operations, or run this line in a dry run"
                ) from None
            if (own := cuda_checks.of_cuda(error)) is not error:
                raise own from None
            raise

    def check_generator(self, args, kwargs, gpu: GPU | None) -> None:
        """Raises RuntimeError for a generator of the CPU on a GPU, and the other way round."""
        generator = kwargs.get("generator")
        if generator is None:
            generator = next((value for value in args if isinstance(value, torch.Generator)), None)
        if generator is None:
            return
        expected = "cpu" if gpu is None else "cuda"
        actual = "cuda" if _compat.address(generator) in GENERATORS else "cpu"
        if actual != expected:
            if generator.device.type == "cuda" and actual == "cpu":
                raise errors.of_real_gpu("generator")
            raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{actual}'")

    def _draw(self, op: Operation, args, kwargs, gpu: GPU):
        """From the generator that was given, or the GPU's own; that one stands in for the CPU's where none can be given."""
        if op.generator and (kwargs.get("generator") is not None or any(isinstance(a, torch.Generator) for a in args)):
            return op.on_gpu(*args, **kwargs)
        generators = torch.cuda.default_generators
        own = generators[gpu.index] if gpu.index < len(generators) else None
        if own is None or own is torch.default_generator:
            return op.on_gpu(*args, **kwargs)
        if op.drawn_with is not None:
            return op.drawn_with(*args, **{**kwargs, "generator": own})
        return as_default(self.machine, own, op.on_gpu, args, kwargs)

    # -- room

    def require_for_factory(self, op: Operation, args, kwargs, gpu: GPU) -> None:
        """Room for a new tensor, where the product of its numbers is large."""
        if _numbers(args) * 16 >= LARGE or any(type(value) is float for value in args):  # a step may be small
            require_room(self._result_bytes(op, args, kwargs), gpu)

    def _require(self, op: Operation, args, kwargs, tensors, gpu: GPU) -> None:
        """Room for the result where it may be large: no larger than the product of the inputs, or told by numbers."""
        bound = 1
        if op.product is not None:  # m x k times k x n
            lhs, rhs = tensors[op.product : op.product + 2]
            if lhs.dim() and rhs.dim():
                bound = lhs.numel() // (lhs.shape[-1] or 1) * rhs.shape[-1]
        elif op.pointwise:  # as large as its largest input, or, where shapes differ, as their product
            shape = None
            for tensor in tensors:
                if shape is None:
                    shape, bound = tensor.shape, tensor.numel()
                elif tensor.shape != shape:
                    bound *= tensor.numel() or 1
        else:
            for tensor in tensors[:3]:
                bound *= tensor.numel() or 1
            if op.grows or op.resizes:
                bound *= _numbers(args)
        if bound * 8 < LARGE:
            return
        require_room(self._result_bytes(op, args, kwargs), gpu)

    def _result_bytes(self, op: Operation, args, kwargs) -> list[int]:
        """Of each result that is new, or may grow, by PyTorch's meta kernel; nothing where it has none."""
        if not (op.new or op.resizes):
            return []
        with self.machine.untracked():
            try:
                shapes = errors.on_meta(args), errors.on_meta(kwargs)
                if "device" in shapes[1]:
                    shapes[1]["device"] = torch.device("meta")
                out = op.func(*shapes[0], **shapes[1])
            except Exception:  # no meta kernel, or bad arguments, which the operation itself will name
                return []
        results = out if isinstance(out, (tuple, list)) else [out]
        return [r.numel() * r.element_size() for r in results if isinstance(r, torch.Tensor)]


def require_room(sizes: list[int], gpu: GPU) -> None:
    """Raises torch.OutOfMemoryError where the GPU has no room for blocks of these sizes, RuntimeError where this machine has none."""
    if sum(sizes) < LARGE:
        return
    gpu.require(sizes)
    free = host_free()
    if sum(sizes) > free:
        raise errors.host_full(sum(sizes), free)


def _numbers(args) -> int:
    """The product of the whole numbers among the arguments (how often to repeat, how far to pad); 1 for none."""
    product = 1
    for value in args:
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if type(number) is int and number > 1:
                product *= number
    return product


def host_free() -> int:
    """Bytes that this machine can still give a program, by the kernel's own estimate."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):  # not Linux
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else 1 << 62


# -- Random numbers of a GPU come from its own generator, while other threads draw from theirs, and from the CPU's.
#
# Most operations take a generator, or have an overload that does. native_dropout has none, and is put together from those that have, as
# its CPU kernel is; the numbers are the same to the last bit. For what is left (an extension's own operations) the GPU's generator stands
# in for the process's default one, under a lock that all who draw from that one hold.

aten = torch.ops.aten
# Generators of GPUs, by address: from C++ they come back as plain ones
Plain = torch.Generator  # PyTorch's own, whose states are the CPU's for all
GENERATORS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
# Tagged as drawing, and never do: the flash kernel of the CPU refuses dropout
DRAW_NOTHING = {aten._scaled_dot_product_flash_attention_for_cpu.default}

_default = threading.RLock()  # who draws from the process's default generator, or puts another state in its place


def draws(func) -> bool:
    """Does this operation draw from the default generator, where it is not given another?"""
    return torch.Tag.nondeterministic_seeded in func.tags and func not in DRAW_NOTHING


def with_generator(func):
    """A function for the same numbers that takes `generator` by name; None where there is none."""
    if func is aten.native_dropout.default:
        return _native_dropout
    names = {argument.name for argument in _compat.schema(func).arguments} | {"generator"}
    overloads = (
        getattr(_compat.packet(func), name) for name in (_compat.overload_name(func), *_compat.packet(func).overloads())
    )
    return next((other for other in overloads if {a.name for a in _compat.schema(other).arguments} == names), None)


def from_default(func):
    """The operation, for tensors of the CPU: nobody exchanges the default generator's state while it draws."""

    def draw(*args, **kwargs):
        with _default:
            return func(*args, **kwargs)

    return draw


def as_default(machine, own: torch.Generator, func, args, kwargs):
    """An operation that knows the default generator alone draws from `own`."""
    default = torch.default_generator
    with _default:
        if own is default:
            return func(*args, **kwargs)
        with machine.untracked():
            before = default.get_state()
            default.set_state(Plain.get_state(own))
        try:
            return func(*args, **kwargs)
        finally:
            with machine.untracked():
                Plain.set_state(own, default.get_state())
                default.set_state(before)


def _native_dropout(input, p, train, generator):
    """native_dropout_cpu of aten/src/ATen/native/Dropout.cpp, by operations that take a generator."""
    if not input.numel() or train is False:
        return aten.native_dropout.default(input, p, train)
    mask = aten.bernoulli_.float(_compat.empty_like(input, dtype=torch.bool), 1 - p, generator=generator)
    return aten.mul_.Scalar(aten.mul.Tensor(input, mask), 0 if p == 1 else 1 / (1 - p)), mask


# -- How the random numbers of a fused kernel's forward pass are found again in its backward pass: the states of generators are kept, by a number.
#
# That number stands in the seed that the kernel returns. A seed survives where saved tensors are moved about; the oldest states are dropped.

STATES: OrderedDict[int, torch.Tensor] = OrderedDict()  # by their numbers
MAX_STATES = 4096  # 5 KB each
_next_number = itertools.count(1)


def keep(generator: torch.Generator) -> int:
    """Keep where a generator stands; returns the number of it."""
    number = next(_next_number)
    STATES[number] = Plain.get_state(generator)
    while len(STATES) > MAX_STATES:
        STATES.popitem(last=False)
    return number


def generator_at(seed: torch.Tensor) -> torch.Generator:
    """A generator that stands where that of the forward pass did, by the seed that it returned. Raises RuntimeError where that was too
    long ago."""
    number = int(seed.flatten()[0])
    if number not in STATES:
        raise RuntimeError(
            f"the random numbers of this attention's forward pass are no longer known: more than {MAX_STATES} with dropout came after it. "
            "Call backward() earlier, or set dropout_p=0"
        )
    generator = torch.Generator()
    generator.set_state(STATES[number])
    return generator
