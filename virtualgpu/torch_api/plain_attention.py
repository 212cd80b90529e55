"""scaled_dot_product_attention by plain operations, one by one as a GPU carries them out (_scaled_dot_product_attention_math in
aten/src/ATen/native/transformers/attention.cpp, PyTorch 2.11 to 2.15).

The C++ function itself would see tensors of the CPU, and a mode: its dropout would keep a mask of the scores' type, not of one byte an
element, and it would not add a bias to the scores in place. The numbers are the same.
"""

import math

import torch
from torch import Tensor

from virtualgpu import _compat
from virtualgpu.engine.allocation import is_plain
from virtualgpu.engine.halves import HALVES
from virtualgpu.engine.sdpa_backends import Params


def is_taken(params: Params) -> bool:
    """Are these tensors plain (C++ takes other operations for others), and nothing that it refuses?"""
    query, key, value, bias, _, causal, grouped = params
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    refused = (causal and bias is not None) or (
        grouped and any(_repeats(query, tensor) is None for tensor in tensors[1:3])
    )
    return all(map(is_plain, tensors)) and not refused


def attend(params: Params, scale: float | None) -> Tensor:
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
        key, value = (_repeated(tensor, _repeats(query, tensor)) for tensor in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if bias is not None:
        scores.add_(bias)
    shares = _compat.safe_softmax(scores, -1)
    del scores
    if dropout:
        shares = torch.dropout(shares, dropout, True)
    returned = shares.to(dtype)  # its other result, which is there as long as the function runs
    out = torch.matmul(shares, value).to(dtype)
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
