"""FLOPs of convolutions, plain, grouped, depthwise and transposed, of 1, 2 or 3 dimensions.

Each number of the weight meets each place of the image once: of the result, or, transposed, of what goes in. A weight is [channels,
channels / groups, *kernel], so that groups count by its size alone. Of the three sums of such products (the result, the gradient of
what went in, that of the weight) none has more terms than another; `torch.utils.flop_counter` leaves groups out of the third.
"""

from math import prod


def convolution(x, weight, bias, stride, padding, dilation, transposed, *args, out_val=None, **kwargs) -> int:
    """Of convolution and _convolution. x: [batch, channels, *size], as is their result `out_val`."""
    return products(x if transposed else out_val, weight)


def convolution_backward(
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask, **kwargs
) -> int:
    """Of convolution_backward: for each gradient that `output_mask` asks for as much as forwards; the bias's is a sum, no product."""
    return sum(output_mask[:2]) * products(x if transposed else grad, weight)


def slow_forward(x, weight, *args, out_val=None, **kwargs) -> int:
    """Of _slow_conv2d_forward: a plain convolution."""
    return products(out_val, weight)


def products(image, weight) -> int:
    """FLOPs of one such sum, with image [batch, channels, *size]: a product and an addition are two."""
    return 2 * image.shape[0] * prod(image.shape[2:]) * weight.numel()
