"""Operations on shapes alone, in a dry run: by PyTorch's meta kernels, or as remembered; and what a program puts on meta itself."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from virtualgpu import _compat, environment
from virtualgpu.engine import dry_checks, values
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.meta_kernels import by_meta_kernel
from virtualgpu.engine.operations import MASKS, Operation
from virtualgpu.engine.storage import reach, storage_of
from virtualgpu.engine.values import attach, computed, known_of
from virtualgpu.errors import no_data

# -- Results whose shape depends on values, as a dry run has them: x[mask], nonzero, unique, where the numbers are known (`values`).


def result_of(op, args, kwargs, tensors):
    """A result whose shape depends on values; NotImplemented where those are not known. Call it untracked."""
    result = computed(op, args, kwargs, tensors, known_of)
    if result is NotImplemented:
        return result if op.writes else _masked(op, args)
    if op.writes:  # out=...: computed into its shadow
        (out,) = op.written(args, kwargs)
        return out.resize_(result.shape).as_strided_(result.shape, result.stride())
    return shaped(result)


def _masked(op, args):
    """Of x[mask], the mask alone has to be known."""
    if op.name == "masked_select" and (mask := known_of(args[1])) is not None:
        count = mask.expand(torch.broadcast_shapes(args[0].shape, mask.shape)).sum()
        return _compat.empty_strided((int(count),), (1,), dtype=args[0].dtype, device="meta")
    return _picked(*args) if op.indexes else NotImplemented


def _picked(x: Tensor, indices: list):
    """The shape of x[indices], masks among them."""
    places = []
    for index in indices:
        if index is None or index.dtype not in MASKS:
            places.append(index)
        elif (known := known_of(index)) is None or not known.dim():
            return NotImplemented
        else:
            places += known.nonzero().unbind(1)
    if not _compat.is_really_meta(x):
        x = _compat.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.ops.aten.index(x, places)


def shaped(result):
    """A result with values as a dry run has it: a shape with a shadow."""
    if not isinstance(result, Tensor):
        return type(result)(map(shaped, result))
    out = _compat.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    attach([out], [result])
    return out


# -- What a program itself puts on meta in a dry run, where every tensor without a GPU is really there and passes for the CPU's.
#
# Programs ask `is_meta` before they give a parameter memory; FSDP2 refuses to train what was never given any.


torch.UntypedStorage._virtual_on_meta = False  # unless it says otherwise


class Marks:
    """Has any tensor been marked? Until then nobody needs to look."""

    some = False


def put_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Mark it, by its storage; the same tensor."""
    storage_of(tensor)._virtual_on_meta = Marks.some = True
    return tensor


def is_on_meta(tensor: torch.Tensor) -> bool:
    """Has the program put it there?"""
    return Marks.some and _compat.is_really_meta(tensor) and getattr(storage_of(tensor), "_virtual_on_meta", False)


def check(op: Operation, args, tensors) -> None:
    """Raises PyTorch's error where an operation needs numbers of a tensor on meta."""
    if op.returns_value_to_host and any(map(is_on_meta, tensors)):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")
    if op.copies and len(tensors) > 1 and is_on_meta(args[1]) and not is_on_meta(args[0]):
        raise no_data(made_in_dry_run=False)


def propagate(op: Operation, tensors, out) -> None:
    """What comes of tensors on meta is there, too."""
    if op.new and any(map(is_on_meta, tensors)):
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, torch.Tensor) and _compat.is_really_meta(made):
                put_on_meta(made)


# -- Operations on shapes alone: what an operation gave for the same shapes before, or else PyTorch's meta kernel.
#
# Remembering is what makes a dry run cheap: PyTorch's meta kernels are written in Python, and take ten times as long.


# They decide over results, too
SETTINGS = [torch.is_grad_enabled, torch.get_default_dtype, torch.is_inference_mode_enabled]
SETTINGS += [torch.are_deterministic_algorithms_enabled]
BY_TYPE = float, complex, torch.Generator  # their value decides over no shape, and a generator would be kept
# What makes quantized tensors
QUANTIZED = {"quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel", "_empty_affine_quantized"}
QUANTIZED |= {"_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor"}
QUANTIZED |= {"_empty_per_channel_affine_quantized"}
TAKEN_AS_TRUE = "_virtualgpu_taken_as_true"  # a tensor's attribute
COUNTED = "_virtualgpu_counted"  # of a sum: how many truths it adds up
CHECKS = {"all", "_is_all_true", "sum", "eq"}  # what a program asks of its numbers before it goes on
MAX_RECIPES = 20_000  # an operation and the shapes it meets; beyond that, start again


