"""VIRTUALGPU_CROSSCHECK=1: what a dry run remembers of an operation is worked out again each time, and compared.

A dry run takes the shape of a result from an earlier call with "the same" arguments. What counts as the same is a key, and a key can
lack something: to Python True, 1 and 1+0j are equal, to PyTorch they give three types. The judges run with it on.
"""

from torch import Tensor

from virtualgpu import _compat


def compare(op, args, remembered, anew) -> None:
    """Raises RuntimeError where what was remembered differs from what the meta kernel gives now.

    op: the Operation. args: as the program gave them. remembered, anew: a tensor, None, or a tuple or list of these; of both, what an
    operation in place returns is the argument itself, or a shape in its place.
    """
    before, now = _parts(remembered), _parts(anew)
    brief = [any(part is arg for arg in args) for part in before]
    before, now = (list(map(_what, parts, brief)) for parts in (before, now))
    if before != now:
        raise RuntimeError(
            f"a dry run remembered {before} of {op.func} and finds {now}, for the arguments {tuple(map(_short, args))}: the key of "
            "what a dry run remembers (engine/dry.py) lacks what tells these calls apart. Please report it"
        )


def _parts(out) -> list:
    return [type(out), *out] if isinstance(out, (tuple, list)) else [out]


def _what(result, is_argument: bool):
    """All of a result that others can see; bytes of its storage, not only of what it shows of it."""
    if not isinstance(result, Tensor):
        return result
    shape = tuple(result.shape), result.stride(), result.dtype, result.layout
    if is_argument:
        return shape
    storage = result.untyped_storage()
    where = result.storage_offset(), storage.nbytes(), _compat.real_storage_device(storage).type
    return (*shape, *where, result.is_conj(), result.is_neg())


def _short(value):
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return tuple(map(_short, value)) if isinstance(value, (tuple, list)) else value
