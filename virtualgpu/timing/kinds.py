"""Kinds of kernels that are bound by memory: how often they move their tensors, and what limits them.

What a kernel takes beside that, by its arithmetic or because a thread waits, is in cycles.py and batch_norms.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from virtualgpu.timing import cycles, norms, pools, reductions, upsampling
from virtualgpu.timing.batch_norms import LAST, LAST_BACKWARD, batch_norm, batch_norm_backward, own_channels_last


class Kind(NamedTuple):
    """traffic: bytes really moved over those of all tensors that go in or come out, once. limit: whose share of the bandwidth it has
    (`hardware.achieved`). launches: kernels that the operation is made of. training: at which argument it is told whether this is
    training; where it is not, nothing is read twice. wide: traffic where a row does not fit beside a multiprocessor. blocks: by the
    arguments, what the kernel takes at least (`Least`). elementwise: each number comes of those at its own place. made: only what comes out
    counts. waits: by the arguments, seconds in which it goes through rows one after the other. per_cycle: bytes that a multiprocessor moves in
    one, at most, in the last of its kernels. cycles: of a multiprocessor, for each number of the largest tensor, at least; or a function of
    the arguments and tensors that says how many in all. more: such a function, of what comes on top. own: by the card's kernels, the
    arguments and the tensors, all that it takes: of kernels whose threads are counted."""

    traffic: float = 1.0
    limit: str = "memory"
    launches: int = 1
    training: int | None = None
    wide: float | None = None
    blocks: Callable | None = None
    elementwise: bool = False
    made: bool = False
    waits: Callable | None = None
    per_cycle: float | None = None
    cycles: float | Callable | None = None
    more: Callable | None = None
    own: Callable | None = None
    least: float = 0.0  # what `cycles` and `more` come to in a call
    beyond: float = 0.0
    call: tuple = ()  # arguments and tensors of that call, for `own`

    def evaluates(self, args) -> bool:
        """Is this call no training, of a kind that tells the two apart?"""
        return self.training is not None and not args[self.training]

    def in_call(self, args, tensors) -> "Kind":
        """What it is for these arguments, and these tensors that go in or come out."""
        if self.own is not None:
            return self._replace(call=(args, tensors)) if all(tensor.numel() for tensor in tensors) else self
        if self.elementwise:
            if is_transposed(tensors):
                return self._replace(least=TRANSPOSED * tensors[-1].numel())
            bytes_per_cycle = one_by_one(tensors)
            if bytes_per_cycle is None:
                return self
            return CALLS[bytes_per_cycle] if self is ELEMENTWISE else self._replace(per_cycle=bytes_per_cycle)
        if self.evaluates(args):
            return self._replace(traffic=1.0, launches=1, blocks=None, least=cycles.EVALUATING * tensors[0].numel())
        if self.wide is not None and tensors[0].dim():
            row = tensors[0].shape[-1] * tensors[0].itemsize
            if row * (len(tensors) - 1) > ROW:  # the backward pass reads two tensors
                self = self._replace(traffic=self.wide)
        if self.cycles is not None:
            each = self.cycles
            total = each(args, tensors) if callable(each) else each * max(tensor.numel() for tensor in tensors)
            self = self._replace(least=total)
        return self if self.more is None else self._replace(beyond=self.more(args, tensors))


def one_by_one(tensors) -> float | None:
    """Bytes that a multiprocessor moves in a cycle in an elementwise kernel that does not read 16 bytes at once: where its tensors differ
    in their layout (one is broadcast, say) or in their type (CUDALoops.cuh: launch_vectorized_kernel, or one number at a time). That is
    seen where numbers have 16 bits; None elsewhere."""
    halves, single, layouts = False, False, set()
    for tensor in tensors:
        if tensor.dim():
            size = tensor.itemsize
            halves |= size == 2
            single |= size == 4 and tensor.is_floating_point()
            layouts.add((tensor.numel(), tensor.stride()) if tensor.layout is torch.strided else None)
    if not halves or (single and len(tensors) == 2 and tensors[-1].itemsize == 2):
        return None  # what makes 16 bits of 32 reads 16 bytes at once (vectorized_elementwise_kernel on an H100)
    return CONVERTED if single else UNVECTORIZED if len(layouts) > 1 else None


def is_transposed(tensors) -> bool:
    """Do neighbours in the first tensor's memory lie apart in the last one's?"""
    first, last = tensors[0], tensors[-1]
    if first.layout is not torch.strided or last.layout is not torch.strided or first.stride() == last.stride():
        return False
    return first.shape == last.shape and _innermost(first) != _innermost(last) and first.numel() == _span(first)


def _innermost(tensor) -> int | None:
    """The dimension along which memory runs."""
    return next(
        (dim for dim in reversed(range(tensor.dim())) if tensor.stride(dim) == 1 and tensor.size(dim) > 1), None
    )


def _span(tensor) -> int:
    """Numbers from its first to its last: more than it has where it leaves some out, fewer where it repeats some."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# Measured on an H100 (tests/gpu/h100_kernels.csv, PyTorch 2.11): cycles of a multiprocessor for each number that is copied to where its
