"""Convolutions, plain, grouped, depthwise and transposed, of 1, 2 or 3 dimensions: their FLOPs, and how long they take on a card.

FLOPs: each number of the weight meets each place of the image once: of the result, or, transposed, of what goes in. A weight is [channels,
channels / groups, *kernel], so that groups count by its size alone. Of the three sums of such products (the result, the gradient of
what went in, that of the weight) none has more terms than another; `torch.utils.flop_counter` leaves groups out of the third.

Seconds: cuDNN's ways of doing it, by the order of channels, type and size of the kernel. A convolution is a product of matrices
(implicit GEMM); those of 3x3 in single precision take fewer multiplications (Winograd: `winograd`, and by a share for gradients of the
weight). Of a 1x1 convolution the weight is multiplied with the image as it lies, whatever its order of channels. Larger ones want the channels last on
tensor cores, and convert images that have them first: of Volta's, Turing's and TF32's kernels only what is read, as they write channels
first ("..._nhwc2nchw", "..._nhwckrsc_nchw" in traces); Ampere's kernels for 16 bits have no such form, so that what they made is
converted as well. On a Hopper most go by rules for each kernel (`hopper`).

`python -m tests.accuracy.convolutions` sets them beside others' (DeepBench, KernelBench, NeuSight, dlperf, kineto, spio).
"""

from math import prod

from virtualgpu.hardware.datasheet import BFLOAT16, FLOAT16, FLOAT32, TF32
from virtualgpu.timing import depthwise, hopper, reductions, winograd
from virtualgpu.timing.hopper.convolution import Convolution
from virtualgpu.timing.kernels import Kernels

# Tensor cores take so many channels at once, and more are filled up to a multiple. Fewer are left to the other cores
# (implicit_convolve_sgemm in traces): DeepBench's and KernelBench's first layers, of 1 and 3 channels, in float16 and TF32
CHANNELS = 8
# Their time over that of a plain product of the same sizes and type, by cuDNN's way of doing it, forward and for the gradients of the image and
# of the weight: DeepBench's, V100, T4, P100 and 1080 Ti, medians. Directly; 1x1 on tensor cores loses as much as without; 3x3 of stride 1 in
# single precision by Winograd, where `winograd` has no rule. Larger ones on tensor cores are plain products
DIRECT = {"forward": 1.1, "image": 1.4, "weight": 1.6}
WINOGRAD = 0.62
# Narrower groups are done side by side as one of so many channels, zeros between them (cuDNN's kernels "tilesize64x64x64_..._g8"): spio's
# grouped convolution, 3x3 over 64 channels in groups of 8, takes what a dense one does at the rate of large products (73 TFLOPS counted so on
# an RTX 3090, 144 on a 4090)
MERGED = 64


def forward_flops(x, weight, bias, stride, padding, dilation, transposed, *args, out_val=None, **kwargs) -> int:
    """Of convolution and _convolution. x: [batch, channels, *size], as is their result `out_val`."""
    return _flops(x if transposed else out_val, weight)


def backward_flops(
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask, **kwargs
) -> int:
    """Of convolution_backward: for each gradient that `output_mask` asks for as much as forwards; the bias's is a sum, no product."""
    return sum(output_mask[:2]) * _flops(x if transposed else grad, weight)


def slow_forward_flops(x, weight, *args, out_val=None, **kwargs) -> int:
    """Of _slow_conv2d_forward: a plain convolution."""
    return _flops(out_val, weight)


def _flops(image, weight) -> int:
    """Of one such sum, with image [batch, channels, *size]: a product and an addition are two."""
    return 2 * image.shape[0] * prod(image.shape[2:]) * weight.numel()


def forward_seconds(kernels: Kernels, args, tensors, flops, moved, key) -> float:
    """convolution, plain or transposed."""
    image, weight = args[:2]
    result = tensors[-1]
    transposed, groups = args[6], args[8] if len(args) > 8 else 1
    made, read = (image, result) if transposed else (result, image)
    length = weight.shape[1] * prod(weight.shape[2:])
    adds_bias = False
    if depthwise.is_depthwise(weight, groups):
        asked = depthwise.Convolution(image, weight, args[3], args[5])
        adds_bias = asked.by_pytorch
        seconds = depthwise.seconds(kernels, "forward", asked, made, read, moved)
    else:
        own = _by_a_rule(kernels, "forward", image, result, weight, args[3], args[5], transposed, groups, key)
        seconds = own or _of_an_image(kernels, "forward", made, read, weight, length, args[3], groups, key, moved)
    # a bias is added to cuDNN's result by a kernel of its own
    if args[2] is not None and not adds_bias:
        seconds += kernels.spec.kernel + 2 * result.nbytes / kernels.bandwidth["memory"]
    return seconds


def backward_seconds(kernels: Kernels, args, tensors, flops, moved, key) -> float:
    """convolution_backward: of the image, the weight and the bias, as its mask says."""
    gradient, image, weight, _, stride, _, dilation, transposed, _, groups, mask = args[:11]
    moved = gradient.itemsize * (gradient.numel() + image.numel() + weight.numel())  # by each of the two products
    total = 0.0
    if depthwise.is_depthwise(weight, groups):
        asked = depthwise.Convolution(image, weight, stride, dilation)
        if mask[0]:
            total += depthwise.seconds(kernels, "image", asked, image, gradient, moved)
        if mask[1]:
            total += depthwise.seconds(kernels, "weight", asked, gradient, image, moved)
    else:
        settings = weight, stride, dilation, transposed, groups, key
        if mask[0]:
            steps = stride if len(stride) > 1 else (*stride, *stride)[: weight.dim() - 2]
            reach = prod(weight.shape[2:]) / (1 if transposed else prod(steps))
            channels = weight.shape[1 if transposed else 0] // (1 if transposed else groups)
            length = max(1, int(channels * reach))
            total += _by_a_rule(kernels, "image", image, gradient, *settings) or _of_an_image(
                kernels, "image", image, gradient, weight, length, stride, groups, key, moved
            )
        if mask[1]:
            total += _by_a_rule(kernels, "weight", image, gradient, *settings) or _of_the_weight(
                kernels, gradient, image, weight, stride, groups, key, moved
            )
    if len(mask) > 2 and mask[2]:
        total += _of_the_bias(kernels, gradient)
    return total


