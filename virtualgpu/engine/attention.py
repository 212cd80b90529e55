"""Attention as a GPU has it: which kernel scaled_dot_product_attention takes, its memory, and its random numbers."""

import functools
import os
import warnings
from typing import NamedTuple

import torch
from torch.backends import cuda as settings
from torch.nn.attention import SDPBackend

from virtualgpu import _compat
from virtualgpu.engine import cuda_differences, rng
from virtualgpu.engine.cuda_differences import HALVES
from virtualgpu.engine.eager import require_room
from virtualgpu.engine.placement import wrong_device
from virtualgpu.engine.storage import Allocation, gpu_of
from virtualgpu.engine.timing import Kernel
from virtualgpu.hardware.specs import Spec
from virtualgpu.timing.attention import fused, fused_backward

# -- Which kernel scaled_dot_product_attention takes on a card: flash, memory-efficient, cuDNN's, or plain operations ("math").
#
# PyTorch asks one after the other, in an order that `torch.nn.attention.sdpa_kernel` may set, and takes the first that may run: each is
# a list of conditions. They are those of aten/src/ATen/native/transformers/sdp_utils_cpp.h and cuda/sdp_utils.cpp (PyTorch 2.11 to 2.15),
# for dense tensors.


FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
NAMES = {EFFICIENT: "Memory efficient kernel", FLASH: "Flash attention kernel", CUDNN: "cuDNN attention kernel"}
ENABLED = {
    FLASH: settings.flash_sdp_enabled,
    EFFICIENT: settings.mem_efficient_sdp_enabled,
    CUDNN: settings.cudnn_sdp_enabled,
}
NEWEST = (12, 1)  # the last capability that the fused kernels are built for


class Params(NamedTuple):
    """What is asked; the names are those of torch.backends.cuda.SDPAParams.

    query [batch, heads, L, E], key [batch, heads or a divisor, S, E], value [batch, heads as key, S, Ev]; attn_mask broadcasts to
    [batch, heads, L, S].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool

    @classmethod
    def of(cls, params) -> "Params":
        """From torch.backends.cuda.SDPAParams."""
        return cls(*(getattr(params, name) for name in cls._fields))


def choose(params: Params, spec: Spec) -> SDPBackend:
    """The kernel that PyTorch takes on this card. Raises its RuntimeError where none of those that are enabled may run."""
    for backend in _order(spec):
        if backend == MATH:
            if settings.math_sdp_enabled():
                return MATH
        elif backend in NAMES and why_not(backend, params, spec) is None:
            return backend
    for backend, name in NAMES.items():
        warnings.warn(f"{name} not used because: {why_not(backend, params, spec)}", stacklevel=3)
    raise RuntimeError("No available kernel. Aborting execution.")


def why_not(backend: SDPBackend, params: Params, spec: Spec) -> str | None:
    """The first condition of this kernel that does not hold; None: it may run."""
    if not ENABLED[backend]():
        return f"{backend.name} has been runtime disabled."
    q, k, v = params[:3]
    if not q.dim() == k.dim() == v.dim() == 4:
        return f"query, key and value must be 4 dimensional, and have {q.dim()}, {k.dim()} and {v.dim()} dimensions."
    own = {FLASH: _why_not_flash, EFFICIENT: _why_not_efficient, CUDNN: _why_not_cudnn}[backend]
    return own(params, spec) or _why_not_dense(params, backend)


def _order(spec: Spec) -> list[SDPBackend]:
    """cuDNN's first on Hopper and data-center Blackwell, unless somebody chose an order (check_prefer_cudnn_attention)."""
    order = _compat.attention_priority()
    preferred = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1" and spec.capability[0] in (9, 10)
    if preferred and order == _compat.ATTENTION_PRIORITY:
        order = sorted(order, key=lambda value: value != CUDNN.value)
    return [SDPBackend(value) for value in order if value in (kind.value for kind in (*NAMES, MATH))]


