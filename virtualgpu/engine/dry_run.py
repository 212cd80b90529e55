"""Operations on shapes alone, in a dry run: PyTorch's meta kernels, and what they lack, say wrong, or could know from values."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

from virtualgpu import _compat, environment
from virtualgpu.engine import cuda_differences, dry_checks, half_precision, values
from virtualgpu.engine.host_waits import MASKS
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.operations import Operation
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


# -- Kernels that PyTorch lacks for shapes alone, without which a dry run could not carry the operation out: what they return has no values.
#
# `lacking` registers them.


def _like_second(gradient, tensor, *rest, **options):
    """A gradient has the shape of what it is the gradient of."""
    return torch.empty_like(tensor)


def _close_as_second(gradient, tensor, *rest, **options):
    """The same, however that lies."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _geqrf(matrix):
    return torch.empty_like(matrix), matrix.new_empty((*matrix.shape[:-2], min(matrix.shape[-2:])))


def _like_first(tensor, *rest, **options):
    return torch.empty_like(tensor)


def _with_mask(tensor, *rest, **options):
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _in_place(*args, **options) -> None:
    """All that it returns is in what it was given."""


FUSED = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
KERNELS = {
    **dict.fromkeys((*FUSED, *(f"{name}.tensor_lr" for name in FUSED)), _in_place),
    "_transformer_encoder_layer_fwd": _like_first,  # PyTorch 2.11
    "mish_backward": _like_second,
    "multi_margin_loss_backward": _like_second,
    "multilabel_margin_loss_backward": _like_second,
    "fractional_max_pool3d_backward": _like_second,
    "_ctc_loss_backward": _close_as_second,
    "geqrf": _geqrf,
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
}


# -- What an operation returns in a dry run, where PyTorch's meta kernel says something else than its kernels do: a layout, a type, a size, or
# how large the storage behind a result is.


def corrected(op, args, kwargs, out):
    """The results of the meta kernel for these shapes, as the kernels give them. Call it untracked."""
    correct = CORRECTIONS.get(op.func)
    return out if correct is None else correct(args, kwargs, out)


def _convolved(first):
    def convolved(args, kwargs, out):
        """Channels come last in what a convolution returns where they do in its input or weight; the meta kernels do not heed it."""
        formats = {_compat.suggest_memory_format(tensor) for tensor in args[first : first + 2]}
        last = formats & {torch.channels_last, torch.channels_last_3d}
        layout = last.pop() if last else torch.contiguous_format

        def laid_out(tensor):
            if tensor is None or tensor.dim() not in (4, 5):
                return tensor
            return _compat.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=layout)

        return laid_out(out) if isinstance(out, torch.Tensor) else tuple(map(laid_out, out))

    return convolved


def _within(numel: int, out):
    """This result at the beginning of memory of so many numbers."""
    memory = _compat.empty_strided((numel,), (1,), dtype=out.dtype, device="meta")
    return memory.as_strided(out.shape, out.stride())


def _folded(args, kwargs, out):
    """The kernel makes it as large as its input and then gives it its shape; memory that is left over stays (cuda/Col2Im.cu)."""
    return _within(args[0].numel(), out) if args[0].numel() > out.numel() else out


def _loss(reduction_at: int):
    def loss(args, kwargs, out):
        """The loss of each number is worked out in the memory of the result, which is then one number (Loss.cpp, cuda/Loss.cu)."""
        reduction = args[reduction_at] if len(args) > reduction_at else kwargs.get("reduction", MEAN)
        numel = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        return _within(numel, out) if reduction != NONE and numel > 1 else out

    return loss


def _like_input(args, kwargs, out):
    return _as_type(args[0], out)


def _soft_margin(args, kwargs, out):
    """Of the input's type, whatever the target's."""
    return _loss(2)(args, kwargs, _as_type(args[0], out))


def _loss_backward(args, kwargs, out):
    return _as_type(args[1], out)


