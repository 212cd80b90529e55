"""Batch norm of images: how long its kernels take in training, each by its own blocks of 512 threads.

**Channels first**, one block has a whole channel: few channels leave most of a large GPU idle, and very many of few numbers take a block's
fixed time each (aten/src/ATen/native/cuda/Normalization.cuh: batch_norm_collect_statistics_kernel, batch_norm_transform_input_kernel and
batch_norm_backward_kernel; cuDNN's bn_fw_tr_1C11_* and bn_bw_1C11_* have the same blocks, and keep a channel's numbers where they fit).
**Channels last**, an image is cut into tiles of 32 channels (the same file, flexible_launch_configs; cuDNN's batchnorm_*_nhwc_semiPersist).
PyTorch takes its own kernels for weights in 16 bits and for bfloat16 (Normalization.cpp), cuDNN's for all else.

All constants are cycles of a multiprocessor, of tests/gpu/h100_profiled.csv (PyTorch 2.11, cuDNN 9.19) unless said.
"""

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from virtualgpu.timing.kernels import Kernels

THREADS = 512


class Loop(NamedTuple):
    """What a block of 512 threads does with a channel or a tile, in cycles. fixed: before and after its steps, in one of which each
    thread has one number. latency: of a step, at least; through: for each block of a multiprocessor, whose others wait meanwhile; lost:
    on top, where numbers come from memory instead of the second-level cache."""

    fixed: float
    latency: float
    through: float
    lost: float

    def seconds(self, card: "Kernels", blocks: int, steps: float, lost: float) -> float:
        """Round after round of as many blocks as fit; lost: the share that the cache no longer has."""
        spec = card.spec
        fit = max(1, spec.limits.threads // THREADS)
        beside = min(fit, -(-blocks // spec.processors))
        step = max(self.latency, self.through * beside) + self.lost * lost
        return card.took(-(-blocks // (spec.processors * fit)) * (self.fixed + steps * step))


# PyTorch's own. Statistics took 0.59 us a step on a V100 (NVIDIA's PyProf, 64 x 64 x 112 x 112) and 0.40 us on an H20 (FlagGems #5754),
# which both read from memory; backward 0.72 us on an H20 (#4086)
STATISTICS, BACKWARD = Loop(4600, 500, 208, 350), Loop(1800, 1330, 560, 430)
# cuDNN's where it reads an image twice, in steps of four (UNROLLED). Others: forward 0.27 us on an H100, 0.35 on its PCIe card, 0.36 on a
# B200 and 0.65 on an A100 (KernelBench, BatchNorm), backward 0.69 us on an H20 (FlagGems #4250)
CUDNN_LOOP, CUDNN_BACKWARD_LOOP, UNROLLED = Loop(1000, 450, 475, 180), Loop(1000, 870, 900, 650), 4
# and where a block keeps a channel's numbers, forward and backward: fixed and, for each block beside it, more; PAIR: of that, where threads
# read two numbers of 16 bits at once. Then cycles for each number, by what they read: 32 bits, 16 bits, or such a pair; lost as above
KEEPING, BESIDE, PAIR = 4000, 1150, 0.66
FORWARD_NUMBER = {"single": 0.52, "half": 0.52, "pair": 0.34}
BACKWARD_NUMBER = {"single": 1.39, "half": 1.1, "pair": 0.57}
FORWARD_LOST = 0.32
# Bytes of a channel, by those of a number: f32 kept 98 KiB and not 128, f16 128 KiB and not 196
KEPT = {4: 112 << 10, 2: 160 << 10}
# The result is written by blocks of 64 threads and more: what starting one takes, and a number (on top, from memory)
BLOCK, NUMBER, NUMBER_LOST = 163, 0.37, 0.22
# Channels last, PyTorch's own: statistics and the result, then both passes of the backward one. Sums of tiles are added up by the last
# block of each, which is in `fixed`
LAST_STATISTICS, LAST_RESULT = Loop(12000, 500, 208, 350), Loop(0, 300, 130, 220)
LAST_SUMS, LAST_GRADIENT = Loop(12000, 400, 140, 100), Loop(0, 480, 200, 130)
# Channels of a tile, how many there are one below the other at most, and numbers of a thread if fewer do
TILE, TILES, EACH = 32, 128, 16
# by cuDNN: cycles for each number, for each byte of it, and how much more that is from memory
CUDNN_LAST, CUDNN_LAST_BACKWARD = (0.35, 0.15, 0.5), (0.4, 0.2, 0.6)


class Image(NamedTuple):
    """shape: [batch, channels, ...]. size: bytes of a number. last: channels last. own: by PyTorch's kernels."""

    shape: torch.Size
    size: int
    last: bool
    own: bool

    @property
    def numbers(self) -> int:
        """In all."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Once."""
        return self.size * self.numbers


def batch_norm(card: "Kernels", args, tensors) -> float | None:
    """Seconds of native_batch_norm(input, weight, ...) in training, its launches included; None where this is not known."""
    return _known(card, _forward, _image(args[0], args[1]))


def batch_norm_backward(card: "Kernels", args, tensors) -> float | None:
    """native_batch_norm_backward(gradient, input, weight, ..., train, eps, mask)."""
    return _known(card, _backward, _image(args[1], args[2], own=not args[7]))


def _image(image, weight, own: bool = False) -> Image | None:
    if image.dim() < 3 or not image.numel():
        return None
    own = own or image.dtype == torch.bfloat16 or _is_half(weight)
    return Image(image.shape, image.itemsize, image.stride(1) == 1 and image.shape[1] > 1, own)


def _is_half(weight) -> bool:
    """Also where it goes to the CPU's kernel in single precision (engine/mixed_batch_norm.py)."""
    return weight is not None and (weight.itemsize == 2 or hasattr(weight, "stands_for_half"))


def _known(card: "Kernels", rule, image: Image | None) -> float | None:
    if image is None:
        return None
    key = rule, image
    seconds = card.known.get(key)
    if seconds is None:
        seconds = card.known[key] = rule(image, card)
    return seconds


def _forward(image: Image, card: "Kernels") -> float:
    launch, nbytes, lost = card.spec.kernel, image.nbytes, card.lost(image.nbytes)
    if image.last:
        if not image.own:
            return 2 * launch + _semi_persistent(CUDNN_LAST, image, card, nbytes, 2)
        blocks, steps = _tiles(image.shape)
        statistics = max(LAST_STATISTICS.seconds(card, blocks, steps, lost), card.streaming(nbytes))
        result = LAST_RESULT.seconds(card, blocks, steps, card.lost(2 * nbytes))
        return 3 * launch + statistics + max(result, card.streaming(2 * nbytes))
    channels = image.shape[1]
    if image.own:
        statistics = max(STATISTICS.seconds(card, channels, _steps(image.shape), lost), card.streaming(nbytes))
        # between the two a small kernel: inverse deviation, running averages
        return 2.5 * launch + statistics + _result(image, card)
    if _kept(image, 1):
        return launch + _keeping(FORWARD_NUMBER, FORWARD_LOST * lost, image, card, 2)
    steps = _cudnn_steps(image.shape, UNROLLED)
    return launch + max(CUDNN_LOOP.seconds(card, channels, steps, lost), card.streaming(3 * nbytes))


def _backward(image: Image, card: "Kernels") -> float:
    launch, nbytes, channels = card.spec.kernel, image.nbytes, image.shape[1]
    lost = card.lost(3 * nbytes)
    if image.last:
        if not image.own:
            return 2 * launch + _semi_persistent(CUDNN_LAST_BACKWARD, image, card, 2 * nbytes, 3)
        blocks, steps = _tiles(image.shape)
        sums = max(LAST_SUMS.seconds(card, blocks, steps, lost), card.streaming(2 * nbytes))
        return 2 * launch + sums + max(LAST_GRADIENT.seconds(card, blocks, steps, lost), card.streaming(3 * nbytes))
    if not image.own and _kept(image, 2):
        return launch + _keeping(BACKWARD_NUMBER, 0.0, image, card, 3)
    loop, steps = (BACKWARD, _steps(image.shape)) if image.own else (CUDNN_BACKWARD_LOOP, _cudnn_steps(image.shape, 1))
    return launch + max(loop.seconds(card, channels, steps, lost), card.streaming(5 * nbytes))


def _steps(shape) -> int:
    """Numbers that one thread works on: as many threads beside each other as an image has places."""
    places = prod(shape[2:])
    wide = _threads(places)
    return -(-places // wide) * -(-shape[0] // (THREADS // wide))


def _threads(places: int) -> int:
    """getNumThreads in Normalization.cuh."""
    return next((width for width in (32, 64, 128, 256) if places <= width), THREADS)


def _cudnn_steps(shape, unrolled: int) -> int:
    """The same of cuDNN's, whose names say how many threads are beside each other: 32, 128 or 512."""
    places = prod(shape[2:])
    wide = 32 if places < 1024 else 128 if places < 4096 else THREADS
    return unrolled * -(-places // (wide * unrolled)) * -(-shape[0] // (THREADS // wide))


def _kept(image: Image, tensors: int) -> bool:
    """Does a block of cuDNN's keep a channel, of so many tensors? (*_singleread, whose numbers stay in registers and shared memory)"""
    channel = image.numbers // image.shape[1] * image.size
    return channel * tensors <= KEPT.get(image.size, KEPT[4])


def _keeping(number: dict[str, float], lost: float, image: Image, card: "Kernels", moved: int) -> float:
    """Rounds of blocks that read each number once."""
    spec, channels = card.spec, image.shape[1]
    pair = image.size == 2 and prod(image.shape[2:]) % 2 == 0
    fit = max(1, spec.limits.threads // THREADS)
    beside = min(fit, -(-channels // spec.processors))
    fixed = (KEEPING + BESIDE * beside) * (PAIR if pair else 1.0)
    each = number["pair" if pair else "half" if image.size == 2 else "single"] + lost * (PAIR if pair else 1.0)
    rounds = -(-channels // (spec.processors * fit))
    cycles = rounds * (fixed + beside * image.numbers / channels * each)
    return max(card.took(cycles), card.streaming(moved * image.nbytes))


def _result(image: Image, card: "Kernels") -> float:
    """batch_norm_transform_input_kernel: of its blocks (batch_norm_cuda_template), or its numbers."""
    batch, channels = image.shape[:2]
    places = prod(image.shape[2:])
    wide = max(_threads(places // 4), min(_threads(places), 64))
    tall = max(64 // wide, 1)
    blocks = channels * max(1, min((256 << 10) // channels, -(-batch // tall)))
    number = NUMBER + NUMBER_LOST * card.lost(2 * image.nbytes)
    return max(max(BLOCK * blocks, number * image.numbers) / card.cycles, card.streaming(2 * image.nbytes))


def _tiles(shape) -> tuple[int, int]:
    """Blocks, and the steps of each, of an image with its channels last."""
    channels, rows = shape[1], prod(shape) // shape[1]
    tall = THREADS // TILE
    below = min(-(-rows // (tall * EACH)), TILES)
    return -(-channels // TILE) * below, -(-rows // (below * tall))


def _semi_persistent(number: tuple[float, float, float], image: Image, card: "Kernels", read: int, moved: int) -> float:
    """cuDNN's for channels last, which keeps what fits. read: bytes that go in."""
    alone, byte, lost = number
    cycles = image.numbers * (alone + byte * image.size * (1 + lost * card.lost(read)))
    return max(cycles / card.cycles, card.streaming(moved * image.nbytes))
