"""Random numbers of a GPU come from its own generator, while other threads draw from theirs, and from the CPU's.

Most operations take a generator, or have an overload that does. native_dropout has none, and is put together from those that have, as
its CPU kernel is; the numbers are the same to the last bit. For what is left (an extension's own operations) the GPU's generator stands
in for the process's default one, under a lock that all who draw from that one hold.
"""

import itertools
import threading
import weakref
from collections import OrderedDict

import torch

from virtualgpu import _compat

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
