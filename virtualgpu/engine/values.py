"""Shadow values: small tensors on the CPU keep their numbers in a dry run, so that what a program draws or counts on the host (where to
crop an image, in which order, which step this is) is a number and not nan. On a GPU, whole numbers and those of float64 do: counts and
sizes, which a program reads back, or which ranks tell each other. So does a single float32: a fused optimizer counts its steps in one,
and by one ranks tell each other whether they have come to an end.

The tensor itself stays a shape, as all that is made in a dry run. Its shadow, a tensor with the numbers, is an attribute of it. Where
something without values is written to the tensor, the shadow becomes stale: nan, or 0. Who reads it gets that; no shape depends on it any
more.

What came with its numbers (from before the dry run, from NumPy, from a file) keeps them in memory, which is its owner's: where something
without values is written to it, its storage is marked as stale until the dry run ends, and who reads it there gets nan.
"""

import torch
from torch import Tensor

from virtualgpu import _compat
from virtualgpu.engine import histograms, wider
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.operations import EMPTY, Operation, tensors_of
from virtualgpu.engine.thread_context import dry_runs

ON_GPU = {**histograms.OPERATIONS, **wider.OPERATIONS}
SHADOW = "_virtual_shadow"
# Of a storage: not all of its numbers are known. True, or the epoch for which that holds; minus the epoch, where its memory holds the
# numbers that it has all the same (what another rank has told)
STALE = "_virtual_stale"
# Each of these is known to be that as soon as one of its tensors is that everywhere
DECIDED = {"logical_or": True, "bitwise_or": True, "logical_and": False, "bitwise_and": False}
FILLED = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}  # whatever the tensor's numbers
LIMIT = 8192  # numbers in a tensor: a generator's state has 5056
COUNTS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64}
# of what a program counts on a GPU: a mean over all ranks goes by a number of samples in float64, too


def is_kept(tensor: Tensor) -> bool:
    """Does this tensor on a GPU keep its numbers, where they are known?"""
    return tensor.dtype in COUNTS or (tensor.dtype is torch.float32 and not tensor.dim())


def values_of(tensor: Tensor) -> Tensor | None:
    """A small tensor on the CPU with the numbers of this one: its shadow, or itself where it came with them (from NumPy, from a
    file). None: they are not known."""
    if _compat.is_really_meta(tensor):
        return getattr(tensor, SHADOW, None)
    if tensor.numel() > LIMIT or gpu_of(tensor) is not None:
        return None
    return _nothing(tensor) if is_unknown(tensor) else tensor


def known_of(tensor: Tensor) -> Tensor | None:
    """The same, and None also where one of them is stale."""
    values = values_of(tensor)
    return None if values is None or _any_stale([values]) else values


def _any_stale(values) -> bool:
    return any(is_stale(value.untyped_storage()) for value in values)


def is_stale(storage) -> bool:
    """Was something without values written to it, in a dry run that is still on?"""
    mark = getattr(storage, STALE, False)
    return mark is True or (mark is not False and abs(mark) == dry_runs.epoch)


def _holds_its_numbers(storage) -> bool:
    """Stale or not, are they those in its memory?"""
    return not is_stale(storage) or getattr(storage, STALE) == -dry_runs.epoch


def is_unknown(tensor: Tensor) -> bool:
    """Are the numbers in its memory not those that it would have? Whole numbers that are really there stay to be read (DDP's C++ reads
    its buckets from such a tensor, which came back from a broadcast)."""
    return _is_real(tensor) and not _holds_its_numbers(tensor.untyped_storage())


def _is_real(tensor: Tensor) -> bool:
    """Has it a nan for what is not known?"""
    return tensor.is_floating_point() or tensor.is_complex()


def _nothing(tensor: Tensor) -> Tensor:
    """nan in its shape. Call it untracked."""
    values = _compat.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").fill_(float("nan"))
    _mark([values], True)
    return values


