"""1x1 convolutions on a Hopper, on tensor cores: products of matrices, by cuBLAS's kernels where the stride is 1 and by cuDNN's else.

Stride 1: channels last, the positions of all images are the rows of one product; first, each image is a product by itself, and the parts of a weight's
gradient, one an image, are summed up by another kernel (reduce_wgrad_nchw_helper). Larger strides: kernels for channels last (sm90_xmma_.._implicit_gemm),
so that images with their channels first are converted before and after.

From 918 convolutions on an H100 (cuDNN 9.19, torch.profiler: tests/gpu/h100_convolutions.csv).
"""

from virtualgpu.hardware.datasheet import TF32
from virtualgpu.timing.hopper import reordering
from virtualgpu.timing.hopper.convolution import Convolution, Sizes
from virtualgpu.timing.kernels import Kernels, together
from virtualgpu.timing.products import Product, busy

# Multiplying and moving pass side by side, though not wholly: their times are added as powers. The gradient of a weight, of few tiles with long sums, reaches
# so much of the bandwidth. What is written is no faster for the second-level cache: to so much of what the memory takes
BESIDE, READ, WRITTEN = 3, 0.85, 1.1
# In TF32 cuBLAS takes mma.sync (cutlass_80_tensorop_s1688gemm) up to so many multiplications a multiprocessor, and wgmma (sm90_xmma_gemm) for more: where both
# matrices lie along the sum, and else. What they reach of the products that `products` knows
LARGE_ALONG, LARGE = 3.2e6, 20e6
OLD_TF32, NEW_TF32 = 0.85, 0.95
# reduce_wgrad_nchw_helper: so much of a launch, and cycles that it waits for each image
SUMMING, WAIT = 0.6, 61
# Beyond the stride of 1: cycles that cuDNN's take before and after, of 16 bits and of TF32, and what they reach of a product. Of an image's gradient all
# places are written, of which those between are zero, to so much of the bandwidth
START = {"forward": (6500, 6500), "image": (13000, 13000), "weight": (5000, 30000)}
REACHED, SPREAD = {"forward": 1.0, "image": 0.7, "weight": 0.8}, 0.85


def seconds(kernels: Kernels, convolution: Convolution) -> float:
    """With its launches."""
    of = convolution.sizes
    if of.places == of.places_made:
        return _of_cublas(kernels, of)
    first = [tensor for tensor in (convolution.image, convolution.made) if reordering.is_first(tensor)]
    return _of_cudnn(kernels, of) + sum(reordering.seconds(kernels, tensor) for tensor in first)


def _of_cublas(kernels: Kernels, of: Sizes) -> float:
    moved = of.size * (of.images * of.places * (of.read + of.made) + of.read * of.made)
    summed = 0.0
    if not of.last and of.way == "weight":
        parts = 4 * of.images * of.read * of.made
        moved += parts
        summed = SUMMING * kernels.spec.kernel + kernels.took(WAIT * of.images) + kernels.streaming(parts)
    return kernels.spec.kernel + _beside(kernels, of, _product(of, kernels.spec.processors), moved) + summed


def _product(of: Sizes, processors: int) -> Product:
    """As cuBLAS is asked for it, channels last and first."""
    images, read, made, places = of.images, of.read, of.made, of.places_made
    if of.last:
        positions = images * places
        sizes = {
            "forward": (positions, made, read),
            "image": (positions, read, made),
            "weight": (made, read, positions),
        }
        asked = 1, *sizes[of.way]
        rows, along = (read, made), {"forward": 2, "image": 1, "weight": 0}[of.way]
    else:
        sizes = {"forward": (made, places, read), "image": (read, places, made), "weight": (made, read, places)}
        asked = images, *sizes[of.way]
        rows, along = (places, places if of.way == "weight" else read), {"forward": 1, "image": 0, "weight": 2}[of.way]
    share = 1.0
    if of.key == TF32:
        each = images * places * read * made / processors
        along, share = (2, NEW_TF32) if each > (LARGE_ALONG if along == 2 else LARGE) else (0, OLD_TF32)
    return Product(*asked, of.key, 0, together(of.size, *rows), share, along)


def _beside(kernels: Kernels, of: Sizes, product: Product, moved: float) -> float:
    moving = kernels.streaming(moved)
    if of.way == "weight":
        moving /= READ
    else:
        channels, places = (of.read, of.places) if of.way == "image" else (of.made, of.places_made)
        written = of.size * of.images * places * channels
        moving = max(moving, WRITTEN * written / kernels.bandwidth["memory"])
    return (busy(kernels, product) ** BESIDE + moving**BESIDE) ** (1 / BESIDE)


def _of_cudnn(kernels: Kernels, of: Sizes) -> float:
    read, made = of.images * of.places * of.read, of.images * of.places_made * of.made
    touched = read if of.way == "image" else of.images * of.places_made * of.read
    product = _product(of._replace(last=True), kernels.spec.processors)._replace(share=REACHED[of.way], along=2)
    moved = of.size * (touched + made) / (SPREAD if of.way == "image" else 1.0)
    multiplying = kernels.took(START[of.way][of.key == TF32]) + _beside(kernels, of, product, moved)
    return kernels.spec.kernel + multiplying
