"""Operations with numbers: PyTorch's CPU kernels do the work, each GPU draws from its own random numbers, and room is asked for first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from virtualgpu import _compat, errors
from virtualgpu.engine import cuda_checks, cuda_differences
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.rng import GENERATORS, as_default
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
