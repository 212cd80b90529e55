"""Kinds of kernels that are bound by memory: how often they move their tensors, and what limits them."""

from collections.abc import Callable
from typing import NamedTuple

from virtualgpu.simulation import norms


class Kind(NamedTuple):
    """traffic: bytes really moved over those of all tensors that go in or come out, once. limit: whose share of the bandwidth it has
    (`hardware.achieved`). launches: kernels that the operation is made of. training: at which argument it is told whether this is
    training; where it is not, nothing is read twice. wide: traffic where a row does not fit beside a multiprocessor. blocks: by the
    arguments, what the kernel takes at least (`norms`)."""

    traffic: float = 1.0
    limit: str = "memory"
    launches: int = 1
    training: int | None = None
    wide: float | None = None
    blocks: Callable | None = None

    def in_call(self, args, tensors) -> "Kind":
        """What it is for these arguments, and these tensors that go in or come out."""
        if self.training is not None and not args[self.training]:
            return PLAIN
        if self.wide is not None and tensors[0].dim() and tensors[0].shape[-1] * tensors[0].itemsize > ROW:
            return self._replace(traffic=self.wide)
        return self


PLAIN = Kind()
# Bytes of a row of a softmax beyond which it is read once more for the maximum and once for the sum: Liger-Kernel's cross entropy on an A100
# (BSD 2-Clause, 2024), 16384 rows of float32 in PyTorch: 1,100 GB/s with 64 KiB a row, 820 to 830 with 128 KiB and more
ROW = 96 << 10
# Twice over what goes in: once for its mean and variance or its sums, once for the result (aten/src/ATen/native/cuda: Normalization.cuh
# for batch norm, layer_norm_kernel.cu and group_norm_kernel.cu, whose backward passes sum up gradients of weight and bias apart)
KINDS = {
    "native_batch_norm": Kind(1.5, training=5, blocks=norms.forward),
    "_native_batch_norm_legit": Kind(1.5, training=5, blocks=norms.forward),
    "_batch_norm_with_update": Kind(1.5, blocks=norms.forward),
    "cudnn_batch_norm": Kind(1.5, training=5, blocks=norms.forward),
    "native_batch_norm_backward": Kind(5 / 3, launches=2, blocks=norms.backward),
    "batch_norm_backward": Kind(5 / 3, launches=2),
    "native_group_norm": Kind(1.5, launches=2),
    "native_group_norm_backward": Kind(5 / 3, launches=3),
    "native_layer_norm": Kind(1.0, "layer_norm"),
    "native_layer_norm_backward": Kind(5 / 3, "layer_norm", 3),
    "_fused_rms_norm": Kind(1.0, "layer_norm"),
    "_fused_rms_norm_backward": Kind(5 / 3, "layer_norm", 2),
    "_softmax": Kind(1.0, "softmax", wide=1.8),
    "_log_softmax": Kind(1.0, "softmax", wide=1.8),
    "_softmax_backward_data": Kind(1.0, "softmax", wide=5 / 3),
    "_log_softmax_backward_data": Kind(1.0, "softmax", wide=5 / 3),
    # sorted indices, then sums of equal ones: thrust::sort_by_key and four kernels (EmbeddingBackwardKernel.cu)
    "embedding_dense_backward": Kind(1.0, launches=12),
    "index_put_": Kind(1.0, launches=8),
    "_index_put_impl_": Kind(1.0, launches=8),
    "topk": Kind(2.0, launches=4),
    "sort": Kind(6.0, launches=6),
    "nonzero": Kind(1.0, launches=4),
}
