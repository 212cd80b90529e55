"""Products by the kernel that cuBLAS has for them."""

import math
from statistics import median

import pytest

from tests.accuracy import batch_sweeps
from tests.accuracy import kernels as measured
from tests.accuracy.kernels import multiplied
from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing import products
from virtualgpu.timing.kernels import Kernels, together
from virtualgpu.timing.products import Product

H100 = Kernels(SPECS["H100"])


def microseconds(rows, columns, length, key, kernels=H100, **options) -> float:
    size = 4 if key in ("float32", "tf32") else 2
    moved = size * (rows * length + length * columns + rows * columns)
    return 1e6 * products.seconds(kernels, Product(1, rows, columns, length, key, moved, **options))


@pytest.mark.parametrize(
    ("sizes", "options", "measured_us"),
    [
        ((512, 300, 300), {"bias": True}, 12.8),  # one block after the other along the sum
        ((1000, 1024, 4096), {"bias": True}, 235.37),  # which is not split where a bias is added
        ((128, 100, 1000), {}, 9.7),  # and is else
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


@pytest.mark.parametrize(
    ("card", "program", "batches"),
    [("RTX 2080 Super", "tower 10x128", (95, 96, 97)), ("V100", "resnet50", (48, 52, 56))],
)
def test_a_wave_more_is_a_step_where_cards_have_one(card, program, batches):
    """tests/accuracy/batch_sweeps.csv: an image takes 41 and 15 % longer with the last of these, and no longer with the one before."""
    before, after = batch_sweeps.steps(batch_sweeps.simulated(card, program, "float16", batches)).values()
    assert before < 0.01 and after > 0.04


def test_products_take_what_others_measured():
    """928 of eight sources on 13 cards, float32 to bfloat16, 60 us to seconds: `python -m tests.accuracy.kernels` has the table."""
    logs = [product.log for product in measured.products()]
    assert len(logs) > 400 and abs(median(logs)) < math.log(1.05)
    assert measured.within(logs, 15) > 0.6 and measured.within(logs, 30) > 0.8


def test_a_source_that_is_left_out_is_met():
    """A card's share from the other sources alone."""
    logs = [log for rest in measured.left_out(measured.products()).values() for log in rest]
    assert len(logs) > 200 and abs(median(logs)) < math.log(1.1) and measured.within(logs, 30) > 0.7


def test_a_tile_more_than_the_processors_is_a_wave_more():
    """Published: 96 boards on 48 multiprocessors 1.04 ms, 97 1.48 (tests/accuracy/batch_sweeps.csv); half of a wave's time as a rule."""
    a100 = Kernels(SPECS["A100"])
    full = multiplied(a100, 1, 128 * 108 // 2, 512, 4096, "float16", 2)  # 108 tiles of 128 x 256 for 108 processors
    more = multiplied(a100, 1, 128 * 109 // 2 + 128, 512, 4096, "float16", 2)
    assert 1.2 < more / full < 1.7


def test_rows_that_are_no_multiple_of_16_bytes():
    """They cost where loads are slower than the tensor cores; DeepBench's of such lengths are as fast as others on V100 and T4."""

    def against_a_multiple_of_64(columns, like):
        kernels = Kernels(SPECS[like])
        narrow = multiplied(kernels, 1, 4096, columns, 768, "float16", 2, together(2, columns, 768))
        return narrow / multiplied(kernels, 1, 4096, 50304, 768, "float16", 2)

    assert 2 < against_a_multiple_of_64(50257, "A100") < 3
    assert 1.3 < against_a_multiple_of_64(50258, "A100") < 2
    assert against_a_multiple_of_64(50258, "H100") > 1.5, "no wgmma for these"
    for like in ("V100", "T4"):
        assert against_a_multiple_of_64(50258, like) == pytest.approx(1, rel=0.02)
