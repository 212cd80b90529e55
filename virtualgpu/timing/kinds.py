"""Kinds of kernels that are bound by memory: how often they move their tensors, and what limits them.

What a kernel takes beside that, by its arithmetic or because a thread waits, is in cycles.py, elementwise.py and the files of each kind (batch_norms.py, norms.py,
pools.py, reductions.py, upsampling.py).
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from virtualgpu.timing import cycles, norms, pools, reductions, upsampling
from virtualgpu.timing.batch_norms import batch_norm, batch_norm_backward
from virtualgpu.timing.elementwise import CONVERTED, WIDENED, chosen, converts, one_by_one, to_close


class Kind(NamedTuple):
    """traffic: bytes really moved over those of all tensors that go in or come out, once. limit: whose share of the bandwidth it has
    (`hardware.achieved`). launches: kernels that the operation is made of. training: at which argument it is told whether this is
    training; where it is not, nothing is read twice. wide: traffic where a row does not fit beside a multiprocessor. elementwise: each
    number comes of those at its own place. made: only what comes out counts. waits: by the arguments, seconds in which it goes through rows
    one after the other. per_cycle: bytes that a multiprocessor moves in one, at most, in the last of its kernels. few: by the arguments, are
    they so few that one kernel does it, and another makes zeros? cycles: of a multiprocessor, for each number of the largest tensor, at
    least; or a function of the arguments and tensors that says how many in all. more: such a function, of what comes on top. own: by the
    card's kernels, the arguments and the tensors, all that it takes, of kernels whose threads are counted (None: by the rest). times: by the
    arguments, how often all of this is done, one after the other. cold: has what goes in left the second-level cache?"""

    traffic: float = 1.0
    limit: str = "memory"
    launches: int = 1
    training: int | None = None
    wide: float | None = None
    elementwise: bool = False
    made: bool = False
    waits: Callable | None = None
    per_cycle: float | None = None
    few: Callable | None = None
    cycles: float | Callable | None = None
    more: Callable | None = None
    own: Callable | None = None
    times: Callable | None = None
    cold: bool = False
    least: float = 0.0  # what `cycles` and `more` come to in a call
    beyond: float = 0.0

    def evaluates(self, args) -> bool:
        """Is this call no training, of a kind that tells the two apart?"""
        return self.training is not None and not args[self.training]

    def in_call(self, args, tensors) -> "Kind":
        """What it is for these arguments, and these tensors that go in or come out."""
        if self.evaluates(args):
            return self._replace(traffic=1.0, launches=1, own=None, least=cycles.EVALUATING * tensors[0].numel())
        if self.own is not None:
            return self if all(tensor.numel() for tensor in tensors) else self._replace(own=None)
        if self.elementwise:
            places, converting = one_by_one(tensors), converts(tensors)
            if converting:
                self = CONVERTING if self is ELEMENTWISE else self._replace(per_cycle=CONVERTED)
            least = 0.0 if self.cycles is None else self._cycles(args, tensors)
            if places is not None:
                widened = WIDENED * tensors[-1].numel() * (converting and tensors[-1].itemsize == 4)
                return self._replace(least=max(least, places.cycles + widened), traffic=self.traffic * places.traffic)
            return self._replace(least=least) if least else self
        if self.wide is not None and tensors[0].dim():
            row = tensors[0].shape[-1] * tensors[0].itemsize
            if row * (len(tensors) - 1) > ROW:  # the backward pass reads two tensors
                self = self._replace(traffic=self.wide)
        if self.cycles is not None:
            self = self._replace(least=self._cycles(args, tensors))
        if self.few is not None and self.few(args):
            return self._replace(launches=2)
        return self if self.more is None else self._replace(beyond=self.more(args, tensors))

    def _cycles(self, args, tensors) -> float:
        each = self.cycles
        return each(args, tensors) if callable(each) else each * max(tensor.numel() for tensor in tensors)


ORDINARY = Kind()  # each tensor moved once, and nothing beside
ELEMENTWISE = Kind(elementwise=True)
CONVERTING = Kind(elementwise=True, per_cycle=CONVERTED)
# Bytes of a row of a softmax beyond which it is read once more for the maximum and once for the sum: Liger-Kernel's cross entropy on an A100
# (BSD 2-Clause, 2024), 16384 rows of float32 in PyTorch: 1,100 GB/s with 64 KiB a row, 820 to 830 with 128 KiB and more; an H100 reads rows
# of 98 KiB once, and of 125 KiB more often
ROW = 112 << 10
# Which arguments are copied first where they do not lie close (contiguous in SoftMax.cu, expect_contiguous in layer_norm_kernel.cu)
COPIED = {
    "_softmax": (0,),
    "_log_softmax": (0,),
    "_log_softmax_backward_data": (0, 1),
    "native_layer_norm": (0,),
    "native_layer_norm_backward": (0, 1),
}


def copied_first(name: str, args) -> list[Tensor]:
    """Of the operation of that name."""
    return [args[at] for at in COPIED[name] if not args[at].is_contiguous()]


def copying(tensor: Tensor) -> Kind:
    """What makes it lie close."""
    places = to_close(tensor)
    return ORDINARY if places is None else ELEMENTWISE._replace(least=places.cycles, traffic=places.traffic)


NEAREST = ("upsample_nearest", "_upsample_nearest_exact")  # which differ by half a place
NEAREST_OWN = {
    "1d": upsampling.nearest,
    "1d_backward": upsampling.nearest_backward,
    "2d": upsampling.nearest,
    "2d_backward": upsampling.nearest_backward,
    "3d": upsampling.nearest_3d,
    "3d_backward": upsampling.nearest_3d_backward,
}

# Twice over what goes in: once for its mean and variance or its sums, once for the result (Normalization.cuh)
KINDS = {
    "native_batch_norm": Kind(1.5, training=5, own=batch_norm),
    "_native_batch_norm_legit": Kind(1.5, training=5, own=batch_norm),
    "_batch_norm_with_update": Kind(1.5, own=batch_norm),
    "cudnn_batch_norm": Kind(1.5, training=5, own=batch_norm),
    "native_batch_norm_backward": Kind(5 / 3, launches=2, own=batch_norm_backward),
    "batch_norm_backward": Kind(5 / 3, launches=2, own=batch_norm_backward),
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
    "max_pool3d_with_indices": Kind(own=pools.maximum_3d),
    "max_pool3d_with_indices_backward": Kind(launches=2, own=pools.maximum_3d_backward),
    "avg_pool3d": Kind(own=pools.average_3d),
    "avg_pool3d_backward": Kind(launches=2, own=pools.average_3d_backward),
    "_adaptive_avg_pool2d": Kind(own=pools.adaptive),
    "_adaptive_avg_pool2d_backward": Kind(launches=2, own=pools.adaptive_backward),
    "upsample_linear1d": Kind(launches=2, own=upsampling.linear),
    "upsample_linear1d_backward": Kind(launches=2, own=upsampling.linear_backward),
    "upsample_trilinear3d": Kind(own=upsampling.trilinear),
    "upsample_trilinear3d_backward": Kind(launches=2, own=upsampling.trilinear_backward),
    "upsample_bilinear2d": Kind(own=upsampling.bilinear),
    "upsample_bilinear2d_backward": Kind(launches=2, own=upsampling.bilinear_backward),
    "upsample_bicubic2d": Kind(launches=2, own=upsampling.bicubic),
    "upsample_bicubic2d_backward": Kind(launches=2, own=upsampling.bicubic_backward),
    **{f"{name}{dims}": Kind(own=own) for name in NEAREST for dims, own in NEAREST_OWN.items()},
    "nll_loss_forward": Kind(made=True, waits=cycles.rounds(0)),
    "nll_loss_backward": Kind(made=True, waits=cycles.rounds(1), launches=2),  # zeros, and a number in each row
    "masked_fill": Kind(2.0, launches=2, elementwise=True),  # a copy, filled in place
    "masked_fill_": ELEMENTWISE,
    "where": Kind(elementwise=True, cycles=chosen),
    "gelu": Kind(elementwise=True, cycles=cycles.GELU),
    "silu": Kind(elementwise=True, cycles=cycles.SILU),
    "native_dropout": Kind(1.15, elementwise=True, cycles=cycles.dropout),
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
    "roll": Kind(cycles=cycles.ROLLED, times=cycles.rolls),
    "cat": Kind(cycles=cycles.joined),
    "stack": Kind(cycles=cycles.joined),
    "constant_pad_nd": Kind(1.6, launches=2),  # filled, then copied into
    # sorted indices, then sums of equal ones: thrust::sort_by_key and four kernels (EmbeddingBackwardKernel.cu)
    "embedding_dense_backward": Kind(1.0, launches=12, few=cycles.few_indices, more=cycles.gradients),
    # sorted, counted and put in order first (EmbeddingBag.cu): 29 in a profile on an H100 (PyTorch 2.11; 8,192 bags of one, dense gradients)
    "_embedding_bag_backward": Kind(1.0, launches=29, more=cycles.gradients_of_bags),
    "index_put": Kind(1.0, launches=9),
    "index_put_": Kind(1.0, launches=8),
    "_index_put_impl_": Kind(1.0, launches=8),
    "topk": Kind(1.0, launches=4, cycles=cycles.top),
    "sort": Kind(1.0, launches=6, cycles=cycles.sorted_rows),
    "nonzero": Kind(1.0, launches=4),
    "select_backward": Kind(launches=2),  # zeros, and a copy into them
    "slice_backward": Kind(launches=2),
    # what C++ makes of several operations (aten/src/ATen/native): ReduceOps.cpp, Distributions.cpp with its checks, Loss.cpp; cuda/Randperm.cu
    "logsumexp": Kind(launches=9),
    "multinomial": Kind(launches=14),
    "binary_cross_entropy_with_logits": Kind(2.0, launches=5),
    "randperm": Kind(launches=12),
    # numbers, and their mean
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"), Kind(launches=2)),
}
