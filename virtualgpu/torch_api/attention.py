"""scaled_dot_product_attention: the kernel that a GPU would take, or plain operations as it carries them out."""

import functools
import math
import warnings

import torch
from torch import Tensor, nn

from virtualgpu import _compat
from virtualgpu.engine import attention
from virtualgpu.engine.attention import CUDNN, EFFICIENT, FLASH, MATH, Params
from virtualgpu.engine.cuda_differences import HALVES
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.storage import PLAIN_TYPES, gpu_of, is_plain
from virtualgpu.torch_api import autocast
from virtualgpu.torch_api.patches import Patches

# -- scaled_dot_product_attention by plain operations, one by one as a GPU carries them out (_scaled_dot_product_attention_math in
# aten/src/ATen/native/transformers/attention.cpp, PyTorch 2.11 to 2.15).
#
# The C++ function itself would see tensors of the CPU, and a mode: its dropout would keep a mask of the scores' type, not of one byte an
# element, and it would not add a bias to the scores in place. The numbers are the same.


def is_plain_attention(params: Params) -> bool:
    """Are these tensors plain (C++ takes other operations for others), and nothing that it refuses?"""
    query, key, value, bias, _, causal, grouped = params
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    refused = (causal and bias is not None) or (
        grouped and any(_repeats(query, tensor) is None for tensor in tensors[1:3])
    )
    return all(map(is_plain, tensors)) and not refused