def _mark(values, stale: bool | int) -> None:
    for value in values:
        setattr(value.untyped_storage(), STALE, stale)


def may_have_shadow(tensor: Tensor) -> bool:
    """Is it a shape of what is kept?"""
    return is_kept(tensor) and _compat.is_really_meta(tensor)


def shadow_of(tensor: Tensor) -> Tensor:
    """The shadow of a shape, for others to write (another rank); zeros, where it has none, or nan. It counts as stale. Call it untracked."""
    values = values_of(tensor)
    if values is None:
        values = _compat.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        values.fill_(float("nan") if tensor.is_floating_point() else 0)
        attach([tensor], [values])
    _mark([values], True)
    return values


def know(tensor: Tensor, value) -> None:
    """All numbers of a shape are this one. Call it untracked."""
    _mark_valid([shadow_of(tensor).fill_(value)])


def written(op, args, kwargs, tensors):
    """In place, on what came with its numbers (from NumPy, say): carried out on them, where all that goes in is known, or was told by
    another rank. Otherwise they stay as they are, and count as stale; whole numbers are carried out all the same. NotImplemented for what
    is a shape."""
    targets = op.written(args, kwargs)
    if op.returns not in ([], [0]) or any(map(_compat.is_really_meta, targets)):
        return NotImplemented
    values = [values_of(tensor) if _compat.is_really_meta(tensor) else tensor for tensor in tensors]
    real = any(map(_is_real, targets))
    if any(value is None for value in values) or (real and not all(map(_has_numbers, _read(op, values)))):
        invalidate(targets)
    else:
        unknown = [target for target in targets if is_unknown(target)]  # elsewhere than it is written to now
        _with(values, tensors, op.func, args, kwargs)
        _pass_on(op, values, targets, -dry_runs.epoch if real and not unknown else dry_runs.epoch)
    return args[0] if op.returns else None


def _has_numbers(values: Tensor) -> bool:
    """Is each of them known, or told by another rank? Whole numbers do not say which of them stand for nothing, as a nan in a shadow does,
    and a mark where there is memory."""
    storage = values.untyped_storage()
    if not is_stale(storage):
        return True
    shadow = getattr(storage, STALE) is True
    told = shadow or _holds_its_numbers(storage)
    return told and values.dtype in (torch.float32, torch.float64) and not bool(values.isnan().any())


def invalidate(tensors) -> None:
    """Something without values was written to them: their shadows are nan, or 0, from now on, which their views see as well. What
    came with its numbers keeps them, and is marked; what a GPU held before the dry run stays as it is."""
    for tensor in tensors:
        if not _compat.is_really_meta(tensor):
            if gpu_of(tensor) is None:
                _mark([tensor], dry_runs.epoch)
        elif (values := getattr(tensor, SHADOW, None)) is not None:
            values.fill_(float("nan") if values.is_floating_point() or values.is_complex() else 0)
            _mark([values], True)


def propagate(op, args, kwargs, tensors, out) -> None:
    """After an operation on the CPU has given shapes: the same with values, where all have some and are small."""
    results = _results(op, args, kwargs, out)
    values = None if any(result.numel() > LIMIT for result in results) else list(map(values_of, tensors))
    if values == [None] and op.name in FILLED:
        values = list(map(_blank, results))
    if values is None or any(value is None for value in values):
        decided = None if values is None else _decided(op, tensors, results)
        invalidate(op.written(args, kwargs))
        if decided is not None:
            know(results[0], decided)
    elif any(map(_compat.is_really_meta, results)):
        kernel = ON_GPU.get(op.func, op.func)
        made = _with(values, tensors, kernel, args, kwargs)
        shadows = tensors_of([made], {}) if op.returns else list(map(values_of, results))
        attach(results, shadows)
        _pass_on(op, values, shadows)


def _blank(result: Tensor) -> Tensor:
    """Any numbers, in the shape of a result."""
    return _compat.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="cpu")