# neighbours lie apart (2.2 in 32 bits, 1.9 in 16; channels first to last alike)
TRANSPOSED = 2.0
# Liger-Kernel's eager PyTorch columns on an A100-80GB (BSD 2-Clause, 2024), largest sizes: rotary embedding in bfloat16 takes 2.0 times its
# bytes; RMS norm, bfloat16 with float32 between, 1.34 times, which leaves 1.7 for its three kernels that convert; of its 11.8 bytes a cycle
# and multiprocessor that is 5.9 and 6.9. In float32 alone broadcast operands cost nothing, also on an H100 (add and RMS norm: 0.98 to 1.05)
UNVECTORIZED, CONVERTED = 5.9, 6.9
PLAIN = Kind()
ELEMENTWISE = Kind(elementwise=True)
CALLS = {limit: Kind(elementwise=True, per_cycle=limit) for limit in (UNVECTORIZED, CONVERTED)}
# Bytes of a row of a softmax beyond which it is read once more for the maximum and once for the sum: Liger-Kernel's cross entropy on an A100
# (BSD 2-Clause, 2024), 16384 rows of float32 in PyTorch: 1,100 GB/s with 64 KiB a row, 820 to 830 with 128 KiB and more; an H100 reads rows
# of 98 KiB once, and of 125 KiB more often
ROW = 112 << 10
# Twice over what goes in: once for its mean and variance or its sums, once for the result (Normalization.cuh)
KINDS = {
    "native_batch_norm": Kind(1.5, training=5, blocks=batch_norm, cycles=own_channels_last(LAST, 0, 1)),
    "_native_batch_norm_legit": Kind(1.5, training=5, blocks=batch_norm, cycles=own_channels_last(LAST, 0, 1)),
    "_batch_norm_with_update": Kind(1.5, blocks=batch_norm, cycles=own_channels_last(LAST, 0, 1)),
    "cudnn_batch_norm": Kind(1.5, training=5, blocks=batch_norm),
    "native_batch_norm_backward": Kind(
        5 / 3, launches=2, blocks=batch_norm_backward, cycles=own_channels_last(LAST_BACKWARD, 1, 2)
    ),
    "batch_norm_backward": Kind(5 / 3, launches=2),
    "native_group_norm": Kind(launches=3, own=norms.group_norm),
    "native_group_norm_backward": Kind(launches=5, own=norms.group_norm_backward),
    "native_layer_norm": Kind(own=norms.layer_norm),
    "native_layer_norm_backward": Kind(launches=2, own=norms.layer_norm_backward),
    "_fused_rms_norm": Kind(own=norms.rms_norm),
    "_fused_rms_norm_backward": Kind(launches=2, own=norms.rms_norm_backward),
    "_softmax": Kind(1.0, "softmax", wide=1.8, cycles=cycles.ROWS),
    "_log_softmax": Kind(1.0, "softmax", wide=1.8, cycles=cycles.ROWS),
    # gradient times result is a kernel of its own (aten/src/ATen/native/cuda/SoftMax.cu)
    "_softmax_backward_data": Kind(2.0, launches=2),
    "_log_softmax_backward_data": Kind(1.0, "softmax", wide=1.2),
    "max_pool2d_with_indices": Kind(own=pools.maximum),
    "max_pool2d_with_indices_backward": Kind(launches=2, own=pools.maximum_backward),
    "avg_pool2d": Kind(own=pools.average),
    "avg_pool2d_backward": Kind(own=pools.average_backward),
    "_adaptive_avg_pool2d": Kind(own=pools.adaptive),
    "_adaptive_avg_pool2d_backward": Kind(launches=2, own=pools.adaptive_backward),
    "upsample_bilinear2d": Kind(own=upsampling.bilinear),
    "upsample_bilinear2d_backward": Kind(launches=2, own=upsampling.bilinear_backward),
    "upsample_bicubic2d": Kind(launches=2, own=upsampling.bicubic),
    "upsample_bicubic2d_backward": Kind(launches=2, own=upsampling.bicubic_backward),
    "upsample_nearest2d": Kind(own=upsampling.nearest),
    "upsample_nearest2d_backward": Kind(own=upsampling.nearest_backward),
    "_upsample_nearest_exact2d": Kind(own=upsampling.nearest),
    "_upsample_nearest_exact2d_backward": Kind(own=upsampling.nearest_backward),
    "nll_loss_forward": Kind(made=True, waits=cycles.rounds(0)),
    "nll_loss_backward": Kind(made=True, waits=cycles.rounds(1), launches=2),  # zeros, and a number in each row
    "masked_fill": Kind(2.0, launches=2, elementwise=True),  # a copy, filled in place
    "masked_fill_": ELEMENTWISE,
    "_to_copy": ELEMENTWISE,
    "copy_": ELEMENTWISE,
    "clone": ELEMENTWISE,
    "embedding": Kind(2.0, made=True, cycles=cycles.rows_of(1)),  # vectorized_gather_kernel
    **{name: Kind(own=reductions.of(name)) for name in reductions.NAMES},
    "index_select": Kind(2.0, made=True, cycles=cycles.rows_of(2)),
    "index": Kind(2.0, made=True, cycles=cycles.rows_of_index),
    "index_add": Kind(launches=2, cycles=cycles.added_by(cycles.ADDED, 3)),
    "index_add_": Kind(cycles=cycles.added_by(cycles.ADDED, 3)),
    "scatter_add": Kind(launches=2, cycles=cycles.added_by(cycles.SCATTERED, 2)),
    "scatter_add_": Kind(cycles=cycles.added_by(cycles.SCATTERED, 2)),
    "cumsum": Kind(waits=cycles.scan),
    "roll": Kind(cycles=cycles.ROLLED),
    "constant_pad_nd": Kind(1.6, launches=2),  # filled, then copied into
    # sorted indices, then sums of equal ones: thrust::sort_by_key and four kernels (EmbeddingBackwardKernel.cu)
    "embedding_dense_backward": Kind(1.0, launches=12, more=cycles.gradients),
    # sorted, counted and put in order first (EmbeddingBag.cu): 29 in a profile on an H100 (PyTorch 2.11; 8,192 bags of one, dense gradients)
    "_embedding_bag_backward": Kind(1.0, launches=29, more=cycles.gradients_of_bags),
    "index_put": Kind(1.0, launches=9),
    "index_put_": Kind(1.0, launches=8),
    "_index_put_impl_": Kind(1.0, launches=8),
    "topk": Kind(1.0, launches=4, cycles=cycles.top),
    "sort": Kind(1.0, launches=6, cycles=cycles.sorted_rows),
    "nonzero": Kind(1.0, launches=4),
}