class DryRun:
    """Carries out operations without numbers. The recipes are shared by all threads, and outlive a call of gpus()."""

    recipes: ClassVar[dict] = {}

    def __init__(self, machine: Machine):
        self.machine = machine
        self.crosscheck = environment.crosscheck()

    def run(self, op: Operation, args, kwargs, tensors, gpu: GPU | None):
        """The value that is read, or a shape: what the same operation on the same shapes gave before, or else PyTorch's meta kernel."""
        if op.returns_value_to_host:
            value = values.read(op, args, kwargs, tensors)
            return self._placeholder_value(op, tensors) if value is NotImplemented else value
        if op.host_result is not None:
            return self._packed(op, args)
        out = self._shape(op, args, kwargs, tensors, gpu)
        if op.name in CHECKS:
            _note_check(op, args, out)
        return out

    def _shape(self, op: Operation, args, kwargs, tensors, gpu: GPU | None):
        if op.writes and len(tensors) > 1:
            dry_checks.check_overlap(op, args, kwargs, tensors)
        described = [op, *[setting() for setting in SETTINGS]]
        try:
            _describe(args, described)
            _describe(kwargs.items(), described)
        except RuntimeError:  # no strides
            if any(map(is_lazy, tensors)):  # a lazy module's: of no size
                args = [arg.as_subclass(Tensor) if is_lazy(arg) else arg for arg in args]
                return self._shape(op, args, kwargs, args[:1], gpu)
            raise _sparse(op) from None
        key = tuple(described)
        cached = self.recipes.get(key)
        if cached is not None:
            if self.crosscheck:
                with self.machine.untracked():
                    crosscheck(op, args, cached(args), self._by_meta_kernel(op, args, kwargs, tensors))
            return cached(args)
        with self.machine.untracked():
            dry_checks.check(op, args, kwargs, tensors, gpu)
            try:
                out = self._by_meta_kernel(op, args, kwargs, tensors)
            except dry_checks.ERRORS as error:
                raise dry_checks.in_its_words(op, args, kwargs, tensors, gpu, error) from None
            # numbers are not in the key: that of arange's steps, say, decides over a shape
            again = _recipe(op, out, tensors) if op.cacheable and (tensors or not op.kernel) else None
        if again is not None:
            if len(self.recipes) > MAX_RECIPES:
                self.recipes.clear()
            self.recipes[key] = again
            return again(args)
        same = op.returns[0] if len(op.returns) == 1 else None
        return out if same is None or same >= len(args) else args[same]

    def _by_meta_kernel(self, op: Operation, args, kwargs, tensors):
        """What PyTorch's meta kernel gives for these arguments. Call it untracked."""
        if op.name in QUANTIZED or any(tensor.is_quantized for tensor in tensors):
            raise NotImplementedError(
                f"quantized tensors are not modelled in a dry run ({op.name}). Run this line outside dry_run()"
            )
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not op.name.endswith("_like")
        ):  # its result has no history
            shapes, options = _on_meta(args), _on_meta(kwargs)
        if "device" in options:
            options["device"] = torch.device("meta")
        try:
            out = by_meta_kernel(op.func, shapes, options)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"a dry run cannot tell what {op.name} returns: PyTorch has no kernel of it for shapes alone. "
                "Run this line outside dry_run()"
            ) from error
        results = out if isinstance(out, (tuple, list)) else [out]
        if any(isinstance(t, torch.Tensor) and t.layout is not torch.strided for t in (*tensors, *results)):
            raise _sparse(op)
        return out

    def sized(self, op: Operation, args, kwargs, tensors):
        """A result as large as values say."""
        with self.machine.untracked():
            out = result_of(op, args, kwargs, tensors)
            if out is NotImplemented and op.func is torch.ops.aten._ctc_loss.default:
                out = op.func(*_on_meta(args))  # its lengths are lists
        if out is NotImplemented:
            raise NotImplementedError(
                f"the shape of what {op.name} returns depends on values, which this dry run does not know. "
                "Run this line outside dry_run()"
            )
        return out

    def _packed(self, op: Operation, args):
        """A packed sequence, or the padded one of it: as many rows as its lengths say. What C++ reads of them stays on the host with its
        numbers, as if it came from NumPy."""
        lengths = values.known_of(args[1])
        if lengths is None:
            raise NotImplementedError(
                "a packed sequence is made by its lengths, which this dry run does not know. Give the module the padded tensor"
            )
        with self.machine.untracked():
            return op.func(_on_meta(args[0]), lengths, *args[2:])

    def _placeholder_value(self, op: Operation, tensors):
        """What reading a value gives: nan, 0 or False by dtype; False where an operation answers a question (equal), True where all()
        does: checks of numbers hold, those of torch.distributions, say."""
        self.machine.warn_of_nan(values.why_unknown(tensors))
        if op.name != "_local_scalar_dense":
            return op.name == "allclose" and _compat.graph_task() != -1  # a derivative asks whether it is defined
        dtype = tensors[0].dtype
        if dtype is torch.bool:
            return getattr(tensors[0], TAKEN_AS_TRUE, False)
        return complex("nan") if dtype.is_complex else float("nan") if dtype.is_floating_point else 0


