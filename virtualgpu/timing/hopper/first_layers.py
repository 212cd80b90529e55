"""First layers on a Hopper, of fewer than 8 channels read, in 16 bits or TF32: cuDNN's kernels and those around them.

Short sums over channels that lie first are left to the other cores (implicit_convolve_sgemm, wgrad_alg0_engine). Else the channels are filled up, to 8 (mma.sync's
loads, cutlass_tensorop) or 4 (sm80_xmma_.._indexed_wo_smem, TF32), by kernels that put them last as well, and what was made is put back.

From 432 convolutions of 9 such layers, those of well-known models, on an H100 (cuDNN 9.19, torch.profiler: tests/gpu/h100_convolutions.csv). All in cycles of a multiprocessor.
"""

import math

from virtualgpu.hardware.datasheet import BFLOAT16, FLOAT16, TF32
from virtualgpu.timing.hopper import reordering
from virtualgpu.timing.hopper.convolution import Convolution, Sizes
from virtualgpu.timing.kernels import Kernels

FEWER = 8  # channels read: filled up to these
# The other cores: for each product; of one channel for each place of 32 channels made at least, in 16 bits and TF32
DIRECT, COLUMNS, LEAST = 0.0385, 32, (38, 50)
# wgrad_alg0_engine: before and after, and for each place of 32 channels, with a stride of 1 and more
ALG0_START, ALG0 = 30000, (33, 59)
# Products of a sum that are left to them, channels first and last, of fewer channels than FILLED
SHORT, SHORT_LAST = 27, 48
FILLED = 4
# wo_smem, for each place of 32 channels, and each number of its sum, channels filled to 4; in 16 bits and TF32
SPARSE, SPARSE_NUMBER = (4, 9), (0.33, 0.28)
# A 7x7 has kernels of its own in float16 (.._image_first_layer): for each number of such a sum, and for each place of an image, of which so many blocks, two a
# multiprocessor, make a part of the gradient of a weight of 64 channels
OWN, OWN_NUMBER, OWN_PLACE, OWN_BLOCKS = 49, 0.1, 10.4, 8
# cutlass_tensorop: a step of 32 numbers of the sum of 128 x 128 results, channels filled to 8. Longer sums than so many places of a kernel are left to it
TILE, STEP, FORWARD_STEP, LONG = 128, 32, 2500, 128
# A step of 32 places of 128 x 64 of the weight's gradient, in 16 bits and TF32, and of 128 x 128, in 16 bits; before and after all of them; for each part of it that
# ReduceSplitK sums up
WEIGHT_STEP, WIDE_STEP, WEIGHT_START, SUMMED = (620, 1300), 970, 14000, 158
# A place of an image filled up: channels first (nchwToNhwcKernel); last (nhwcAddPaddingKernel) it takes more than the memory would
FILLED_FIRST, FILLED_LAST = 10.7, 1.35


class FirstLayer(Sizes):
    """One of these."""

    @property
    def results(self) -> int:
        """Places of all images made."""
        return self.images * self.places_made

    @property
    def columns(self) -> int:
        """Places of 32 channels."""
        return self.results * -(-self.made // COLUMNS)


def seconds(kernels: Kernels, convolution: Convolution) -> float:
    """Forward, or of the gradient of the weight, with its launches."""
    of = FirstLayer(*convolution.sizes)
    direct = kernels.spec.kernel + _direct(kernels, of)
    if _is_direct(of):
        return direct
    converted = _forward(kernels, of) if of.way == "forward" else _weight(kernels, of)
    return min(direct, converted) if of.key == TF32 and of.way == "forward" and not of.last else converted


def _direct(kernels: Kernels, of: FirstLayer) -> float:
    if of.way == "weight":
        return kernels.took(ALG0_START) + of.columns * ALG0[of.places > of.places_made] / kernels.cycles
    least = LEAST[of.key == TF32] if of.read == 1 else 0
    return of.columns * max(least, DIRECT * COLUMNS * of.read * of.kernel) / kernels.cycles


def _is_direct(of: FirstLayer) -> bool:
    """What the other cores are left."""
    length = of.read * of.kernel
    if of.read >= FILLED or length > SHORT_LAST:
        return False
    if of.way == "weight":
        return of.key == TF32
    if of.read == 1:
        return True
    if not of.last:
        return length <= SHORT and of.key != TF32
    return of.key == BFLOAT16 or (of.apart and of.key == FLOAT16)


def _forward(kernels: Kernels, of: FirstLayer) -> float:
    launch, padded = kernels.spec.kernel, of.key == BFLOAT16 or of.kernel > LONG
    if padded:
        tiles = -(-of.results // TILE) * max(0.5, -(-of.made // TILE * 2) / 2 if of.made > TILE // 2 else 0.5)
        rounds = math.ceil(tiles / kernels.spec.processors)
        busy = kernels.took(rounds * FORWARD_STEP * (1 + -(-of.kernel * FEWER // STEP)))
    elif of.key == FLOAT16 and of.kernel == OWN:
        padded = True
        busy = of.columns * OWN_NUMBER * FILLED * of.kernel / kernels.cycles
    else:
        busy = (
            of.columns * (SPARSE[of.key == TF32] + SPARSE_NUMBER[of.key == TF32] * FILLED * of.kernel) / kernels.cycles
        )
    if of.last:
        around = _filling(kernels, of) if padded or of.key == TF32 else 0.0
        return launch + busy + around + (launch if around else 0.0)
    # TF32's kernels for whole loads write the channels first by themselves
    back = (
        0.0 if of.key == TF32 and of.read == FILLED else reordering.of_numbers(kernels, of.results * of.made, of.size)
    )
    return 2 * launch + busy + _filling(kernels, of) + back


def _weight(kernels: Kernels, of: FirstLayer) -> float:
    filled, processors = FILLED if of.key == TF32 else FEWER, kernels.spec.processors
    wide = of.key != TF32 and of.made > TILE // 2
    tiles = -(-of.kernel * filled // TILE) * -(-of.made // (TILE if wide else TILE // 2))
    multiplying = tiles * of.results / STEP * (WIDE_STEP if wide else WEIGHT_STEP[of.key == TF32]) / kernels.cycles
    if of.key == FLOAT16 and of.kernel == OWN:
        rounds = math.ceil(OWN_BLOCKS * -(-of.made // (TILE // 2)) * of.images / (2 * processors))
        multiplying = kernels.took(rounds * OWN_PLACE * of.places_made)
    moving = kernels.streaming(of.size * (of.images * of.places * filled + of.results * of.made))
    parts = max(1, 2 * processors // tiles)
    busy = kernels.took(WEIGHT_START + SUMMED * parts) + math.hypot(multiplying, moving)
    gradient = 0.0 if of.last and of.key != TF32 else reordering.of_numbers(kernels, of.results * of.made, of.size)
    return 2 * kernels.spec.kernel + busy + _filling(kernels, of) + gradient


def _filling(kernels: Kernels, of: FirstLayer) -> float:
    """The image: a kernel that clears what is to hold it, and one that copies it there."""
    places = of.images * of.places
    filled = FILLED if of.key == TF32 or (of.key == FLOAT16 and of.kernel == OWN) else FEWER
    clearing = kernels.filling(of.size * places * filled)
    if not of.last:
        return kernels.spec.kernel + clearing + FILLED_FIRST * places / kernels.cycles
    return kernels.spec.kernel + clearing + FILLED_LAST * kernels.streaming(of.size * places * (of.read + filled))
