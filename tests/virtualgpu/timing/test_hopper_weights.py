"""Gradients of weights on a Hopper, beside what an H100 took (cuDNN 9.19, torch.profiler, microseconds of all kernels)."""

import pytest

import virtualgpu
from tests.virtualgpu.timing.test_profiled_kernels import simulated

# dtype, image, made channels, kernel, dilation, channels last
MEASURED = {
    ("bfloat16", (16, 128, 28, 28), 128, 3, 1, True): 25.6,  # each tile by itself
    ("bfloat16", (32, 320, 56, 56), 320, 3, 1, True): 316.5,  # all share the tiles
    ("float16", (16, 512, 64, 64), 512, 3, 1, False): 763.0,  # converted
    ("bfloat16", (32, 32, 56, 56), 32, 3, 1, False): 56.7,  # few channels: Ampere's
    ("tf32", (64, 512, 7, 7), 512, 3, 1, True): 89.6,
    ("tf32", (128, 256, 40, 40), 128, 3, 1, False): 806.8,
    ("tf32", (32, 128, 56, 56), 128, 7, 1, False): 1171.0,  # larger: Ampere's
    ("tf32", (32, 192, 20, 20), 384, 3, 12, False): 212.0,  # far apart: Ampere's
}


@pytest.mark.parametrize("one", MEASURED, ids=str)
def test_as_measured(one):
    dtype, shape, made, kernel, dilation, last = one
    settings = {"dtype": dtype, "shape": list(shape), "made": made, "kernel": kernel, "dilation": dilation}
    settings |= {"stride": 1, "groups": 1, "last": last, "pas": "weight"}
    with virtualgpu.dry_run(1, like="H100"):
        assert simulated("convolution", settings) == pytest.approx(MEASURED[one], rel=0.3)