def _as_type(tensor, out):
    if out.dtype is tensor.dtype:
        return out
    return _compat.empty_strided(out.shape, out.stride(), dtype=tensor.dtype, device="meta")


def _contiguous(args, kwargs, out):
    return out if out.is_contiguous() else out.contiguous()


def _batch_norm(args, kwargs, out):
    """Nothing is kept of running figures that are used as they are."""
    if args[5]:
        return out
    return out[0], *(figure.new_empty(0) for figure in out[1:])


def _group_norm(args, kwargs, out):
    """Figures are of single precision beside weights that are (param_scalar_type in cpu/mixed_data_type.h, which CUDA asks, too)."""
    mixed = next((weight for weight in args[1:3] if weight is not None and weight.dtype is not args[0].dtype), out[1])
    return out[0], *(_as_type(mixed, figure) for figure in out[1:])


def _batch_norm_backward(args, kwargs, out):
    """As layouts has it."""
    first, *others = _norm_backward(args, kwargs, out)
    return first if first is None or args[7] else first.contiguous(), *others


def _norm_backward(args, kwargs, out):
    """The gradient has its input's type and layout."""
    first = out[0]
    return None if first is None else torch.empty_like(args[1]), *out[1:]


def _nll_loss(tensor, target, *rest):
    """Its kernel for shapes wants int64, or calls it gather's."""
    return aten.nll_loss_forward.default(tensor, target.long(), *rest)


def _masked_fill(tensor, mask, value):
    """The value may be one number of the host's."""
    return aten.masked_fill.Tensor(tensor, mask, torch.empty_like(value, device="meta"))


def _where(condition, *tensors):
    """A mask may be of uint8."""
    return aten.where.self(condition.bool(), *tensors)


def _as_first(tensor, *rest):
    return torch.empty_like(tensor)


aten = torch.ops.aten
# what is asked for a shape in place of the operation
INSTEAD = {
    **half_precision.FFT,
    **cuda_differences.WIDER,
    aten.nll_loss_forward.default: _nll_loss,
    aten.masked_fill.Tensor: _masked_fill,
    aten.where.self: _where,
    # draws and their derivatives, one for each number of the first argument
    aten._sample_dirichlet.default: _as_first,
    aten._dirichlet_grad.default: _as_first,
    aten._standard_gamma.default: _as_first,
    aten._standard_gamma_grad.default: _as_first,
    aten.poisson.default: _as_first,
    aten.binomial.default: _as_first,
}
NONE, MEAN = 0, 1
CORRECTIONS = {
    **dict.fromkeys(cuda_differences.FUNCS, _contiguous),
    aten.convolution.default: _convolved(0),
    aten._convolution.default: _convolved(0),
    aten.convolution_backward.default: _convolved(1),
    aten.col2im.default: _folded,
    aten.mse_loss.default: _loss(2),
    aten.smooth_l1_loss.default: _loss(2),
    aten.binary_cross_entropy.default: _loss(3),
    aten.huber_loss.default: _like_input,
    aten.soft_margin_loss.default: _soft_margin,
    aten.mse_loss_backward.default: _loss_backward,
    aten.smooth_l1_loss_backward.default: _loss_backward,
    aten.soft_margin_loss_backward.default: _loss_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _norm_backward,
}


# -- Operations on shapes alone: what an operation gave for the same shapes before, or else PyTorch's meta kernel.
#
# Remembering is what makes a dry run cheap: PyTorch's meta kernels are written in Python, and take ten times as long.


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
            dry_checks.check_overlap(op, args, kwargs, tensors)
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
            out = INSTEAD.get(op.func, op.func)(*shapes, **options)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"a dry run cannot tell what {op.name} returns: PyTorch has no kernel of it for shapes alone. "
                "Run this line outside dry_run()"
            ) from error
        out = corrected(op, shapes, options, out)
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
