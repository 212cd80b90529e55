"""torch.distributions: checked as ever with numbers, and usable in a dry run."""

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, kl_divergence

import virtualgpu


def log_prob(validate=None):
    normal = Independent(Normal(torch.zeros(4, 3, device="cuda"), torch.ones(4, 3, device="cuda"), validate), 1)
    actions = Categorical(logits=torch.zeros(4, 3, device="cuda"), validate_args=validate)
    divergence = kl_divergence(normal, normal)
    return normal.log_prob(normal.rsample()) + actions.log_prob(actions.sample()) + actions.entropy() + divergence


@pytest.mark.parametrize("validate", [None, True])
def test_a_dry_run_does_not_check_numbers(gpus, validate):
    with virtualgpu.dry_run():
        assert log_prob(validate).shape == (4,)


def test_numbers_are_checked(gpus):
    assert log_prob().shape == (4,)
    with pytest.raises(ValueError, match="satisfy the constraint"):
        Normal(
            torch.zeros(2, device="cuda"), -torch.ones(2, device="cuda"), validate_args=True
        )  # torch._dynamo turns it off
