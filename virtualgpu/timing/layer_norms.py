"""Layer norm: what its kernels take beside memory (aten/src/ATen/native/cuda/layer_norm_kernel.cu).

All constants are cycles of a multiprocessor, of tests/gpu/h100_profiled.csv (PyTorch 2.11).
"""

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virtualgpu.timing.kernels import Kernels

# For a row, each of its numbers and, in single precision, once more a row: one block reads it, twice over, and waits for sums
ROW, NUMBER, SINGLE = 260, 0.4, 120
GRADIENT_ROW, GRADIENT_NUMBER = 190, 0.42
# Gradients of weight and bias: a block of 1,024 threads has 32 columns and all their rows, 256 in a step, 7.5 cycles for each (6.5 to 9);
# of very many rows and few columns several blocks share them, and two sums follow (GammaBetaBackwardCUDAKernelTemplate)
COLUMNS, EACH_ROW, MANY_ROWS, THREADS = 32, 7.5, 64 << 10, 1024


def layer_norm(args, tensors) -> float:
    """native_layer_norm(input, shape, ...): cycles in all."""
    numbers, width = tensors[0].numel(), max(1, prod(args[1]))
    return numbers / width * (ROW + NUMBER * width + (SINGLE if tensors[0].itemsize == 4 else 0))


def layer_norm_backward(args, card: "Kernels") -> float:
    """Seconds of native_layer_norm_backward(gradient, input, shape, mean, deviation, weight, bias, mask), its launches included."""
    image, width = args[1], max(1, prod(args[2]))
    nbytes, rows, launch, spec = image.nbytes, image.numel() // width, card.spec.kernel, card.spec
    cycles = rows * (GRADIENT_ROW + GRADIENT_NUMBER * width)
    seconds = launch + max(card.bytes_take(3 * nbytes, "layer_norm"), cycles / card.cycles)
    if not (args[7][1] or args[7][2]):
        return seconds
    blocks, memory = -(-width // COLUMNS), card.bytes_take(2 * nbytes)
    if rows > MANY_ROWS and blocks < spec.processors / 2:
        return seconds + memory + 5 * launch  # zeros and a sum for each of the two gradients
    rounds = -(-blocks // (spec.processors * max(1, spec.limits.threads // THREADS)))
    return seconds + launch + max(memory, rounds * rows * EACH_ROW / (1e3 * spec.clock_rate))
