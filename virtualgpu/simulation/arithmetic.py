"""How long an operation that multiplies takes on a card: products of matrices, convolutions, attention, recurrent layers.

`seconds` is asked with the operation's own arguments; what it finds in them is a few sizes, which `kernels` turns into time.
"""

from collections.abc import Callable
from math import prod

import torch

from virtualgpu.hardware.datasheet import TF32
from virtualgpu.simulation.kernels import DIRECT, WINOGRAD, Kernels

ROW = 16  # bytes: what a row of a matrix should be a multiple of (NVIDIA, "Matrix Multiplication Background User's Guide")
CHANNELS = 8  # tensor cores take so many at once; fewer are filled up
# A depthwise convolution reaches so much of the bandwidth and of the float32 FLOP/s: RepLKNet (arXiv 2203.06717) table 1, PyTorch on a
# 2080 Ti, 64 x 384 channels, forward: 36 % with a kernel of 3, 8 % of the FLOP/s with 7 and more
DEPTHWISE_BANDWIDTH, DEPTHWISE_FLOPS = 0.36, 0.08
# cuDNN's convolutions run on the instructions of Ampere, with which a Hopper reaches 63 % of its peak (arXiv 2402.13499); a Blackwell is
# taken to be like it
OLD_INSTRUCTIONS = 0.63
SHORT = 100  # keys: attention over so many reaches half of its share (FlashAttention 3, figure 5: 309 at 512 keys, 370 at 16384)
# The memory-efficient kernels, over products of the same type: xformers' benchmarks on an A100 (64 x 16 heads of 64 over 1024 keys:
# 164 TFLOPS forward, 61 to 68 backward in float16; 47 and 26 in float32)
EFFICIENT, EFFICIENT_TF32 = {"forward": 0.68, "backward": 0.28}, {"forward": 0.42, "backward": 0.23}
STEP = 9e-6  # of a recurrent layer, one step over time: two kernels that wait for each other


def seconds(kernels: Kernels, name: str, args, tensors, flops: float, moved: float, key, share: float = 1.0) -> float:
    """One kernel, or the few that the operation is made of.

    name: of the operation. tensors: all that it reads and writes. flops, moved: by their counts. key: into Spec.rates. share: of
    the FLOPs, where values leave some out.
    """
    rule = None if kernels.peak else RULES.get(name)
    if rule is None:
        return kernels.plain(flops * share, moved, key)
    return rule(kernels, args, tensors, flops * share, moved, key)


def _matrices(at: int) -> Callable:
    def rule(kernels: Kernels, args, tensors, flops, moved, key) -> float:
        """[count, rows, length] times [count, length, columns], from argument `at` on."""
        left, right = args[at], args[at + 1]
        count = left.shape[0] if left.dim() == 3 else 1
        rows, length, columns = left.shape[-2], left.shape[-1], right.shape[-1]
        if left.is_complex():
            count *= 4
        aligned = columns * left.itemsize % ROW == 0 and all(
            max(matrix.stride()[-2:]) * matrix.itemsize % ROW == 0 for matrix in (left, right)
        )
        return kernels.spec.kernel + kernels.multiplying(count, rows, columns, length, key, moved, aligned)

    return rule


def _convolution(kernels: Kernels, args, tensors, flops, moved, key) -> float:
    image, weight = args[:2]
    result = tensors[-1]
    transposed, groups = args[6], args[8] if len(args) > 8 else 1
    made, read = (image, result) if transposed else (result, image)
    length = weight.shape[0 if transposed else 1] // (groups if transposed else 1) * prod(weight.shape[2:])
    if _is_depthwise(weight, groups):
        return _depthwise(kernels.spec, weight, made, moved)
    return _of_an_image(kernels, "forward", made, read, weight, length, args[3], groups, key, moved)


def _convolution_backward(kernels: Kernels, args, tensors, flops, moved, key) -> float:
    gradient, image, weight, _, stride, _, _, transposed, _, groups, mask = args[:11]
    moved = gradient.itemsize * (gradient.numel() + image.numel() + weight.numel())  # by each of the two products
    total = 0.0
    if _is_depthwise(weight, groups):
        total += sum(mask[:2]) * _depthwise(kernels.spec, weight, gradient, moved)
    else:
        if mask[0]:
            steps = stride if len(stride) > 1 else (*stride, *stride)[: weight.dim() - 2]
            reach = prod(weight.shape[2:]) / (1 if transposed else prod(steps))
            channels = weight.shape[1 if transposed else 0] // (1 if transposed else groups)
            length = max(1, int(channels * reach))
            total += _of_an_image(kernels, "image", image, gradient, weight, length, stride, groups, key, moved)
        if mask[1]:
            sizes = weight.shape[1] * prod(weight.shape[2:]), weight.shape[0] // groups, _positions(gradient)
            total += _one_convolution(kernels, "weight", sizes, (image, gradient), weight, stride, groups, key, moved)
    if len(mask) > 2 and mask[2]:
        total += kernels.spec.kernel + gradient.nbytes / kernels.bandwidth["memory"]
    return total


