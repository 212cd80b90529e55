"""Kernels of CUDA that know no channels_last: what they return is contiguous, where the CPU's have the layout of their input.

Pads: cuda/ReflectionPad.cu and ReplicationPadding.cu; roll: cuda/TensorTransformations.cu. The others are put together of operations on CUDA
(PixelShuffle.cpp, ChanelShuffle.cpp). Time and bytes are the same; what comes after may take another kernel.
"""

import torch

aten = torch.ops.aten
PADS = [f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (2, 3)]
NAMES = [*PADS, *(f"{pad}_backward" for pad in PADS)]
NAMES += ["pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle", "channel_shuffle", "roll", "glu_backward"]


def _contiguous(func):
    def on_gpu(*args, **kwargs):
        """Call it untracked."""
        return func(*args, **kwargs).contiguous()

    return on_gpu


def _frozen(func):
    def on_gpu(*args):
        """The gradient of what came in is contiguous where running figures are used as they are (an H100, PyTorch 2.11). Call it untracked."""
        first, *others = func(*args)
        return first if first is None or args[7] else first.contiguous(), *others

    return on_gpu


FUNCS = [getattr(aten, name).default for name in NAMES]
OPERATIONS = {func: _contiguous(func) for func in FUNCS}
OPERATIONS[aten.native_batch_norm_backward.default] = _frozen(aten.native_batch_norm_backward.default)