def _why_not_flash(params: Params, spec: Spec) -> str | None:
    q, k, v = params[:3]
    if params.attn_mask is not None:
        return "Flash Attention does not support non-null attn_mask."
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256:
        return "Flash attention requires q, k, v to have the same last dimension and to be less than or equal to 256."
    if not (8, 0) <= spec.capability <= NEWEST:
        return f"Flash attention only supports capabilities 8.0 to 12.1, not {spec.capability[0]}.{spec.capability[1]}."
    small = (8, 6) <= spec.capability <= (8, 9) or (12, 0) <= spec.capability <= NEWEST  # less shared memory
    if learns(params) and small and not (q.shape[-1] <= 192 or (not params.dropout and q.shape[-1] > 224)):
        return f"Flash attention cannot train with a head of {q.shape[-1]} on this card."
    if params.is_causal and q.shape[-2] != k.shape[-2]:
        return "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k."
    return _why_not_types(params, HALVES)


def _why_not_efficient(params: Params, spec: Spec) -> str | None:
    q, k, v = params[:3]
    if not (5, 0) <= spec.capability <= NEWEST:
        return "Mem Efficient Attention only supports capabilities 5.0 to 12.1."
    alignment = 1
    if spec.capability >= (8, 0):
        alignment = 16 // q.element_size()
    elif spec.capability >= (7, 0) and q.dtype in HALVES:
        alignment = 8
    if q.shape[-1] != k.shape[-1] or any(not size or size % alignment for size in (q.shape[-1], v.shape[-1])):
        return f"Mem efficient attention requires last dimension of inputs to be divisible by {alignment}."
    if spec.capability >= (8, 0) and any(tensor.storage_offset() % alignment for tensor in (q, k, v)):
        return f"Mem efficient attention requires storage offsets that are divisible by {alignment}."
    return _why_not_types(
        params, (torch.float16, torch.float32, *([torch.bfloat16] if spec.capability >= (8, 0) else []))
    )


def _why_not_cudnn(params: Params, spec: Spec) -> str | None:
    q, k, v = params[:3]
    if not (8, 0) <= spec.capability <= NEWEST:
        return "cuDNN attention only supports capabilities 8.0 to 12.1."
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return "cuDNN SDPA is not deterministic."
    if params.attn_mask is not None and params.attn_mask.requires_grad:
        return "cuDNN SDPA gives no gradient for its mask."
    widest = 256 if spec.capability == (9, 0) else 128
    if spec.capability[0] == 10 and (q.shape[-1], v.shape[-1]) == (192, 128):  # DeepSeek's
        widest = 192
    if any(size > widest or size % 8 for size in (q.shape[-1], v.shape[-1])):
        return f"head_dim should be a multiple of 8, and no more than {widest}."
    if k.shape[-2] == 1 or (params.dropout and q.shape[-2] == 1):
        return "cuDNN SDPA does not support a sequence of length 1 there."
    return _why_not_types(params, HALVES)


def _why_not_types(params: Params, types) -> str | None:
    kinds = {tensor.dtype for tensor in params[:3]}
    if len(kinds) == 1 and kinds <= set(types):
        return None
    return f"Expected query, key and value to all be of one of these dtypes: {types}."


def _why_not_dense(params: Params, backend: SDPBackend) -> str | None:
    q, k, v = params[:3]
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return "the fused kernels require query, key and value to have the same batch size."
    heads = {k.shape[1], v.shape[1]}
    grouped = params.enable_gqa and (backend != EFFICIENT or efficient_takes_groups())
    if not grouped and heads != {q.shape[1]}:
        return "the fused kernels require query, key and value to have the same num_heads."
    if grouped and (any(not n or q.shape[1] % n for n in heads) or (len(heads) > 1 and backend != CUDNN)):
        return "the number of heads in key and value must divide the number of heads in query."
    if not all(tensor.shape[-2] for tensor in params[:3]):
        return "the fused kernels do not support zero seq_len_q or seq_len_kv."
    single = backend != EFFICIENT  # whether the stride of a dimension of size 1 is left out of account
    strided = [tensor for tensor in params[:4] if tensor is not None]
    if any(tensor.stride(-1) != 1 and not (single and tensor.shape[-1] == 1) for tensor in strided):
        return "the fused kernels require the last dimension of the input to have stride 1."
    return None