def _positions(image) -> int:
    return image.shape[0] * prod(image.shape[2:])


def _of_an_image(kernels, which, made, read, weight, length, stride, groups, key, moved) -> float:
    """The image `made` [batch, channels, *size] from `read`: each of its numbers is a sum of `length` products."""
    if _on_tensor_cores(kernels.spec, key):
        length = -(-length // CHANNELS) * CHANNELS
    sizes = _positions(made), made.shape[1] // groups, length
    return _one_convolution(kernels, which, sizes, (made, read), weight, stride, groups, key, moved)


def _one_convolution(kernels, which, sizes, images, weight, stride, groups, key, moved) -> float:
    """As a product of these sizes (rows, columns, length), one for each group."""
    tensor_cores = _on_tensor_cores(kernels.spec, key)
    taken = kernels.multiplying(groups, *sizes, key, moved)
    method = _method(kernels.spec, which, weight, stride, key, tensor_cores)
    return kernels.spec.kernel + taken * method + _converting(kernels, tensor_cores, *images)


def _is_depthwise(weight, groups: int) -> bool:
    return groups > 1 and weight.shape[1] == 1


def _depthwise(spec, weight, result, moved) -> float:
    flops = 2 * result.numel() * prod(weight.shape[2:])
    return spec.kernel + max(
        moved / (spec.bandwidth * DEPTHWISE_BANDWIDTH), flops / (spec.rates[torch.float32] * DEPTHWISE_FLOPS)
    )


def _method(spec, which: str, weight, stride, key, tensor_cores: bool) -> float:
    """What cuDNN's way takes over a plain product of that type."""
    if tensor_cores:
        return 1.0 / OLD_INSTRUCTIONS if spec.capability[0] in (9, 10) else 1.0
    if key != torch.float32:
        return 1.0
    if tuple(weight.shape[2:]) == (3, 3) and set(stride) == {1}:
        return WINOGRAD
    return DIRECT[which]


def _on_tensor_cores(spec, key) -> bool:
    return key in spec.rates and (key == TF32 or key in (torch.float16, torch.bfloat16)) and spec.capability[0] >= 7


def _converting(kernels: Kernels, tensor_cores: bool, *images) -> float:
    """Channels first to last, and back: each image is read and written once more. For TF32 cuDNN has kernels that take them first
    (sm80_xmma_..._tf32f32_..._nchw)."""
    if not tensor_cores:
        return 0.0
    first = [
        image
        for image in images
        if image.dim() > 3 and image.itemsize == 2 and image.stride(1) != 1 and image.shape[1] > 1
    ]
    return sum(kernels.spec.kernel + 2 * image.nbytes / kernels.bandwidth["memory"] for image in first)


def _attention(which: str, efficient: bool = False) -> Callable:
    def rule(kernels: Kernels, args, tensors, flops, moved, key) -> float:
        keys = args[1].shape[2]
        spec = kernels.spec
        if (
            efficient and key == torch.float32 and TF32 in spec.rates
        ):  # its kernels for Ampere multiply single precision so in any case
            key, reached = TF32, EFFICIENT_TF32[which] * kernels.achieved.product(TF32)
        elif efficient:
            reached = EFFICIENT[which] * kernels.achieved.product(key)
        else:
            reached = kernels.achieved.attention[which]
        reached *= keys / (keys + SHORT)
        peak = spec.rates.get(key, spec.rates[torch.float32])
        return spec.kernel * (1 if which == "forward" else 3) + max(
            flops / (peak * reached), moved / kernels.bandwidth["memory"]
        )

    return rule


def _recurrent(passes: int) -> Callable:
    def rule(kernels: Kernels, args, tensors, flops, moved, key) -> float:
        steps = args[0].shape[0] if args[0].dim() == 3 else 1
        return kernels.plain(flops, moved, key) + passes * steps * STEP

    return rule


FORWARD, BACKWARD = _attention("forward"), _attention("backward")
EFFICIENT_FORWARD, EFFICIENT_BACKWARD = _attention("forward", True), _attention("backward", True)
RULES: dict[str, Callable] = {
    "mm": _matrices(0),
    "bmm": _matrices(0),
    "addmm": _matrices(1),
    "baddbmm": _matrices(1),
    "_scaled_mm": _matrices(0),
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": FORWARD,
    "_scaled_dot_product_efficient_attention": EFFICIENT_FORWARD,
    "_scaled_dot_product_cudnn_attention": FORWARD,
    "_scaled_dot_product_flash_attention_backward": BACKWARD,
    "_scaled_dot_product_efficient_attention_backward": EFFICIENT_BACKWARD,
    "_scaled_dot_product_cudnn_attention_backward": BACKWARD,
    "flex_attention": FORWARD,
    "flex_attention_backward": BACKWARD,
    "_cudnn_rnn": _recurrent(1),
    "_cudnn_rnn_backward": _recurrent(2),
}
