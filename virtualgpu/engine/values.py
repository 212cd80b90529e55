"""Shadow values: small tensors keep their numbers in a dry run, so that what a program draws or counts on the host (where to crop an image,
in which order, which step this is), or measures and tells other ranks by way of a GPU, is a number and not nan.

All of the CPU's tensors keep theirs, up to LIMIT numbers. On a GPU, whole numbers and those of float64 do: counts and sizes. Of
all other types a GPU keeps what the host has made, up to SMALL bytes, and what comes of that by SIMPLE operations; a model's layers are
shapes alone, however small.

The tensor itself stays a shape, as all that is made in a dry run. Its storage has a shadow, a storage with the numbers, which all
views see. Where something without values is written to all of it, it has none any more; where to a part, that part is nan, or 0, and the shadow
counts as stale: no shape depends on it. Who reads something without values is told by which operation it came to be so: its storage's origin.

What came with its numbers (from before the dry run, from NumPy, from a file) keeps them in memory, which is its owner's: where something
without values is written to it, its storage is marked as stale until the dry run ends, and who reads it there gets nan.
"""

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from virtualgpu import _compat
from virtualgpu.engine import cuda_differences
from virtualgpu.engine.machine import dry_runs
from virtualgpu.engine.operations import EMPTY, RESIZING, Operation
from virtualgpu.engine.storage import PLAIN_TYPES, gpu_of, storage_of, tensors_of

ON_GPU = {**cuda_differences.HISTOGRAMS, **cuda_differences.WIDER}
SHADOW = "_virtual_shadow"  # of a shape's storage: a storage of the CPU, as large, with the numbers; None
ORIGIN = "_virtual_origin"  # of a storage: the operation whose result was the first without values; None: not known
# Not all numbers are known. Of a shadow: of which type the nan, or 0, is that stands there instead. Of memory that came with numbers: the
# epoch for which that holds
STALE = "_virtual_stale"
for attribute in (SHADOW, ORIGIN):
    setattr(torch.UntypedStorage, attribute, None)
# Each of these is known to be that as soon as one of its tensors is that everywhere
DECIDED = {"logical_or": True, "bitwise_or": True, "logical_and": False, "bitwise_and": False}
FILLED = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}  # whatever the tensor's numbers
FILLED |= {"empty_like", "new_empty", "new_empty_strided"}
LIMIT = 8192  # numbers in a tensor: a generator's state has 5056
COUNTS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64}
# of what a program counts on a GPU: a mean over all ranks goes by a number of samples in float64, too
SMALL = 1024  # bytes of a GPU's tensor of another type

# By which a GPU keeps numbers of those types, in all forms (in place, out=, of lists). What one of these reads as nan, is nan in its result
# fmt: off
NAN_PASSES = {
    "_to_copy", "alias_copy", "cat", "clone", "constant_pad_nd", "copy", "flip", "gather", "index", "index_select", "lift_fresh_copy",
    "repeat", "roll", "scatter", "select_scatter", "slice_scatter", "stack", "where",
    "abs", "add", "addcdiv", "addcmul", "amax", "amin", "aminmax", "ceil", "clamp", "clamp_max", "clamp_min", "cos", "cumsum", "div", "exp",
    "expm1", "floor", "floor_divide", "fmod", "lerp", "log", "log10", "log1p", "log2", "max", "maximum", "mean", "min", "minimum", "mul",
    "neg", "pow", "prod", "reciprocal", "remainder", "round", "rsqrt", "rsub", "sigmoid", "sin", "sqrt", "square", "std", "sub", "sum",
    "tanh", "true_divide", "trunc", "var", "var_mean",
}
SIMPLE = {
    *NAN_PASSES, *FILLED,
    "all", "any", "argmax", "argmin", "argsort", "eq", "fill", "ge", "gt", "index_put", "isfinite", "isinf", "isnan", "le",
    "linalg_vector_norm", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "median", "nan_to_num", "ne",
    "norm", "sign", "sort", "topk", "zero",
}
# fmt: on
MANY = 8  # tensors of an operation, of which none is named
RUNNING = ("running_mean", "running_var")  # which layers of batch_norm write to, whatever their schemas say


def is_kept(tensor: Tensor) -> bool:
    """Does this tensor on a GPU keep its numbers, where they are known?"""
    return tensor.dtype in COUNTS or tensor.nbytes <= SMALL


def values_of(tensor: Tensor) -> Tensor | None:
    """A small tensor on the CPU with the numbers of this one: a view of its shadow, or itself where it came with them (from NumPy, from
    a file). None: they are not known. Call it untracked."""
    if _compat.is_really_meta(tensor):
        storage = _storage(tensor)
        shadow = None if storage is None else getattr(storage, SHADOW)
        if shadow is None or shadow.nbytes() != storage.nbytes() or tensor.numel() > LIMIT:  # resized, or expanded
            return None
        return None if getattr(shadow, STALE, None) not in (None, tensor.dtype) else _seen(tensor, shadow)
    if tensor.numel() > LIMIT or gpu_of(tensor) is not None:
        return None
    return _nothing(tensor) if is_unknown(tensor) else tensor