def plain_attention(params: Params, scale: float | None) -> Tensor:
    """The output, in the query's type. attn_mask: what is added to the scores.

    Halves are computed in single precision, unless torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp says otherwise.
    """
    *tensors, bias, dropout, causal, grouped = params
    dtype = tensors[0].dtype
    if dtype in HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        tensors = [tensor.float() for tensor in tensors]
    query, key, value = tensors
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(scale))
    query = query * (-root if scale < 0 else root)
    if causal:
        lower = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        bias = as_bias(lower, query.dtype)
    if grouped:
        key, value = (_repeated(tensor, _repeats(query, tensor) or 1) for tensor in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if bias is not None:
        scores.add_(bias)
    weights = _compat.safe_softmax(scores, -1)
    del scores
    if dropout:
        weights = torch.dropout(weights, dropout, True)
    returned = weights.to(dtype)  # its other result, which is there as long as the function runs
    out = torch.matmul(weights, value).to(dtype)
    del returned
    return out


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of bool as what is added to the scores: 0, or minus infinity (convert_boolean_attn_mask)."""
    if mask.dtype is not torch.bool:
        return mask
    hidden, seen = (torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (-torch.inf, 0.0))
    return torch.where(mask, seen, hidden)


def _repeats(query: Tensor, tensor: Tensor) -> int | None:
    """How many heads of the query share one of this tensor; None: they cannot."""
    if min(query.dim(), tensor.dim()) < 3 or not tensor.shape[-3] or query.shape[-3] % tensor.shape[-3]:
        return None
    return query.shape[-3] // tensor.shape[-3]


def _repeated(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, -3)


# -- Kernels that PyTorch chooses by where a tensor really is: a virtual GPU takes the one that a GPU would.


ATTENTION = "scaled_dot_product_attention"
ALIGNMENT = 8  # numbers: mem_eff_alignment in preprocess_mask of attention.cpp, the same in PyTorch 2.11 and 2.15
CHECKS = {
    FLASH: "_can_use_flash_attention",
    EFFICIENT: "_can_use_mem_efficient_attention",
    CUDNN: "_can_use_cudnn_attention",
}


def install(machine: Machine, patches: Patches) -> None:
    """Replace scaled_dot_product_attention, and what says which kernel it takes."""
    patches.stand_in_builtin((nn.functional, _compat.NN), ATTENTION, _attention, machine)
    for backend, name in CHECKS.items():
        patches.add(_compat.C, name, _check(backend))
    patches.stand_in(torch, "_fused_sdp_choice", _choice, machine)


def _attention(
    machine: Machine,
    original,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,  # in C++ this and the next go by name alone
    enable_gqa=False,
):
    """As aten/src/ATen/native/transformers/attention.cpp prepares its arguments for each kernel."""
    __tracebackhide__ = True
    tensors = (query, key, value, attn_mask)
    if query.is_nested and machine.dry and not machine.local.bypass:
        raise NotImplementedError(
            "attention of nested tensors is not modelled in a dry run: give it padded ones (to_padded_tensor), or run this line "
            "outside dry_run()"
        )
    elsewhere = machine.local.bypass or torch.overrides.has_torch_function(tensors) or gpu_of(query) is None
    # plain operations, one by one, which want it contiguous; a fused kernel would not
    if not elsewhere and query.is_nested:
        tensors, elsewhere = (query.contiguous(), key.contiguous(), value.contiguous(), attn_mask), True
    if elsewhere:
        return original(*tensors, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    with autocast.cast(ATTENTION, tensors) as (query, key, value, attn_mask):
        _check_inputs(query, key, value, attn_mask)
        # [heads, length, size]: a batch of one
        unbatched = query.dim() == key.dim() == value.dim() == 3 and _adds_batch(original)
        if unbatched:
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        params = Params(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        backend = attention.choose(params, gpu_of(query).spec)
        out = KERNELS[backend](params, scale)
        return out.squeeze(0) if unbatched else out


@functools.cache
def _adds_batch(original) -> bool:
    """Does this version of PyTorch give inputs of three dimensions a batch, so that fused kernels take them? 2.11 does not yet."""
    with torch.enable_grad():
        x = torch.ones(1, 1, 1, device="meta", requires_grad=True)
        return "Squeeze" in original(x, x, x).grad_fn.name()


def _check_inputs(query, key, value, mask) -> None:
    """In the words of validate_sdpa_input."""
    for what in ("dtype", "device"):
        query_s, key_s, value_s = (getattr(tensor, what) for tensor in (query, key, value))
        if not query_s == key_s == value_s:
            kind = "device type" if what == "device" else what
            raise RuntimeError(
                f"Expected query, key, and value to have the same {kind}, but got query.{what}: {query_s} key.{what}: {key_s} and "
                f"value.{what}: {value_s} instead."
            )
    if mask is not None and mask.dtype not in (torch.bool, query.dtype, torch.float32):
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: {mask.dtype} and  "
            f"query.dtype: {query.dtype} instead."
        )


def _flash(params: Params, scale: float | None):
    """Heads of a size that is no multiple of 8 are filled up with zeros, and the result is cut again."""
    q, k, v, _, dropout, causal, _ = params
    size = q.shape[-1]
    scale = size**-0.5 if scale is None and size % 8 else scale
    q, k, v = (nn.functional.pad(x, (0, -size % 8)) if size % 8 else x for x in (q, k, v))
    out = attention.FLASH_OP(q, k, v, dropout, causal, False, scale=scale)[0]
    return out[..., :size] if size % 8 else out


def _efficient(params: Params, scale: float | None):
    q, k, v, mask, dropout, causal, _ = params
    if mask is not None:
        mask = _aligned(as_bias(mask, q.dtype)).expand(*q.shape[:3], k.shape[2])
    return attention.EFFICIENT_OP(q, k, v, mask, attention.learns(params), dropout, causal, scale=scale)[0]


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """A bias whose rows begin at multiples of ALIGNMENT numbers, as they are before they are expanded (preprocess_mask): one that lies
    otherwise is copied into longer rows."""
    *strides, last = bias.stride()
    if last == 1 and not any(stride % ALIGNMENT for stride in strides):
        return bias
    width = bias.shape[-1]
    return nn.functional.pad(bias, (0, ALIGNMENT - width % ALIGNMENT))[..., :width]


def _cudnn(params: Params, scale: float | None):
    q, k, v, mask, dropout, causal, _ = params
    mask = None if mask is None else as_bias(mask, q.dtype)
    return attention.CUDNN_OP(q, k, v, mask, attention.learns(params), dropout, causal, False, scale=scale)[0]


def _math(params: Params, scale: float | None):
    q, k, v, mask, dropout, causal, grouped = params
    if type(q) not in PLAIN_TYPES and _compat.carried_out_by_dtensor(attention.FLASH_OP):
        raise NotImplementedError(
            "context_parallel splits the fused kernels of attention, and here none of them may run, so that each part would look at "
            "itself alone: give it a dtype and a size of head that they take (sdpa_kernel names the reason)"
        )
    mask = None if mask is None else as_bias(mask, q.dtype)
    params = params._replace(attn_mask=mask)
    if is_plain_attention(params):
        return plain_attention(params, scale)
    kernel = torch.ops.aten._scaled_dot_product_attention_math.default
    return kernel(q, k, v, mask, dropout, causal, None, scale=scale, enable_gqa=grouped)[0]


KERNELS = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn, MATH: _math}


def _check(backend):
    def can_use(params, debug=False) -> bool:
        """No for tensors of the CPU, and for nested ones, whose kernels are not modelled."""
        gpu = gpu_of(params.query)
        if gpu is None or params.query.is_nested:
            return False
        reason = attention.why_not(backend, Params.of(params), gpu.spec)
        if debug and reason is not None:
            warnings.warn(reason, stacklevel=2)
        return reason is None

    return can_use


def _choice(
    machine: Machine,
    original,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
):
    gpu = None if machine.local.bypass else gpu_of(query)
    if gpu is None:
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    params = Params(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    return attention.choose(params, gpu.spec).value
