"""Kernels that PyTorch chooses by where a tensor really is: a virtual GPU takes the one that a GPU would, where the CPU has it."""

import functools

import torch
from torch import _VF, nn

from virtualgpu import _compat
from virtualgpu.engine.home import PLAIN, gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.patches.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace scaled_dot_product_attention and dropout."""
    for owner in (nn.functional, torch._C._nn):
        ours = _attention(machine, owner.scaled_dot_product_attention)
        patches.replace(owner, "scaled_dot_product_attention", ours)
    dropout = _dropout(machine, torch.dropout)
    patches.undo(_compat.register_as_builtin(dropout, "aten::dropout"))
    for owner in (torch, _VF):
        patches.replace(owner, "dropout", dropout)


def _attention(machine: Machine, original):
    """In a dry run, the fused kernel that the CPU takes, and a GPU likewise; PyTorch has none for meta."""

    @functools.wraps(original)
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *args, **kwargs):
        inputs = (query, key, value)
        fused = machine.dry and query.dim() in (3, 4) and not dropout_p and not args
        fused = (
            fused and set(kwargs) <= {"scale", "enable_gqa"} and not (attn_mask is not None and attn_mask.requires_grad)
        )
        if not fused or not all(_compat.is_really_meta(tensor) for tensor in inputs):
            return original(query, key, value, attn_mask, dropout_p, is_causal, *args, **kwargs)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, 0)
        if query.dim() == 3:
            inputs = [tensor.unsqueeze(0) for tensor in inputs]
        options = {"attn_mask": attn_mask, "scale": kwargs.get("scale")}
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = kernel(*inputs, dropout_p, is_causal, **options)[0]
        return out.squeeze(0) if query.dim() == 3 else out

    return attention


def _dropout(machine: Machine, original):
    """One kernel, which keeps a mask of one byte an element (is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp);
    the CPU would keep one of the input's type. The numbers are the same."""

    @functools.wraps(original)
    def dropout(input, p, train):
        fused = (
            type(input) in PLAIN
            and not machine.local.bypass
            and train
            and 0 < p < 1
            and not _compat.is_functorch_wrapped(input)
        )
        if not fused or gpu_of(input) is None or not input.numel():
            return original(input, p, train)
        return torch.native_dropout(input, p, train)[0]

    return dropout
