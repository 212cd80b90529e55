"""torch.histc of whole numbers, which PyTorch has for CUDA alone."""

import pytest
import torch

import virtualgpu

WHOLE = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_numbers_are_counted_as_floating_point_ones_are_on_the_cpu(kind):
    numbers = torch.tensor([[0, 1, 1, 3, 4], [7, 7, 2, 8, 9]])
    for arguments in ({"bins": 8, "min": 0, "max": 7}, {"bins": 4, "min": 1, "max": 9}, {"bins": 3}):
        with virtualgpu.gpus(1):
            counts = torch.histc(numbers.to("cuda", kind), **arguments)
            assert counts.device.type == "cuda" and counts.dtype is kind
            assert counts.tolist() == torch.histc(numbers.double(), **arguments).tolist()


def test_experts_count_their_tokens_into_a_given_tensor():
    with virtualgpu.gpus(1):
        experts = torch.tensor([2, 0, 2, 3], dtype=torch.int32, device="cuda")
        counts = experts.new_empty(0)
        assert torch.histc(experts, bins=4, min=0, max=3, out=counts) is counts
        assert counts.tolist() == [1, 0, 2, 1]
        assert torch.histc(experts[:1], bins=2).tolist() == [0, 1]  # one number alone: from 1 to 3
        with pytest.raises(RuntimeError, match="max must be larger than min"):
            torch.histc(experts, bins=4, min=3, max=1)
        with pytest.raises(RuntimeError, match="not implemented for 'Int'"):
            torch.histc(experts.cpu(), bins=4)


def test_a_dry_run_knows_them():
    with virtualgpu.dry_run():
        counts = torch.histc(torch.zeros(5, dtype=torch.int32, device="cuda"), bins=4, min=0, max=3)
        assert (counts.shape, counts.dtype, counts.device.type) == ((4,), torch.int32, "cuda")
        assert counts.tolist() == [5, 0, 0, 0]  # counts are known in a dry run, too