def learns(params: Params) -> bool:
    """Will somebody ask for a gradient of query, key or value?"""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in params[:3])


@functools.cache
def efficient_takes_groups() -> bool:
    """Does the memory-efficient kernel of this PyTorch take fewer heads of key and value? Its kernel for shapes shows it."""
    many, few = (torch.zeros(1, heads, 4, 8, device="meta") for heads in (2, 1))
    one = torch.zeros(1, 2, 32, device="meta")
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    grads = kernel(many, many, few, few, None, many, one, one, one, 0.0, [True, True, True, False])
    return grads[1].shape[1] == 1


# -- The fused kernels of scaled_dot_product_attention: flash, memory-efficient and cuDNN's, forward and backward, one kernel each way.
#
# None of them has a kernel for the CPU, so each is carried out here: the numbers are those of the CPU's own attention, results have the
# layout that the GPU's kernel gives them, and nothing of the size of the scores ever lies on the GPU. What the backward kernels hold for
# themselves while they run is held here, too: flash_api.cpp (mha_bwd) and mem_eff_attention/kernel_backward.h say how much.
#
# Shapes: query, out [batch, heads, L, E or Ev], key [batch, groups, S, E], value [batch, groups, S, Ev], logsumexp [batch, heads, L],
# of which the memory-efficient kernel rounds L up to 32, and cuDNN's has one more dimension of size 1.


aten = torch.ops.aten
CUDNN_FORWARD = 256  # bytes of its workspace, measured on an H100, cuDNN 9.19, 2026-11-26
FLASH_ON_CPU = 1  # what _fused_sdp_choice says of it


class Call:
    """One call of a kernel, by the names of its schema."""

    def __init__(self, func, args, kwargs):
        self.func = func
        arguments = _compat.schema(func).arguments
        self.values = {argument.name: argument.default_value for argument in arguments}
        self.values |= dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        self.query, self.key, self.value = (self.values[name] for name in ("query", "key", "value"))
        self.bias = self.values.get("attn_bias")
        self.dropout, self.is_causal, self.scale = (self.values[name] for name in ("dropout_p", "is_causal", "scale"))

    @property
    def inputs(self) -> list[torch.Tensor]:
        """query, key, value and, if there is one, the bias."""
        return [self.query, self.key, self.value, *([] if self.bias is None else [self.bias])]

    def booked(self, learned: bool = False) -> tuple:
        """What decides over its time (timing.attention). learned: does the bias get a gradient?"""
        return (*self.inputs[:3], self.is_causal, bool(self.dropout), self.bias is not None, bool(learned))

    def on_cpu(self, query, key, value, bias):
        """scaled_dot_product_attention as the CPU carries it out where it has no kernel for it."""
        groups = query.shape[1] != key.shape[1]
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, bias, self.dropout, self.is_causal, None, scale=self.scale, enable_gqa=groups
        )[0]

    def is_flash_on_cpu(self) -> bool:
        """Does the CPU take its own flash kernel, which says the logarithm of the sum as well?"""
        if self.dropout or (self.bias is not None and self.bias.requires_grad):
            return False  # that kernel has neither dropout nor a gradient for its bias
        groups = self.query.shape[1] != self.key.shape[1]
        args = (*self.inputs[:3], self.bias, self.dropout, self.is_causal)
        try:
            return _compat.fused_choice(*args, scale=self.scale, enable_gqa=groups) == FLASH_ON_CPU
        except RuntimeError:  # the program left on kernels alone that the CPU does not have
            return False