def _of_the_bias(kernels: Kernels, gradient) -> float:
    """Its gradient: a sum of PyTorch's over all but the channels."""
    if kernels.peak or gradient.dim() < 3:
        return kernels.spec.kernel + gradient.nbytes / kernels.bandwidth["memory"]
    dims = (0, *range(2, gradient.dim()))
    return reductions.plan(gradient, dims, kernels.spec).seconds(kernels, gradient.nbytes)


def _positions(image) -> int:
    return image.shape[0] * prod(image.shape[2:])


def _by_a_rule(kernels, which, image, made, weight, stride, dilation, transposed, groups, key) -> float | None:
    """On a Hopper, and of 3x3 in single precision before: None where there is none. which: forward, or the gradient of the "image" or of
    the "weight"."""
    settings = stride, dilation, groups, _key(kernels, key)
    if not (transposed or kernels.hopper) and winograd.applies(kernels, which, image, weight, *settings):
        return winograd.seconds(kernels, *((image, made) if which == "image" else (made, image)))
    if transposed:
        image, made, which = made, image, {"forward": "image", "image": "forward"}.get(which, which)
    return hopper.seconds(kernels, Convolution(which, image, made, weight, stride, dilation, groups, key))


def _of_an_image(kernels, which, made, read, weight, length, stride, groups, key, moved) -> float:
    """The image `made` [batch, channels, *size] from `read`: each of its numbers is a sum of `length` products."""
    if _on_tensor_cores(kernels.spec, key):
        length = -(-length // CHANNELS) * CHANNELS
    sizes = _positions(made), made.shape[1] // groups, length
    return _one(kernels, which, sizes, (made, read), weight, stride, groups, key, moved)


def _of_the_weight(kernels, gradient, image, weight, stride, groups, key, moved) -> float:
    """Its gradient: each of its numbers is a sum over all places of the images."""
    sizes = weight.shape[1] * prod(weight.shape[2:]), weight.shape[0] // groups, _positions(gradient)
    return _one(kernels, "weight", sizes, (image, gradient), weight, stride, groups, key, moved)


def _one(kernels, which, sizes, images, weight, stride, groups, key, moved) -> float:
    """As a product of these sizes (rows, columns, length), one for each group. images: made and read, or both read."""
    key = _key(kernels, key)
    spec, tensor_cores = kernels.spec, _on_tensor_cores(kernels.spec, key)
    if tensor_cores and groups == 1 and min(images[1].shape[1], weight.shape[1]) < CHANNELS:
        key, tensor_cores = FLOAT32, False
    share = 1 / _method(which, weight, stride, key, tensor_cores)
    together = _together(sizes[1], weight, groups) if tensor_cores else 1
    if together > 1:
        seconds = kernels.plain(2 * groups * prod(sizes) * together / share, moved, key)
    else:
        seconds = spec.kernel + kernels.multiplying(groups, *sizes, key, moved, share=share)
    return seconds + (_converting(kernels, which, images[0], images[1], weight, stride, key) if tensor_cores else 0.0)


def _together(columns: int, weight, groups: int) -> int:
    """So many groups are done side by side."""
    together = 1
    while groups % (2 * together) == 0 and 2 * together * min(columns, weight.shape[1]) <= MERGED:
        together *= 2
    return together


def _method(which: str, weight, stride, key, tensor_cores: bool) -> float:
    """What cuDNN's way takes over a plain product of that type."""
    pointwise, square = prod(weight.shape[2:]) == 1, tuple(weight.shape[2:]) == (3, 3) and set(stride) == {1}
    if tensor_cores:
        return DIRECT[which] if pointwise else 1.0
    if key != FLOAT32:
        return 1.0
    return WINOGRAD if square else DIRECT[which]


def _key(kernels: Kernels, key):
    """What a card before Ampere makes of TF32."""
    return FLOAT32 if key == TF32 and key not in kernels.spec.rates else key


def _on_tensor_cores(spec, key) -> bool:
    return key in spec.rates and (key == TF32 or key in (FLOAT16, BFLOAT16)) and spec.capability[0] >= 7


def _converting(kernels: Kernels, which: str, made, read, weight, stride, key) -> float:
    """Channels first to last, and back: each image is read and written once more, and the weight."""
    if prod(weight.shape[2:]) == 1 and (set(stride) == {1} or kernels.spec.capability[0] < 8):
        return 0.0
    written_back = which != "weight" and key != TF32 and kernels.spec.capability[0] >= 8
    images = (made, read, weight) if written_back else (read, weight)
    if which == "weight" and kernels.spec.capability[0] >= 8:
        images = (made, read)
    first = [image for image in images if image.dim() > 2 and image.stride(1) != 1 and image.shape[1] > 1]
    return sum(kernels.reordering(image) for image in first)
