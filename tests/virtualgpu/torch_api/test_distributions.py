"""torch.distributions: checked as ever with numbers; in a dry run the checks hold, and take as long."""

import pytest
import torch
from torch import distributions
from torch.distributions import Categorical, Independent, Normal, kl_divergence

import virtualgpu


def log_prob(validate=None):
    normal = Independent(Normal(torch.zeros(4, 3, device="cuda"), torch.ones(4, 3, device="cuda"), validate), 1)
    actions = Categorical(logits=torch.zeros(4, 3, device="cuda"), validate_args=validate)
    divergence = kl_divergence(normal, normal)
    return normal.log_prob(normal.rsample()) + actions.log_prob(actions.sample()) + actions.entropy() + divergence


@pytest.mark.parametrize("validate", [None, True, False])
def test_a_dry_run_takes_the_checks_of_numbers_as_passed(gpus, validate):
    clock = virtualgpu.machine().clock

    def seconds():
        torch.cuda.synchronize()
        start = clock.host
        assert log_prob(validate).shape == (4,)
        torch.cuda.synchronize()
        return clock.host - start

    seconds()
    numbers = seconds()
    with virtualgpu.dry_run():
        assert seconds() == pytest.approx(numbers)


DRAWN = {
    "Bernoulli": [0.5],
    "Beta": [1.0, 2.0],
    "Binomial": [3.0, 0.5],
    "Dirichlet": [(1.0, 2.0)],
    "Exponential": [2.0],
    "Gamma": [1.0, 2.0],
    "Geometric": [0.5],
    "LogNormal": [0.0, 1.0],
    "Poisson": [2.0],
    "StudentT": [3.0],
    "Uniform": [0.0, 1.0],
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_has_a_shape_in_a_dry_run(gpus, name):
    with virtualgpu.dry_run():
        parameters = [torch.tensor([value] * 4, device="cuda") for value in DRAWN[name]]
        distribution = getattr(distributions, name)(*parameters)
        sample = distribution.sample((5,))
        assert sample.shape == (5, *parameters[0].shape) and sample.device.type == "cuda"
        assert distribution.log_prob(sample).shape == (5, 4)


def test_numbers_are_checked(gpus):
    assert log_prob().shape == (4,)
    with pytest.raises(ValueError, match="satisfy the constraint"):
        Normal(
            torch.zeros(2, device="cuda"), -torch.ones(2, device="cuda"), validate_args=True
        )  # torch._dynamo turns it off