def _note_check(op: Operation, args, out) -> None:
    """all() holds, also where it is asked by comparing a sum of truths with their number (fast_all of transformers, of a padding mask)."""
    if op.name == "sum":
        if args[0].dtype is torch.bool and not out.dim():
            setattr(out, COUNTED, args[0].numel())
    elif op.name != "eq" or (isinstance(args[1], int) and args[1] == getattr(args[0], COUNTED, None)):
        setattr(out, TAKEN_AS_TRUE, True)


def _sparse(op: Operation) -> NotImplementedError:
    return NotImplementedError(
        f"sparse tensors are not modelled in a dry run ({op.name}). Run this line outside dry_run()"
    )


_has_no_numbers = _compat.is_really_meta  # whatever the patched is_meta says


def _describe(values, key: list) -> None:
    """What of the arguments decides over the result's shape: add it to the key."""
    for value in values:
        if isinstance(value, Tensor):
            key += (value.dtype, value.shape, value.stride(), _has_no_numbers(value))
        elif isinstance(value, (list, tuple)):
            key.append(len(value))
            _describe(value, key)
        elif isinstance(value, BY_TYPE):
            key.append(type(value))
        else:
            key += (type(value), value)  # True, 1 and 1+0j are equal, and give three types


def _fills_its_storage(tensor) -> bool:
    return tensor.untyped_storage().nbytes() == (reach(tensor) if tensor.numel() else 0) * tensor.element_size()


def _recipe(op: Operation, out, tensors):
    """A function that makes `out` again, from other arguments of the same shapes; None where it cannot."""
    if out is None:
        return lambda args: None
    if not isinstance(out, (torch.Tensor, tuple, list)):
        return None  # it answers a question (do these two have one size?)
    single = isinstance(out, torch.Tensor)
    known = {_compat.address(tensor.untyped_storage()) for tensor in tensors}
    steps: list[tuple[int | None, tuple | None]] = []  # of each result: which argument it is, or its shape
    for index, result in enumerate([out] if single else out):
        same = op.returns[index] if index < len(op.returns) else None
        if same is not None:
            steps.append((same, None))
        elif result is None:
            steps.append((None, None))
        elif (
            not isinstance(result, torch.Tensor)
            or _compat.address(result.untyped_storage()) in known
            or result.device.type != "meta"
            or not _fills_its_storage(result)
        ):
            return None
        else:
            known.add(_compat.address(result.untyped_storage()))
            steps.append((None, (tuple(result.shape), result.stride(), result.dtype)))

    def remake(args, same: int | None, new: tuple | None):
        return args[same] if same is not None else None if new is None else _empty(*new)

    if single:
        same, new = steps[0]
        return (lambda args: args[same]) if new is None else (lambda args: _empty(*new))
    kind = list if isinstance(out, list) else tuple
    return lambda args: kind(remake(args, *step) for step in steps)


def _empty(shape, stride, dtype) -> torch.Tensor:
    return _compat.empty_strided(shape, stride, dtype=dtype, device="meta")


def _on_meta(value):
    """Tensors with numbers become shapes, where a dry run meets them."""
    if isinstance(value, torch.Tensor):
        if not value.dim() or _has_no_numbers(value):
            return value
        if value.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"a tensor of shape {tuple(value.shape)} that wants gradients was made outside dry_run(), or came from a file. "
                "Make the model inside, too, and move it to its device before you use it"
            )
        return _empty(value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_meta, value))
    if isinstance(value, dict):
        return {name: _on_meta(item) for name, item in value.items()}
    return value


def crosscheck(op, args, remembered, anew) -> None:
    """VIRTUALGPU_CROSSCHECK=1: what counts as the same call is a key, and a key can lack something. Raises RuntimeError where what was
    remembered differs from what the meta kernel gives now. Of both, what an operation in place returns may be the argument itself.
    """
    before, now = ([out] if isinstance(out, Tensor) or out is None else list(out) for out in (remembered, anew))
    of_arguments = [any(part is arg for arg in args) for part in before]
    before, now = (list(map(_properties, parts, of_arguments)) for parts in (before, now))
    if before != now or type(remembered) is not type(anew):
        raise RuntimeError(
            f"a dry run remembered {before} of {op.func} and finds {now}: the key of what a dry run remembers (engine/dry_run.py) lacks what "
            "tells these calls apart. Please report it"
        )


def _properties(result, is_argument: bool):
    """All of a result that others can see; bytes of its storage, not only of what it shows of it."""
    if not isinstance(result, Tensor):
        return result
    shape = tuple(result.shape), result.stride(), result.dtype, result.layout
    if is_argument:
        return shape
    storage = result.untyped_storage()
    where = result.storage_offset(), storage.nbytes(), _compat.real_storage_device(storage).type
    return (*shape, *where, result.is_conj(), result.is_neg())