def _storage(tensor: Tensor):
    """None where it is made of other tensors (DTensor and its kind), or of no size yet (a lazy module's)."""
    if type(tensor) not in PLAIN_TYPES and (hasattr(tensor, "__tensor_flatten__") or is_lazy(tensor)):
        return None
    return storage_of(tensor) if tensor.layout is torch.strided else None


def _seen(tensor: Tensor, shadow) -> Tensor | None:
    """The numbers of its shadow, as this tensor sees them."""
    values = _compat.empty_strided((0,), (1,), dtype=tensor.dtype, device="cpu")
    values.set_(shadow, tensor.storage_offset(), tensor.shape, tensor.stride())
    return None if tensor.is_neg() else values.conj() if tensor.is_conj() else values


def known_of(tensor: Tensor) -> Tensor | None:
    """The same, and None also where one of them is stale."""
    values = values_of(tensor)
    return None if values is None or is_stale(values.untyped_storage()) else values


def is_known(tensor: Tensor) -> bool:
    """Has it all of its numbers, or none that are asked for, since it is no shape?"""
    with _compat.without_dispatch():
        return not _compat.is_really_meta(tensor) or known_of(tensor) is not None


def is_stale(storage) -> bool:
    """Was something without values written to it, in a dry run that is still on?"""
    mark = getattr(storage, STALE, None)
    return mark is not None and (mark == dry_runs.epoch or isinstance(mark, torch.dtype))


def is_unknown(tensor: Tensor) -> bool:
    """Are the numbers in its memory not those that it would have? Whole numbers that are really there stay to be read (DDP's C++ reads
    its buckets from such a tensor, which came back from a broadcast)."""
    return is_stale(tensor.untyped_storage()) and (_has_nan(tensor) or gpu_of(tensor) is not None)


def _has_nan(tensor: Tensor) -> bool:
    """Has its type a nan, for what is not known?"""
    return tensor.is_floating_point() or tensor.is_complex()


