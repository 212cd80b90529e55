"""Kernels that PyTorch chooses by where a tensor really is: a virtual GPU takes the one that a GPU would."""

import functools
import warnings

import torch
from torch import nn

from virtualgpu import _compat
from virtualgpu.engine import rms_norm, sdpa, sdpa_backends
from virtualgpu.engine.allocation import PLAIN_TYPES, gpu_of, is_plain
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.sdpa_backends import CUDNN, EFFICIENT, FLASH, MATH, Params
from virtualgpu.torch_api import autocast, plain_attention
from virtualgpu.torch_api.registry import Patches

ATTENTION = "scaled_dot_product_attention"
ALIGNMENT = 8  # numbers: mem_eff_alignment in preprocess_mask of attention.cpp, the same in PyTorch 2.11 and 2.15
CHECKS = {
    FLASH: "_can_use_flash_attention",
    EFFICIENT: "_can_use_mem_efficient_attention",
    CUDNN: "_can_use_cudnn_attention",
}


def install(machine: Machine, patches: Patches) -> None:
    """Replace scaled_dot_product_attention, what says which kernel it takes, dropout and RMS norm."""
    patches.stand_in_builtin((nn.functional, _compat.NN), ATTENTION, _attention, machine)
    for backend, name in CHECKS.items():
        patches.add(_compat.C, name, _check(backend))
    patches.stand_in(torch, "_fused_sdp_choice", _choice, machine)
    patches.stand_in_builtin((torch, _compat.VF), "dropout", _dropout, machine)
    patches.stand_in_builtin((torch,), "rms_norm", _rms_norm, machine)


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
        one = query.dim() == key.dim() == value.dim() == 3 and _adds_batch(original)
        if one:
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        params = Params(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        backend = sdpa_backends.choose(params, gpu_of(query).spec)
        out = KERNELS[backend](params, scale)
        return out.squeeze(0) if one else out


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
    out = sdpa.FLASH_OP(q, k, v, dropout, causal, False, scale=scale)[0]
    return out[..., :size] if size % 8 else out


def _efficient(params: Params, scale: float | None):
    q, k, v, mask, dropout, causal, _ = params
    if mask is not None:
        mask = _aligned(plain_attention.as_bias(mask, q.dtype)).expand(*q.shape[:3], k.shape[2])
    return sdpa.EFFICIENT_OP(q, k, v, mask, sdpa_backends.learns(params), dropout, causal, scale=scale)[0]


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
    mask = None if mask is None else plain_attention.as_bias(mask, q.dtype)
    return sdpa.CUDNN_OP(q, k, v, mask, sdpa_backends.learns(params), dropout, causal, False, scale=scale)[0]


def _math(params: Params, scale: float | None):
    q, k, v, mask, dropout, causal, grouped = params
    if type(q) not in PLAIN_TYPES and _compat.carried_out_by_dtensor(sdpa.FLASH_OP):
        raise NotImplementedError(
            "context_parallel splits the fused kernels of attention, and here none of them may run, so that each part would look at "
            "itself alone: give it a dtype and a size of head that they take (sdpa_kernel names the reason)"
        )
    mask = None if mask is None else plain_attention.as_bias(mask, q.dtype)
    params = params._replace(attn_mask=mask)
    if plain_attention.is_taken(params):
        return plain_attention.attend(params, scale)
    kernel = torch.ops.aten._scaled_dot_product_attention_math.default
    return kernel(q, k, v, mask, dropout, causal, None, scale=scale, enable_gqa=grouped)[0]


KERNELS = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn, MATH: _math}


def _check(backend):
    def can_use(params, debug=False) -> bool:
        """No for tensors of the CPU, and for nested ones, whose kernels are not modelled."""
        gpu = gpu_of(params.query)
        if gpu is None or params.query.is_nested:
            return False
        reason = sdpa_backends.why_not(backend, Params.of(params), gpu.spec)
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
    return sdpa_backends.choose(params, gpu.spec).value


def _dropout(machine: Machine, original, input, p, train):
    """One kernel, which keeps a mask of one byte an element (is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp);
    the CPU would keep one of the input's type. The numbers are the same."""
    fused = is_plain(input) and not machine.local.bypass and train and 0 < p < 1
    if not fused or input.is_nested or gpu_of(input) is None or not input.numel():
        return original(input, p, train)
    return torch.native_dropout(input, p, train)[0]


def _rms_norm(machine: Machine, original, input, normalized_shape, weight=None, eps=None):
    """One kernel, where a GPU has one."""
    if machine.local.bypass or not rms_norm.is_fused(input, weight):
        return original(input, normalized_shape, weight, eps)
    shape = list(normalized_shape)
    if list(input.shape[-len(shape) :]) != shape or not shape or (weight is not None and list(weight.shape) != shape):
        return original(input, normalized_shape, weight, eps)  # which says so
    with autocast.cast("rms_norm", (input, weight)) as (input, weight):
        return torch.ops.aten._fused_rms_norm.default(input, shape, weight, eps)[0]