def _results(op: Operation, args, kwargs, out) -> list[Tensor]:
    """What an operation returns, or, where that is nothing, what it writes to: _foreach_add_ counts a fused optimizer's steps."""
    return tensors_of([out], {}) if op.returns else op.written(args, kwargs)


def _pass_on(op: Operation, values, shadows, mark: bool | int = True) -> None:
    """What comes of stale values is stale, too; what is overwritten by known ones is known again."""
    if _any_stale(_read(op, values)):
        _mark(shadows, mark)
    elif op.write_only or op.copies:
        _mark_valid(shadows)


def _read(op: Operation, values: list) -> list:
    """Of the tensors that an operation is given, those that it reads; the first is the one that it writes to."""
    return values[1:] if op.write_only or op.copies else values


def _mark_valid(values) -> None:
    """Known again, unless only a part of them was written."""
    _mark([value for value in values if value.nbytes == value.untyped_storage().nbytes()], False)


def _decided(op: Operation, tensors, results) -> bool | None:
    """True or False, where one of what goes in is enough to know: a loop ends that asks whether a text has come to its end or is long
    enough."""
    end = DECIDED.get(op.name.rstrip("_"))
    if end is None or (end and results[0].dtype is not torch.bool):
        return None
    known = [values for values in map(known_of, tensors) if values is not None and values.numel()]
    return end if any(bool((values.bool() == end).all()) for values in known) else None


def propagate_on_gpu(op: Operation, args, kwargs, tensors, out) -> None:
    """The same on a GPU, where all results are kept, and not drawn."""
    if type(out) is Tensor and not op.writes and not is_kept(out):
        return  # most operations: at no cost
    results = _results(op, args, kwargs, out)
    if results and not op.random and all(map(is_kept, results)):
        try:
            propagate(op, args, kwargs, tensors, out)
        except RuntimeError as error:
            if str(error) != "ZeroDivisionError":  # a GPU divides whole numbers by nothing, and gives anything
                raise
            invalidate(op.written(args, kwargs))
    else:
        invalidate(op.written(args, kwargs))


def propagate_view(func, args, kwargs, out) -> None:
    """A view of what has a shadow has a view of that."""
    values = getattr(args[0], SHADOW, None) if args else None
    if values is not None:
        attach(tensors_of([out], {}), tensors_of([func(values, *args[1:], **kwargs)], {}))


def propagate_copy(tensor: Tensor, copy: Tensor) -> None:
    """A copy to or from a GPU, of what is kept there. Call it untracked."""
    if is_kept(copy) and (known := values_of(tensor)) is not None:
        values = known.to(copy.dtype, copy=True)
        _mark([values], _any_stale([known]))
        attach([copy], [values])


def propagate_factory(op: Operation, args, options, out) -> None:
    """options: with the CPU as device."""
    if out.numel() <= LIMIT:
        shadow = op.func(*args, **options)
        attach([out], [shadow.zero_() if op.name in EMPTY else shadow])


def computed(op, args, kwargs, tensors, look=values_of):
    """What an operation gives, computed with values; NotImplemented where one is not known. look: values_of or known_of."""
    values = list(map(look, tensors))
    if any(value is None for value in values):
        return NotImplemented
    return _with(values, tensors, op.func, args, kwargs)


def attach(results, shadows) -> None:
    """Each of the results that is a shape has this shadow from now on."""
    for result, value in zip(results, shadows, strict=True):
        if _compat.is_really_meta(result):
            setattr(result, SHADOW, value)


def _with(values, tensors, func, args, kwargs):
    """func(*args, **kwargs) with `values` in the places of `tensors`."""
    instead = {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}

    def replaced(arg):
        if isinstance(arg, Tensor):
            return instead[id(arg)]
        if isinstance(arg, (list, tuple)):
            return type(arg)(map(replaced, arg))
        return arg

    kwargs = {name: replaced(value) for name, value in kwargs.items()}
    if isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == "meta":
        kwargs["device"] = torch.device("cpu")
    return func(*map(replaced, args), **kwargs)
