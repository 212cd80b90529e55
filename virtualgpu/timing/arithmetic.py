"""How long an operation that multiplies takes on a card: products of matrices, convolutions, attention, recurrent layers.

`seconds` is asked with the operation's own arguments; what it finds in them is a few sizes, which `kernels` turns into time.
"""

from collections.abc import Callable

import torch

from virtualgpu.timing import attention, convolutions, products
from virtualgpu.timing.costs import parts
from virtualgpu.timing.kernels import Kernels, together
from virtualgpu.timing.products import Product

STEP = 9e-6  # of a recurrent layer, one step over time: two kernels that wait for each other (9.5 us on an H100 by cuDNN 9.19)


def seconds(kernels: Kernels, name: str, args, tensors, flops: float, moved: float, key, share: float = 1.0) -> float:
    """One kernel, or the few that the operation is made of.

    name: of the operation. tensors: all that it reads and writes. flops, moved: by their counts. key: into Spec.rates. share: of
    the FLOPs, where values leave some out.
    """
    rule = None if kernels.peak else RULES.get(name)
    if rule is None:
        return kernels.plain(flops * share, moved, key)
    return rule(kernels, args, tensors, flops * share, moved, key)


def _matrices(first: int) -> Callable:
    def rule(kernels: Kernels, args, tensors, flops, moved, key) -> float:
        """[count, rows, length] times [count, length, columns], from argument `first` on."""
        left, right = args[first], args[first + 1]
        if left.layout is not torch.strided or right.layout is not torch.strided:
            return _sparse(kernels, left, right, flops, moved, key)
        count = left.shape[0] if left.dim() == 3 else 1
        rows, length, columns = left.shape[-2], left.shape[-1], right.shape[-1]
        if left.is_complex():
            count *= 4
        widths = columns, max(left.stride()[-2:]), max(right.stride()[-2:])  # of rows, in numbers
        loaded = together(left.itemsize, *widths)
        along = (left.stride(-1) == 1) + (right.stride(-2) == 1)
        bias = first == 1 and args[0].dim() == 1
        product = Product(count, rows, columns, length, key, moved, loaded, along=along, bias=bias)
        return products.seconds(kernels, product)

    return rule


def _sparse(kernels: Kernels, left, right, flops, moved, key) -> float:
    """As cuSPARSE multiplies: each number of the sparse matrix with a row of the other, which is fetched for it. flops: of dense ones."""
    sparse, other = (left, right) if left.layout is not torch.strided else (right, left)
    held = parts(sparse)[-1].numel()
    fetched = held * (other.shape[-1] if sparse is left else other.shape[-2]) * other.itemsize
    return kernels.plain(flops * held / max(sparse.numel(), 1), moved + fetched, key)


def _recurrent(passes: int, layers_at: int) -> Callable:
    def rule(kernels: Kernels, args, tensors, flops, moved, key) -> float:
        """layers_at: where the number of layers stands among the arguments; batch_first comes next."""
        layers, batch_first = args[layers_at : layers_at + 2]
        steps = args[0].shape[1 if batch_first else 0] if args[0].dim() == 3 else 1
        return kernels.plain(flops, moved, key) + passes * layers * steps * STEP

    return rule


FORWARD, BACKWARD = (attention.rule(which) for which in ("forward", "backward"))
EFFICIENT_FORWARD, EFFICIENT_BACKWARD = (attention.rule(which, "efficient") for which in ("forward", "backward"))
CUDNN_FORWARD, CUDNN_BACKWARD = (attention.rule(which, "cudnn") for which in ("forward", "backward"))
RULES: dict[str, Callable] = {
    "mm": _matrices(0),
    "bmm": _matrices(0),
    "addmm": _matrices(1),
    "baddbmm": _matrices(1),
    "_scaled_mm": _matrices(0),
    "convolution": convolutions.forward_seconds,
    "_convolution": convolutions.forward_seconds,
    "convolution_backward": convolutions.backward_seconds,
    "_scaled_dot_product_flash_attention": FORWARD,
    "_scaled_dot_product_efficient_attention": EFFICIENT_FORWARD,
    "_scaled_dot_product_cudnn_attention": CUDNN_FORWARD,
    "_scaled_dot_product_flash_attention_backward": BACKWARD,
    "_scaled_dot_product_efficient_attention_backward": EFFICIENT_BACKWARD,
    "_scaled_dot_product_cudnn_attention_backward": CUDNN_BACKWARD,
    "flex_attention": FORWARD,
    "flex_attention_backward": BACKWARD,
    "_cudnn_rnn": _recurrent(1, 9),
    "_cudnn_rnn_backward": _recurrent(2, 13),
}