def _nothing(tensor: Tensor) -> Tensor:
    """nan, or 0, in its shape. Call it untracked."""
    return _blank(_compat.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"))


def _blank(values: Tensor) -> Tensor:
    setattr(values.untyped_storage(), STALE, values.dtype)
    return values.fill_(float("nan") if _has_nan(values) else 0)


def _shadowed(tensor: Tensor) -> Tensor | None:
    """A new shadow, without values, as this tensor sees it. None: its storage is too large. Call it untracked."""
    storage, size = _storage(tensor), tensor.element_size()
    largest = LIMIT * size if tensor.dtype in COUNTS else SMALL
    if storage is None or not _compat.is_really_meta(tensor) or storage.nbytes() > largest or storage.nbytes() % size:
        return None
    whole = _compat.empty_strided((storage.nbytes() // size,), (1,), dtype=tensor.dtype, device="cpu")
    setattr(storage, SHADOW, _blank(whole).untyped_storage())
    return _seen(tensor, whole.untyped_storage())


def room_for(tensor: Tensor) -> Tensor:
    """Where others (another rank) write the numbers of a tensor that is kept, and `told` says so: in its shadow, or, where there is no room
    for one, where nobody reads them. Call it untracked."""
    values = values_of(tensor)
    values = _shadowed(tensor) if values is None else values
    return _nothing(tensor) if values is None else values


def told(tensors, unknown_by: str | None = None) -> None:
    """All that these tensors have was written to their room. unknown_by: it has no values, and that by this operation."""
    if unknown_by is not None:
        invalidate(tensors, unknown_by)
        return
    for tensor in tensors:
        storage = _storage(tensor)
        if storage is not None and _fills(tensor):
            shadow = storage if getattr(storage, SHADOW) is None else getattr(storage, SHADOW)
            if getattr(shadow, STALE, None) in (dry_runs.epoch, tensor.dtype):
                setattr(shadow, STALE, None)
                setattr(storage, ORIGIN, None)


def know(tensor: Tensor, value) -> None:
    """All numbers of a shape are this one. Call it untracked."""
    room_for(tensor).fill_(value)
    told([tensor])


def _fills(tensor: Tensor) -> bool:
    """Is it all that its storage has?"""
    storage = _storage(tensor)
    if storage is None or tensor.nbytes != storage.nbytes():
        return False
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def written(op: Operation, args, kwargs, tensors):
    """In place, on what came with its numbers (from NumPy, say): carried out on them, where all that goes in is known. Otherwise they
    stay as they are, and count as stale; whole numbers are carried out all the same. NotImplemented for what is a shape."""
    targets = op.written(args, kwargs)
    if op.returns not in ([], [0]) or any(map(_compat.is_really_meta, targets)):
        return NotImplemented
    values = [values_of(tensor) if _compat.is_really_meta(tensor) else tensor for tensor in tensors]
    read = values[1:] if op.write_only or op.copies else values
    stale = any(value is None or is_stale(value.untyped_storage()) for value in read)
    if not (stale and any(map(_has_nan, targets))) and all(value is not None for value in values):
        _with(tensors, values, op.func, args, kwargs)
    if stale:
        invalidate(targets, origin_of(tensors) or op.name)
    elif op.write_only or op.copies:
        told(targets)
    return args[0] if op.returns else None


def invalidate(tensors, origin: str | None = None) -> None:
    """Something without values was written to them, by this operation. A shadow of which that is all is forgotten; a part of one is nan, or
    0, from now on. What came with its numbers keeps them, and is marked."""
    for tensor in tensors:
        storage = _storage(tensor)
        if not _compat.is_really_meta(tensor):
            setattr(tensor.untyped_storage(), STALE, dry_runs.epoch)
        elif storage is None or getattr(storage, SHADOW) is None:
            continue
        elif _fills(tensor) or (values := values_of(tensor)) is None:
            setattr(storage, SHADOW, None)
        else:
            _blank(values)
        name([tensor], origin)


def origin_of(tensors) -> str | None:
    """The operation whose result was the first without values, of what made one of these."""
    origins = (getattr(_storage(tensor), ORIGIN, None) for tensor in tensors)
    return next((origin for origin in origins if origin is not None), None)


def why_unknown(tensors) -> str:
    """Why one of these has no values, as far as that is known."""
    if (origin := origin_of(tensors)) is not None:
        return f"the result of {origin} was not computed"
    storages = [storage for storage in map(_storage, tensors) if storage is not None]
    return "larger tensors keep no numbers" if any(storage.nbytes() > SMALL for storage in storages) else ""


def name(tensors, origin: str | None) -> None:
    """By which operation these tensors have no values."""
    for tensor in tensors:
        if (storage := _storage(tensor)) is not None:
            setattr(storage, ORIGIN, origin)


def propagate(op: Operation, args, kwargs, tensors, out) -> None:
    """After an operation on the CPU has given shapes: the same with values, where all have some and are small."""
    targets = op.written(args, kwargs) if op.writes else []
    results = tensors_of([out], {}) if op.returns else targets
    if op.name in RESIZING:
        return  # what has another size has no values any more
    if any(result.numel() > LIMIT for result in results):
        _forget(op, args, kwargs, tensors, results, targets)
        return
    # what it writes to whatever was there: it does not read it, unless it is given it for that as well
    overwrites = op.write_only or op.copies or op.resizes
    anew = [target for target in targets if overwrites and sum(tensor is target for tensor in tensors) == 1]
    inputs = [tensor for tensor in tensors if not _is_among(tensor, anew)] if anew else tensors
    filled = op.name in FILLED and len(tensors) == 1
    known = list(map(_nothing, results)) if filled else list(map(values_of, inputs))
    stale = [] if filled else [value for value in known if value is None or is_stale(value.untyped_storage())]
    decided = _decided(op, tensors, results) if stale else None
    if decided is not None or any(value is None for value in stale):
        _forget(op, args, kwargs, tensors, results, targets)
        if decided is not None:
            know(results[0], decided)
    elif any(map(_compat.is_really_meta, results)):
        outputs = _with([*anew, *inputs], [*map(room_for, anew), *known], ON_GPU.get(op.func, op.func), args, kwargs)
        if op.returns:
            outputs = tensors_of([outputs], {})
            attach(results, [part.zero_() for part in outputs] if op.name in EMPTY else outputs, tensors)
        if stale:
            _pass_on(op, tensors, stale, results)
        else:
            told(anew)
    else:
        invalidate(targets, op.name)  # what a GPU held before the dry run


def _is_among(one, others) -> bool:
    return any(one is other for other in others)


def _pass_on(op: Operation, tensors, stale, results) -> None:
    """What comes of stale values: where an operation makes nan of nan, as much is known as is none; nothing of all else."""
    origin = origin_of(tensors) or op.name
    nan = _simple_name(op) in NAN_PASSES and all(map(_has_nan, stale))
    for result in results:
        if nan and _has_nan(result) and (values := values_of(result)) is not None:
            if bool(values.isnan().any()):
                setattr(values.untyped_storage(), STALE, values.dtype)
                name([result], origin)
        else:
            invalidate([result], origin)


def _simple_name(op: Operation) -> str:
    return op.name.removeprefix("_foreach_").rstrip("_")


def _forget(op: Operation, args, kwargs, tensors, results, targets) -> None:
    """What an operation makes has no values."""
    if op.func.namespace != "aten" and not op.extension:  # not all of their schemas say what they write to
        targets = list(filter(_compat.is_really_meta, tensors))
    elif "batch_norm" in op.name:
        named = {argument.name: value for argument, value in zip(_compat.schema(op.func).arguments, args, strict=False)}
        targets = targets + tensors_of([(named | kwargs).get(figure) for figure in RUNNING], {})
    many = len(tensors) > MANY or len(results) > MANY
    origin = op.name if many or not (targets or any(map(is_kept, results))) else origin_of(tensors) or op.name
    invalidate(targets, origin)
    if not many:
        name(filter(is_kept, results), origin)


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
    targets = op.written(args, kwargs) if op.writes else []
    results = tensors_of([out], {}) if op.returns else targets
    kept = results and not op.random and op.func.namespace == "aten" and all(map(is_kept, results))
    if kept and (_simple_name(op) in SIMPLE or all(result.dtype in COUNTS for result in results)):
        try:
            propagate(op, args, kwargs, tensors, out)
            return
        except RuntimeError as error:  # a GPU divides whole numbers by nothing, and gives anything
            if str(error) != "ZeroDivisionError" and "not implemented" not in str(error):
                raise
    _forget(op, args, kwargs, tensors, results, targets)


def propagate_copy(tensor: Tensor, copy: Tensor) -> None:
    """A copy to or from a GPU, of what is kept there. Call it untracked."""
    if is_kept(copy):
        values = values_of(tensor)
        if values is not None:
            attach([copy], [values.to(copy.dtype, copy=True)])
        if values is None or is_stale(values.untyped_storage()):
            origin = origin_of([tensor])
            if values is None or not (_has_nan(tensor) and _has_nan(copy)):
                invalidate([copy])
            else:
                setattr(getattr(_storage(copy), SHADOW), STALE, copy.dtype)
            name([copy], origin)


def propagate_factory(op: Operation, args, options, out) -> None:
    """After a factory has given a shape: its numbers, if they are few. options: with the CPU as device."""
    if out.numel() <= LIMIT:
        made = op.func(*args, **options)
        attach([out], [made.zero_() if op.name in EMPTY else made])


def computed(op: Operation, args, kwargs, tensors, look=values_of):
    """What an operation gives, computed with values; NotImplemented where one is not known. look: values_of or known_of."""
    values = list(map(look, tensors))
    if any(value is None for value in values):
        return NotImplemented
    return _with(tensors, values, op.func, args, kwargs)


def read(op: Operation, args, kwargs, tensors):
    """The value that the host reads; NotImplemented where it comes of something without values."""
    value = computed(op, args, kwargs, tensors)
    if value is NotImplemented or (op.name == "_local_scalar_dense" and value == value and _has_nan(tensors[0])):
        return value
    return NotImplemented if any(lacks_some(values_of(tensor)) for tensor in tensors) else value


def lacks_some(values: Tensor) -> bool:
    """Are some of these numbers nan, or 0, because they are not known?"""
    if not isinstance(getattr(values.untyped_storage(), STALE, None), torch.dtype):
        return False
    return not _has_nan(values) or bool(values.isnan().any())


def attach(results, made, tensors=()) -> None:
    """Each of the results that is a new shape has these numbers. tensors: what the operation was given."""
    given = list(map(_storage, tensors))
    shadows = [storage if getattr(storage, SHADOW, None) is None else getattr(storage, SHADOW) for storage in given]
    for result, values in zip(results, made, strict=True):
        storage, own = _storage(result), values.untyped_storage()
        if not _compat.is_really_meta(result) or storage is None or _is_among(storage, given):
            continue
        if _is_among(own, shadows) or not _lie_alike(result, values):
            values = _nothing(result).copy_(values)
            own = values.untyped_storage()
            setattr(own, STALE, None)
        setattr(storage, SHADOW, own)


def rebuilt(make, args, numbers: Tensor) -> Tensor:
    """make(*args), a shape, with these numbers."""
    made = make(*args)
    if getattr(_storage(made), SHADOW, None) is None:  # or it has the memory of the other one
        with _compat.without_dispatch():
            attach([made], [numbers])
    return made


def _lie_alike(result: Tensor, values: Tensor) -> bool:
    """In storages of one size, at the same places?"""
    if result.dtype is not values.dtype or values.is_conj() or values.is_neg():
        return False
    sizes = result.untyped_storage().nbytes() == values.untyped_storage().nbytes()
    return sizes and result.stride() == values.stride() and result.storage_offset() == values.storage_offset()


def _with(tensors, values, func, args, kwargs):
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
