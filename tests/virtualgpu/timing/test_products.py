"""Products by the kernel that cuBLAS has for them."""

import pytest

from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing import products
from virtualgpu.timing.kernels import Kernels
from virtualgpu.timing.products import Product

H100 = Kernels(SPECS["H100"])


def microseconds(rows, columns, length, key, kernels=H100, **options) -> float:
    size = 4 if key in ("float32", "tf32") else 2
    moved = size * (rows * length + length * columns + rows * columns)
    return 1e6 * products.seconds(kernels, Product(1, rows, columns, length, key, moved, **options))


@pytest.mark.parametrize(
    ("sizes", "options", "measured_us"),
    [
        ((128, 4, 64), {"bias": True}, 11.52),  # sgemm_largek_lds64, with three kernels beside it
        ((16, 300, 300), {"bias": True}, 5.79),  # gemmSN
        ((512, 300, 300), {"bias": True}, 12.8),  # one block after the other along the sum
        ((128, 100, 1000), {}, 9.7),  # the sum split
        ((30, 2000, 128), {"along": 0}, 4.77),  # a weight's gradient
    ],
)
def test_small_products_in_single_precision_wait(sizes, options, measured_us):
    """tests/gpu/h100_profiled.csv."""
    assert microseconds(*sizes, "float32", **options) == pytest.approx(measured_us, rel=0.2)


def test_tf32_needs_a_matrix_that_lies_along_the_sum_on_hopper():
    """8192 x 4096 x 1024 there: 176 us, and 265 as a weight's gradient; Ampere's instructions take either."""
    sizes = 1024, 4096, 8192, "tf32"
    assert 1.3 < microseconds(*sizes, along=0) / microseconds(*sizes) < 1.7
    a100 = Kernels(SPECS["A100"])
    assert microseconds(*sizes, a100, along=0) == microseconds(*sizes, a100)


def test_tiles_of_hopper_are_of_many_sizes():
    """640 x 1920 over 2048 in bfloat16: 120 tiles of 160 x 64 for 132 processors, 9.4 us; cuDNN's convolutions have fewer."""
    sizes = 640, 1920, 2048, "bfloat16"
    assert microseconds(*sizes) < 0.85 * microseconds(*sizes, cublas=False)
