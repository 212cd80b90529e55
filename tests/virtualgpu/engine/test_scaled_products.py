"""torch._scaled_mm of float8: rows by columns, as cuBLASLt takes them."""

import pytest
import torch

import virtualgpu


def product(transposed):
    left, right = (torch.ones(32, 32, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(left, right.t() if transposed else right, one, one, out_dtype=torch.bfloat16)


def test_rows_by_rows_are_refused():
    with virtualgpu.gpus(1, like="H100"):
        assert product(True).tolist() == [[32.0] * 32] * 32
        with pytest.raises(RuntimeError, match="Only multiplication of row-major and column-major"):
            product(False)
    with virtualgpu.dry_run(1, like="H100"):
        assert product(True).shape == (32, 32)
        with pytest.raises(RuntimeError, match="col_major"):
            product(False)