def forward(dispatch, func, args, kwargs):
    """One of the three forward kernels; NotImplemented for tensors on the CPU. Raises RuntimeError for tensors on several devices."""
    call, machine = Call(func, args, kwargs), dispatch.machine
    gpu = _place(call, machine)
    if gpu is None:
        return NotImplemented
    efficient, flash = func is EFFICIENT_OP, func is FLASH_OP
    if not efficient and call.query.dtype not in HALVES:
        raise RuntimeError(f"{'FlashAttention' if flash else 'cuDNN attention'} only support fp16 and bf16 data type")
    with machine.untracked():
        out, logsumexp = _results(call, efficient, call.values.get("compute_log_sumexp", True))
        number = 0
        if not machine.dry:
            require_room([out.nbytes, logsumexp.nbytes], gpu)
            if call.dropout:
                number = rng.keep(torch.cuda.default_generators[gpu.index])
            out, logsumexp = _attend(call, machine, gpu, out, logsumexp)
        outputs = [out, logsumexp if efficient or flash else logsumexp.unsqueeze(-1)]
        dtype, size = (torch.uint64, (2,)) if flash else (torch.int64, ())
        # the efficient one's stay with the host
        seeds = [
            torch.full(shape, value, dtype=dtype, device=machine.base) for shape, value in ((size, number), ((), 0))
        ]
        debug = out.new_empty(0) if flash else None
    if not (efficient or flash):
        gpu.lend([CUDNN_FORWARD])
    on_gpu = outputs if efficient else [*outputs, *seeds, *([debug] if flash else [])]
    dispatch.timing.book(SDPA_KERNELS[func], call.booked(), call.inputs, on_gpu, gpu)
    if efficient:
        return (*outputs, *seeds)
    return (*outputs, None, None, call.query.shape[2], call.key.shape[2], *seeds, debug)


def backward(dispatch, func, args, kwargs):
    """One of the three backward kernels: gradients of query, key and value, and the memory-efficient one's of its bias as well.

    NotImplemented for tensors on the CPU. Raises RuntimeError for tensors on several devices; NotImplementedError where dropout meets
    a sum over several parts (ring attention).
    """
    call, machine = Call(func, args, kwargs), dispatch.machine
    gpu = _place(call, machine)
    if gpu is None:
        return NotImplemented
    efficient = func is EFFICIENT_BACKWARD_OP
    out, logsumexp = call.values["out"], call.values["logsumexp"]
    grad_out = call.values["grad_out_" if efficient else "grad_out"]
    wants_bias = efficient and call.bias is not None and call.values["grad_input_mask"][3]
    with machine.untracked():
        outputs = _gradients(call, efficient)
        if wants_bias:
            outputs.append(_gradient_of_bias(call.bias))
        if not machine.dry:
            require_room([grad.nbytes for grad in outputs], gpu)
            grads = _differentiate(call, machine, grad_out, out, logsumexp, wants_bias)
            outputs = [_laid_out(shape, grad) for shape, grad in zip(outputs, grads, strict=True)]
    scratch = [Allocation(gpu, nbytes) for nbytes in _scratch(call, func is FLASH_BACKWARD_OP, efficient, gpu.spec)]
    inputs = [grad_out, *call.inputs, out, logsumexp]
    dispatch.timing.book(SDPA_KERNELS[func], call.booked(wants_bias), inputs, outputs, gpu)
    del scratch
    return (*outputs[:3], outputs[3] if wants_bias else None) if efficient else tuple(outputs)


def _place(call: Call, machine):
    gpu = gpu_of(call.query)
    for name, tensor in zip(("query", "key", "value", "attn_bias"), call.inputs, strict=False):
        if gpu_of(tensor) is not gpu:
            odd, common = ("cpu" if where is None else where.device for where in (gpu_of(tensor), gpu))
            raise wrong_device(call.func, name, odd, common)
    return None if gpu is None else machine.own(gpu)


# -- numbers


