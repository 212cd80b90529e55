"""Operations on shapes alone: what an operation gave for the same shapes before, or else PyTorch's meta kernel.

Remembering is what makes a dry run cheap: PyTorch's meta kernels are written in Python, and take ten times as long.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

from virtualgpu import _compat, environment
from virtualgpu.engine import meta_results, refused, sized, values
from virtualgpu.engine.allocation import reach
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.operations import Operation

# They decide over results, too
SETTINGS = torch.is_grad_enabled, torch.get_default_dtype, torch.is_inference_mode_enabled
SETTINGS += (torch.are_deterministic_algorithms_enabled,)
BY_TYPE = float, complex, torch.Generator  # their value decides over no shape, and a generator would be kept
# What makes quantized tensors
QUANTIZED = {"quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel", "_empty_affine_quantized"}
QUANTIZED |= {
    "_empty_per_channel_affine_quantized",
    "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
}
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
        """The result as a shape, or the value that is read."""
        out = self._run(op, args, kwargs, tensors, gpu)
        if op.name in CHECKS:
            _note_check(op, args, out)
        return out

    def _run(self, op: Operation, args, kwargs, tensors, gpu: GPU | None):
        """As a shape: what the same operation on the same shapes gave before, or else PyTorch's meta kernel."""
        if op.returns_value_to_host:
            value = values.read(op, args, kwargs, tensors)
            return self.placeholder_value(op, tensors) if value is NotImplemented else value
        if op.host_result is not None:
            return self.packed(op, args)
        if op.writes and len(tensors) > 1:
            refused.check_overlap(op, args, kwargs, tensors)
        key = [op, *[setting() for setting in SETTINGS]]
        try:
            _describe(args, key)
            _describe(kwargs.items(), key)
        except RuntimeError:  # no strides
            if any(isinstance(tensor, UninitializedTensorMixin) for tensor in tensors):  # a lazy module's: of no size
                args = [arg.as_subclass(Tensor) if isinstance(arg, UninitializedTensorMixin) else arg for arg in args]
                return self.run(op, args, kwargs, args[:1], gpu)
            raise _sparse(op) from None
        key = tuple(key)
        made = self.recipes.get(key)
        if made is not None:
            if self.crosscheck:
                with self.machine.untracked():
                    crosscheck(op, args, made(args), self._by_meta_kernel(op, args, kwargs, tensors))
            return made(args)
        with self.machine.untracked():
            refused.check(op, args, kwargs, tensors, gpu)
            try:
                out = self._by_meta_kernel(op, args, kwargs, tensors)
            except refused.ERRORS as error:
                raise refused.in_its_words(op, args, kwargs, tensors, gpu, error) from None
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
            out = meta_results.INSTEAD.get(op.func, op.func)(*shapes, **options)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"a dry run cannot tell what {op.name} returns: PyTorch has no kernel of it for shapes alone. "
                "Run this line outside dry_run()"
            ) from error
        out = meta_results.corrected(op, shapes, options, out)
        results = out if isinstance(out, (tuple, list)) else [out]
        if any(isinstance(t, torch.Tensor) and t.layout is not torch.strided for t in (*tensors, *results)):
            raise _sparse(op)
        return out

    def sized(self, op: Operation, args, kwargs, tensors):
        """A result as large as values say."""
        with self.machine.untracked():
            out = sized.result_of(op, args, kwargs, tensors)
            if out is NotImplemented and op.func is torch.ops.aten._ctc_loss.default:
                out = op.func(*_on_meta(args))  # its lengths are lists
        if out is NotImplemented:
            raise NotImplementedError(
                f"the shape of what {op.name} returns depends on values, which this dry run does not know. "
                "Run this line outside dry_run()"
            )
        return out

    def packed(self, op: Operation, args):
        """A packed sequence, or the padded one of it: as many rows as its lengths say. What C++ reads of them stays on the host with its
        numbers, as if it came from NumPy."""
        lengths = values.known_of(args[1])
        if lengths is None:
            raise NotImplementedError(
                "a packed sequence is made by its lengths, which this dry run does not know. Give the module the padded tensor"
            )
        with self.machine.untracked():
            return op.func(_on_meta(args[0]), lengths, *args[2:])

    def placeholder_value(self, op: Operation, tensors):
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
    steps = []
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
    if single:
        same, new = steps[0]
        return (lambda args: _empty(*new)) if same is None else (lambda args: args[same])
    kind = list if isinstance(out, list) else tuple
    return lambda args: kind(
        args[same] if same is not None else None if new is None else _empty(*new) for same, new in steps
    )


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
    before, now = _parts(remembered), _parts(anew)
    brief = [any(part is arg for arg in args) for part in before]
    before, now = (list(map(_properties, parts, brief)) for parts in (before, now))
    if before != now:
        raise RuntimeError(
            f"a dry run remembered {before} of {op.func} and finds {now}, for the arguments {tuple(map(_short, args))}: the key of "
            "what a dry run remembers (engine/dry.py) lacks what tells these calls apart. Please report it"
        )


def _parts(out) -> list:
    return [type(out), *out] if isinstance(out, (tuple, list)) else [out]


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


def _short(value):
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return tuple(map(_short, value)) if isinstance(value, (tuple, list)) else value
