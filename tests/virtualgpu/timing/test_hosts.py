"""What an operation costs the host: a program of short kernels takes as long on every card."""

import pytest
import torch

import virtualgpu
from virtualgpu.hardware.hosts import HOSTS
from virtualgpu.hardware.settings import DATASHEET, find
from virtualgpu.timing import weights

resnet50 = pytest.importorskip("torchvision").models.resnet50


def inference(card, batch, host):
    """(images a second, share of the time in which the GPU computed) of the second pass."""
    with virtualgpu.dry_run(1, like=card, host=host), torch.no_grad():
        model, x, clock = (
            resnet50().cuda().eval(),
            torch.zeros(batch, 3, 224, 224, device="cuda"),
            virtualgpu.machine().clock,
        )
        model(x)
        torch.cuda.synchronize()
        start, computing = clock.host, clock.computing[0]
        model(x)
        torch.cuda.synchronize()
        seconds = clock.host - start
        return batch / seconds, (clock.computing[0] - computing) / seconds


def test_one_image_at_a_time_is_bound_by_the_host():
    """NVIDIA's DeepLearningExamples, 2021: 96 images/s on a V100 and 93 to 98 on a T4, whose kernels take three times as long."""
    (v100, computing), (t4, _) = inference("V100", 1, "2021"), inference("T4", 1, "2021")
    assert v100 == pytest.approx(96, rel=0.05) and t4 == pytest.approx(96, rel=0.05) and computing < 0.6
    assert inference("V100", 64, "2021")[0] > 2.5 * inference("T4", 64, "2021")[0]


def test_a_faster_host_helps_short_kernels_alone():
    one = {host: inference("A100", 1, host)[0] for host in ("2021", "2023", "2024")}
    many = {host: inference("A100", 128, host)[0] for host in ("2021", "2024")}
    assert one["2021"] < 0.7 * one["2023"] < 0.7 * 0.7 * one["2024"]
    assert many["2021"] == pytest.approx(many["2024"], rel=0.02)


def test_a_view_costs_the_host_alone():
    """5 us beside an H100 (tests/gpu/h100_host.csv); what linear calls by itself is in the product's cost."""
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        clock, x = virtualgpu.machine().clock, torch.zeros(2, 3, 4, requires_grad=True)

        def passed(function):
            before = clock.host, list(clock.computing)
            function()
            return round(1e6 * (clock.host - before[0]), 3), [*clock.computing] == before[1]

        assert passed(lambda: x.transpose(0, 1))[0] == 0.0  # the CPU's time is none
        y = x.cuda()
        us, no_kernel = passed(lambda: y.transpose(0, 1)[0].unsqueeze(1))
        assert us == pytest.approx(3 * 20 * weights.VIEW.forward) and no_kernel
        assert passed(lambda: y.view(6, 4).detach()) == (0.0, True)
        plain, turned = y.sum(), y.transpose(0, 1).sum()
        more = passed(turned.backward)[0] - passed(plain.backward)[0]
        assert more == pytest.approx(16 * weights.VIEW.backward, abs=0.01)


@pytest.mark.parametrize("names", [{"clock": "fast"}, {"host": "1999"}])
def test_unknown_names_say_what_there_is(names):
    with pytest.raises(
        ValueError, match="measured or datasheet|measured .* or datasheet" if "clock" in names else ", ".join(HOSTS)
    ):
        find(**names)


def test_settings_reach_other_processes(monkeypatch):
    from virtualgpu.run.inherit import variables

    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    with virtualgpu.gpus(1, clock=DATASHEET, host="2021"):
        told = variables()["VIRTUALGPU"]
    assert '"clock": "datasheet"' in told and '"host": "2021"' in told


def test_a_dry_run_keeps_the_clock_that_is_on(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    with virtualgpu.gpus(1, host="2021"):
        with virtualgpu.dry_run():
            assert virtualgpu.machine().settings.host == "2021"
        with pytest.raises(ValueError, match="another clock"), virtualgpu.dry_run(host="2023"):
            pass


def test_an_operation_of_many_kernels_costs_the_host_their_launches():
    assert weights.of("embedding_dense_backward", False, 12) == pytest.approx((1 + 11 * 0.2, 1 + 11 * 0.25))
    assert (
        weights.of("add", True) == weights.ELEMENTWISE and weights.of("mm", False, 3) == weights.PRODUCT
    )  # measured whole
