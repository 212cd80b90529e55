"""Kinds of kernels that are bound by memory: how often they move their tensors, and what limits them."""

from typing import NamedTuple

import torch


class Kind(NamedTuple):
    """traffic: bytes really moved over those of all tensors that go in or come out, once. limit: whose share of the bandwidth it has
    (`hardware.achieved`). launches: kernels that the operation is made of. training: at which argument it is told whether this is
    training; where it is not, nothing is read twice. wide: traffic where a row does not fit beside a multiprocessor. elementwise: each
    number comes of those at its own place. made: only what comes out counts. gathers: number by number. rows: the argument whose rows one
    block goes through."""

    traffic: float = 1.0
    limit: str = "memory"
    launches: int = 1
    training: int | None = None
    wide: float | None = None
    elementwise: bool = False
    made: bool = False
    gathers: bool = False
    rows: int | None = None

    def in_call(self, args, tensors) -> "Kind":
        """What it is for these arguments, and these tensors that go in or come out."""
        if self.elementwise:
            times = one_by_one(tensors)
            return self if times == 1 else CALLS[times] if self is ELEMENTWISE else self.times(times)
        if self.training is not None and not args[self.training]:
            return PLAIN
        if self.wide is not None and tensors[0].dim():
            row = tensors[0].shape[-1] * tensors[0].itemsize
            if row * (len(tensors) - 1) > ROW:  # the backward pass reads two tensors
                return self._replace(traffic=self.wide)
        if self.gathers and tensors[-1].itemsize == 2:
            return self._replace(traffic=UNVECTORIZED * self.traffic)
        return self

    def times(self, times: float) -> "Kind":
        """The same, whose last kernel takes so many times as long."""
        return self._replace(traffic=self.traffic - 1 + times)

    def latency(self, args) -> float:
        """Seconds beyond those for what it moves."""
        rows = self.rows
        return ROUND * args[rows].shape[0] / BLOCK if rows is not None and args[rows].dim() == 2 else 0.0


def one_by_one(tensors) -> float:
    """How many times as long an elementwise kernel takes that does not read 16 bytes at once: where its tensors differ in their layout
    (one is broadcast, say) or in their type (CUDALoops.cuh: launch_vectorized_kernel, or one number at a time). That is seen where
    numbers have 16 bits."""
    halves, single, layouts = False, False, set()
    for tensor in tensors:
        if tensor.dim():
            size = tensor.itemsize
            halves |= size == 2
            single |= size == 4 and tensor.is_floating_point()
            layouts.add((tensor.numel(), tensor.stride()) if tensor.layout is torch.strided else None)
    if not halves:
        return 1
    return CONVERTED if single else UNVECTORIZED if len(layouts) > 1 else 1


# Liger-Kernel's eager PyTorch columns on an A100-80GB (BSD 2-Clause, 2024), largest sizes: rotary embedding in bfloat16 takes 2.0 times its
# bytes; RMS norm, bfloat16 with float32 between, 1.34 times, which leaves 1.7 for its three kernels that convert. In float32 alone
# (add and RMS norm, H100) broadcast operands cost nothing: 0.98 to 1.05
UNVECTORIZED, CONVERTED = 2.0, 1.7
# nll_loss runs on one block of 32 threads (Loss.cu: NLL_LOSS_THREADS), which waits for memory in each round: Liger-Kernel's cross entropy, 16384
# rows of 4096 to 16384: 0.5 ms beyond the log_softmax
BLOCK, ROUND = 32, 1e-6
PLAIN = Kind()
ELEMENTWISE = Kind(elementwise=True)
CALLS = {times: ELEMENTWISE.times(times) for times in (UNVECTORIZED, CONVERTED)}
# Bytes of a row of a softmax beyond which it is read once more for the maximum and once for the sum: Liger-Kernel's cross entropy on an A100
# (BSD 2-Clause, 2024), 16384 rows of float32 in PyTorch: 1,100 GB/s with 64 KiB a row, 820 to 830 with 128 KiB and more
ROW = 96 << 10
# Twice over what goes in: once for its mean and variance or its sums, once for the result (aten/src/ATen/native/cuda: Normalization.cuh
# for batch norm, layer_norm_kernel.cu and group_norm_kernel.cu, whose backward passes sum up gradients of weight and bias apart)
KINDS = {
    "native_batch_norm": Kind(1.5, training=5),
    "_native_batch_norm_legit": Kind(1.5, training=5),
    "_batch_norm_with_update": Kind(1.5),
    "cudnn_batch_norm": Kind(1.5, training=5),
    "native_batch_norm_backward": Kind(5 / 3, launches=2),
    "batch_norm_backward": Kind(5 / 3, launches=2),
    "native_group_norm": Kind(1.5, launches=2),
    "native_group_norm_backward": Kind(5 / 3, launches=3),
    "native_layer_norm": Kind(1.0, "layer_norm"),
    "native_layer_norm_backward": Kind(5 / 3, "layer_norm", 3),
    "_fused_rms_norm": Kind(1.0, "layer_norm"),
    "_fused_rms_norm_backward": Kind(5 / 3, "layer_norm", 2),
    "_softmax": Kind(1.0, "softmax", wide=1.8),
    "_log_softmax": Kind(1.0, "softmax", wide=1.8),
    "_softmax_backward_data": Kind(1.0, "softmax", wide=2.05),
    "_log_softmax_backward_data": Kind(1.0, "softmax", wide=2.05),
    "nll_loss_forward": Kind(made=True, rows=0),
    "nll_loss_backward": Kind(made=True, rows=1, launches=2),  # zeros, and a number in each row
    "masked_fill": Kind(2.0, launches=2, elementwise=True),  # a copy, filled in place
    "masked_fill_": ELEMENTWISE,
    "_to_copy": ELEMENTWISE,
    "copy_": ELEMENTWISE,
    # a number a thread, and an index before it (index_select): 2.6 times the rows, read and written, in Liger-Kernel's table
    "embedding": Kind(5.2, made=True, gathers=True),
    # sorted indices, then sums of equal ones: thrust::sort_by_key and four kernels (EmbeddingBackwardKernel.cu)
    "embedding_dense_backward": Kind(1.0, launches=12),
    "index_put_": Kind(1.0, launches=8),
    "_index_put_impl_": Kind(1.0, launches=8),
    "topk": Kind(2.0, launches=4),
    "sort": Kind(6.0, launches=6),
    "nonzero": Kind(1.0, launches=4),
}
