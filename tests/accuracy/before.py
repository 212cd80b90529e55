"""What operations of older PyTorch kept or copied, where today's do otherwise: for programs that were measured on those."""

import contextlib
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group


class Softmax(torch.autograd.Function):
    """Over the last dimension, as until PyTorch 1.10: it kept what went in as well as what came out, to know its type
    (derivatives.yaml: `_softmax_backward_data(grad, result, dim, self)`; from 1.11 on `self.scalar_type()`)."""

    @staticmethod
    def forward(context, x):
        result = torch.softmax(x, dim=-1)
        context.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(context, gradient):
        x, result = context.saved_tensors
        return torch._softmax_backward_data(gradient, result, -1, x.dtype)


softmax = Softmax.apply


class Flash(torch.autograd.Function):
    """FlashAttention 1, as until PyTorch 2.2: queries, keys and values [batch, heads, length, size] are copied where tokens of a batch do
    not lie one after the other, for the kernel alone and again in the backward pass, and what comes out lies so, whatever went in
    (aten/src/ATen/native/transformers/cuda: `_scaled_dot_product_flash_attention_cuda` of v2.1). No mask, no dropout."""

    @staticmethod
    def forward(context, query, key, value):
        out, *rest = torch.ops.aten._scaled_dot_product_flash_attention(*map(_by_tokens, (query, key, value)))
        context.save_for_backward(query, key, value, out)
        context.rest = rest
        return out

    @staticmethod
    def backward(context, gradient):
        inputs = [_by_tokens(tensor) for tensor in (gradient, *context.saved_tensors)]
        sums, queries_until, keys_until, queries, keys, seed, offset, _ = context.rest
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *inputs, sums, queries_until, keys_until, queries, keys, 0.0, False, seed, offset
        )


def _by_tokens(tensor):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def flash_attention(query, key, value, *args, **kwargs):
    """In the place of scaled_dot_product_attention, where that would take a flash kernel."""
    return Flash.apply(query, key, value)


@contextlib.contextmanager
def reduced_on_their_stream():
    """FSDP2 until July 2024 (pytorch/pytorch#129721): gradients are gathered for their reduce-scatter on its own stream, whose memory
    the default one cannot use at other times; it waits for the copy alone, and the memory is free when the function ends."""
    reduce, copy = _fsdp_collectives.foreach_reduce, _fsdp_collectives.foreach_reduce_scatter_copy_in
    caller = None

    def copy_in(*args):
        copy(*args)
        caller.wait_stream(torch.cuda.current_stream())

    def foreach_reduce(params, gradients, group, stream, *args, **kwargs):
        nonlocal caller
        caller = torch.cuda.current_stream()
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            gathered, *rest = reduce(params, gradients, group, stream, *args, **kwargs)
        return gathered.new_empty(0), *rest

    with (
        mock.patch.object(_fsdp_collectives, "foreach_reduce_scatter_copy_in", copy_in),
        mock.patch.object(_fsdp_param_group, "foreach_reduce", foreach_reduce),
    ):
        yield