def _attend(call: Call, machine, gpu, out, logsumexp) -> list[torch.Tensor]:
    """[out, logsumexp] with the CPU's numbers, laid out as these shapes are."""
    values, bias = _operands(call)
    if call.is_flash_on_cpu():
        options = {"attn_mask": bias, "scale": call.scale}
        attended, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *values, call.dropout, call.is_causal, **options
        )
    else:
        args = (*values, bias)
        if call.dropout:
            attended = rng.as_default(machine, torch.cuda.default_generators[gpu.index], call.on_cpu, args, {})
        else:
            attended = call.on_cpu(*args)
        sums = _sums(call, *args) if logsumexp.numel() else None
    if logsumexp.numel():
        rows = torch.full(logsumexp.shape, torch.inf)
        rows[..., : sums.shape[-1]] = sums
    else:
        rows = torch.empty(logsumexp.shape)
    return [_laid_out(out, attended), rows]


def _operands(call: Call) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """(query, key and value, the bias), as they are multiplied: see `cuda_differences`."""
    query, key, value, *bias = (cuda_differences.widened(tensor.detach()) for tensor in call.inputs)
    return [query, key, value], bias[0] if bias else None


def _sums(call: Call, query, key, value, bias) -> torch.Tensor:
    """[batch, heads, L]: the logarithm of each row's sum of exponentials, in single precision."""
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = query.float() @ key.float().repeat_interleave(groups, 1).mT * scale
    if call.is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), -torch.inf)
    return (scores if bias is None else scores + bias).logsumexp(-1)


def _differentiate(call: Call, machine, grad_out, out, logsumexp, wants_bias: bool) -> list[torch.Tensor]:
    """The gradients, as the CPU's own backward pass has them."""
    (values, bias), grad_out, attended = (
        _operands(call),
        cuda_differences.widened(grad_out),
        cuda_differences.widened(out),
    )
    if not wants_bias and call.is_flash_on_cpu():
        sums = logsumexp.reshape(*logsumexp.shape[:2], -1)[..., : out.shape[2]].to(
            _compat.computation_dtype(attended.dtype)
        )
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        options = {"attn_mask": bias, "scale": call.scale}
        return list(kernel(grad_out, *values, attended, sums, call.dropout, call.is_causal, **options))
    leaves = [tensor.requires_grad_() for tensor in (*values, *([bias] if wants_bias else []))]
    with torch.enable_grad(), _compat.with_autograd():
        args = (*values, bias)
        if call.dropout:
            again = rng.as_default(machine, rng.generator_at(call.values["philox_seed"]), call.on_cpu, args, {})
        else:
            again = call.on_cpu(*args)
        # nan is nan, as where a pipeline learns shapes from memory that nobody has written. Another result: a part of a longer sequence,
        # whose gradient hangs on the sums of all parts
        if not torch.allclose(again.to(out.dtype), out, rtol=0, atol=0, equal_nan=True):
            raise NotImplementedError(
                "virtual GPUs do not know the gradient of attention over several parts with dropout or with plain operations: "
                "set dropout_p=0, and give query, key and value one size of head"
            )
        return list(torch.autograd.grad(again, leaves, grad_out))


# -- layouts, as shapes without numbers, and what the backward kernels hold while they run


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _meta(tensor: torch.Tensor, shape, dtype=None, order=None) -> torch.Tensor:
    """A shape, dense, its dimensions in memory in this order, the last one innermost."""
    order = order or tuple(range(len(shape)))
    return torch.empty_permuted(tuple(shape), order, dtype=dtype or tensor.dtype, device="meta")


BY_TOKENS = (0, 2, 1, 3)  # [batch, length, heads, size] in memory


