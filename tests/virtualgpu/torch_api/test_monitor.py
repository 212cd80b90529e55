"""What tools that watch a GPU are told: shares of simulated time, and the data sheet's figures."""

import dataclasses

import pytest
import torch

import virtualgpu


@pytest.fixture(autouse=True)
def gpus():
    return virtualgpu.gpus(1, like="A100")


def work():
    """The GPU works for some time, and the host waits for it."""
    with virtualgpu.dry_run():
        x = torch.ones(8192, 8192, device="cuda")
        for _ in range(10):
            x = x @ x
    torch.cuda.synchronize()


def test_clock():
    spec = virtualgpu.SPECS["A100"]
    assert torch.cuda.clock_rate() == spec.clock_rate // 1000 == 1410


def test_power_is_the_limit_while_it_works_and_nothing_before():
    assert torch.cuda.power_draw() == 0
    work()
    assert torch.cuda.power_draw("cuda:0") == pytest.approx(1000 * virtualgpu.SPECS["A100"].power, rel=0.02)


def test_each_figure_has_its_own_time_since_it_was_asked():
    work()
    assert torch.cuda.utilization() > 95
    assert torch.cuda.memory_usage(0) > 95
    assert torch.cuda.utilization() == 0


def test_a_card_that_does_not_say_its_power():
    virtualgpu.gpus(1, like=dataclasses.replace(virtualgpu.SPECS["A100"], power=None))
    with pytest.raises(NotImplementedError, match="does not say its power limit"):
        torch.cuda.power_draw()


def test_it_has_no_temperature():
    with pytest.raises(NotImplementedError, match="not modelled"):
        torch.cuda.temperature()
