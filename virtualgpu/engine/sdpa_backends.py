"""Which kernel scaled_dot_product_attention takes on a card: flash, memory-efficient, cuDNN's, or plain operations ("math").

PyTorch asks one after the other, in an order that `torch.nn.attention.sdpa_kernel` may set, and takes the first that may run: each is
a list of conditions. They are those of aten/src/ATen/native/transformers/sdp_utils_cpp.h and cuda/sdp_utils.cpp (PyTorch 2.11 to 2.15),
for dense tensors.
"""

import functools
import os
import warnings
from typing import NamedTuple

import torch
from torch.backends import cuda as settings
from torch.nn.attention import SDPBackend

from virtualgpu import _compat
from virtualgpu.engine.halves import HALVES
from virtualgpu.hardware.specs import Spec

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