def _like(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """As at::empty_like lays out, with another last dimension: the order of the tensor's own dimensions."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim)) if tensor.numel() else None
    return _meta(tensor, (*tensor.shape[:-1], width), order=order and tuple(order))


def _results(call, efficient: bool, summed: bool) -> list[torch.Tensor]:
    """[out, logsumexp] without numbers. The flash kernels' out has the query's layout, the memory-efficient one's its own."""
    q, width = call.query, call.value.shape[-1]
    batch, heads, length, _ = q.shape
    if not efficient:
        return [_like(q, width), _meta(q, (batch, heads, length), torch.float32)]
    padded = _rounded(length, 32) if summed else 0
    return [_meta(q, (batch, heads, length, width), order=BY_TOKENS), _meta(q, (batch, heads, padded), torch.float32)]


def _gradients(call, efficient: bool) -> list[torch.Tensor]:
    """Those of query, key and value, without numbers."""
    if efficient:
        return [_meta(tensor, tensor.shape, order=BY_TOKENS) for tensor in call.inputs[:3]]
    return [_like(tensor, tensor.shape[-1]) for tensor in call.inputs[:3]]


def _gradient_of_bias(bias: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias: its rows are rounded up to 16 numbers."""
    rows, width = bias.shape[:-1], bias.shape[-1]
    return _meta(bias, (*rows, _rounded(width, 16)))[..., :width]


def _laid_out(shape: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """These values in the layout of this shape."""
    if values.stride() == shape.stride() and values.dtype is shape.dtype:
        return values
    storage = torch.empty(shape.untyped_storage().nbytes() // shape.element_size(), dtype=shape.dtype)
    return storage.as_strided(shape.shape, shape.stride()).copy_(values)


def _scratch(call, flash: bool, efficient: bool, spec) -> list[int]:
    """Bytes of each block that a backward kernel takes and gives back."""
    q, k, v = call.inputs[:3]
    batch, heads, length, size = q.shape
    if flash:
        rows, width = _rounded(length, 128), _rounded(size, 32 if size <= 128 else 64)
        splits = 1
        if torch.are_deterministic_algorithms_enabled():  # blocks of keys add up apart
            splits = -(-spec.processors // (batch * heads))
        blocks = [batch * heads * rows * 4, splits * batch * rows * heads * width * 4]  # softmax_d, dq_accum
        if heads != k.shape[1]:  # gradients of key and value for each head of the query, before they are added up
            blocks += [batch * k.shape[2] * heads * tensor.shape[-1] * k.element_size() for tensor in (k, v)]
        # copies by tokens of what lies otherwise (_flash_attention_backward)
        for tensor in (call.values["grad_out"], call.values["out"]):
            if not tensor.transpose(1, 2).is_contiguous():
                blocks.append(tensor.nbytes)
        return blocks
    if efficient:
        delta = batch * heads * length * 4
        if q.dtype in HALVES:  # the query's gradient is added up in single precision
            return [delta, batch * heads * _rounded(length, 32) * _rounded(size, 32) * 4]
        return [batch * heads * length * v.shape[-1] * 4, delta]  # gradient times out, summed over the head
    # cuDNN adds up the query's gradient in single precision, too, and keeps a sum for each row: measured on an H100, cuDNN 9.19, 2026-11-26
    return [batch * heads * length * (size + 1) * 4]


FLASH_OP = aten._scaled_dot_product_flash_attention.default
EFFICIENT_OP = aten._scaled_dot_product_efficient_attention.default
CUDNN_OP = aten._scaled_dot_product_cudnn_attention.default
FLASH_BACKWARD_OP = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT_BACKWARD_OP = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN_BACKWARD_OP = aten._scaled_dot_product_cudnn_attention_backward.default
OPERATIONS = {FLASH_OP: forward, EFFICIENT_OP: forward, CUDNN_OP: forward}
OPERATIONS |= {FLASH_BACKWARD_OP: backward, EFFICIENT_BACKWARD_OP: backward, CUDNN_BACKWARD_OP: backward}
SDPA_KERNELS = {func: Kernel(func, fused if how is forward else fused_backward) for func, how in OPERATIONS.items()}
