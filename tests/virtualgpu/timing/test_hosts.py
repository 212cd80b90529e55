"""What an operation costs the host: a program of short kernels takes as long on every card."""

import pytest
import torch
import torch.utils.checkpoint

import virtualgpu
from tests.gpu import host_table
from virtualgpu.hardware.settings import DATASHEET, HOSTS, find_settings
from virtualgpu.run import cli
from virtualgpu.timing.host import BEGUN, ELEMENTWISE, FURTHER, STEP, WEIGHTS, weight_of

resnet50 = pytest.importorskip("torchvision").models.resnet50


def test_the_runner_names_them_all():
    line = next(line for line in cli.USAGE.splitlines() if "--host NAME" in line)
    assert all(name in line for name in HOSTS)


def passed(function):
    """Microseconds of the host."""
    clock = virtualgpu.machine().clock
    before = clock.host
    function()
    return 1e6 * (clock.host - before)


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


SIMPLE, VIEW = ELEMENTWISE.backward, WEIGHTS["transpose"]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 2


# What a function of x [2, 3, 4] costs in operations of the host: in its forward pass, and in its backward pass, beyond that this begins
CALLS = {
    "the CPU's": (lambda x: torch.zeros(2, 3).transpose(0, 1).exp(), 0, None),
    "views": (lambda x: x.transpose(0, 1)[0].unsqueeze(1), 3 * VIEW.forward, None),
    "a transpose": (lambda x: x.transpose(0, 1), VIEW.forward, VIEW.backward),
    "views that linear makes": (lambda x: x.view(6, 4).detach(), 0, None),
    # beside an H100 40 nodes of one operation took 15 to 17 us each in the backward pass, of three 32 to 34, of five 47 to 49
    "a node of one": (torch.exp, ELEMENTWISE.forward, SIMPLE),
    "a node of three": (torch.square, ELEMENTWISE.forward, SIMPLE * (1 + 2 * FURTHER)),
    "two nodes": (lambda x: x.exp().exp(), 2 * ELEMENTWISE.forward, 2 * SIMPLE),
    "called from Python": (Square.apply, 0.8 * ELEMENTWISE.forward, 2 * SIMPLE),
    # what a checkpoint computes again costs what it does in a forward pass
    "a checkpoint": (
        lambda x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False),
        ELEMENTWISE.forward,
        SIMPLE + ELEMENTWISE.forward * 28 / 21,
    ),
    # C++ adds a bias by an operation of its own
    "a convolution": (lambda x: torch.conv1d(x, x.detach()[..., :1]), WEIGHTS["convolution"].forward, None),
    "with bias": (
        lambda x: torch.conv1d(x, x.detach()[..., :1], x.detach().view(-1)[:2]),
        WEIGHTS["convolution with bias"].forward,
        None,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_costs(name):
    call, forward, backward = CALLS[name]
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        x, made = torch.zeros(2, 3, 4, device="cuda", requires_grad=True), []
        kernels = [*virtualgpu.machine().clock.computing]
        assert passed(lambda: made.append(call(x))) == pytest.approx(28 * forward, abs=0.01)
        if "view" in name:
            assert virtualgpu.machine().clock.computing == kernels
        for _ in range(0 if backward is None else 2):  # each a pass of its own
            one = torch.ones_like(made[0])
            took = passed(lambda one=one: torch.autograd.grad(made[0], x, one, retain_graph=True))
            assert took == pytest.approx(21 * (BEGUN + backward), abs=0.01)


def test_what_autograd_does_not_note_costs_less():
    """Of 119 chains beside an H100 the median took 0.8 of what they took with its notes."""
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        x = torch.zeros(2, 3, device="cuda", requires_grad=True)
        noted = passed(x.exp)
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                assert passed(x.exp) == pytest.approx(0.8 * noted)


def test_lists_cost_by_their_length():
    """Beside an H100 `_foreach_add_` of 400 took 82 us, of two lists 159, and `_foreach_mul`, which makes 400, 1158."""
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        few, many = ([torch.zeros(8, device="cuda") for _ in range(count)] for count in (10, 400))

        def more(function):
            return passed(lambda: function(many)) - passed(lambda: function(few)) - 6 * 4  # seven kernels for one

        assert more(lambda tensors: torch._foreach_add_(tensors, 1.0)) == pytest.approx(390 * 0.2)
        assert more(lambda tensors: torch._foreach_add_(tensors, tensors)) == pytest.approx(2 * 390 * 0.2)
        assert more(lambda tensors: torch._foreach_mul(tensors, 2.0)) == pytest.approx(390 * 2.5)


@pytest.mark.parametrize(
    ("kind", "options", "measured"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}, 643),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}, 488),
        (torch.optim.AdamW, {"foreach": True}, 2332),
        (torch.optim.AdamW, {"fused": True}, 680),
        (torch.optim.AdamW, {"foreach": False}, 16158),
    ],
)
def test_a_step_costs_the_host_what_it_cost_that_of_the_h100(kind, options, measured):
    """Of 160 tensors, in microseconds."""
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        parameters = [torch.zeros(64, device="cuda", requires_grad=True) for _ in range(160)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = kind(parameters, **options)
        optimizer.step()  # with the beginnings of its state
        assert passed(optimizer.step) == pytest.approx(measured, rel=0.35)


def test_a_step_costs_its_python_also_right_after_a_backward_pass():
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        parameters = [torch.zeros(4, device="cuda", requires_grad=True) for _ in range(20)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)

        def backward():
            sum(weight.sum() for weight in parameters).backward()

        backward()
        apart = passed(backward) + passed(optimizer.step)
        assert passed(lambda: (backward(), optimizer.step())) == pytest.approx(apart)


def test_a_step_inside_a_backward_pass_costs_its_python():
    """As where a hook of each parameter steps its own optimizer, so that no gradient outlives it."""
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        weight = torch.zeros(4, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, foreach=True)

        def backward(y):
            weight.grad = None
            return passed(y.sum().backward)

        alone = backward(weight * 2)
        weight.register_post_accumulate_grad_hook(lambda weight: optimizer.step())
        once, each, _ = STEP
        assert backward(weight * 2) - alone > 1e6 * HOSTS["2026"].optimizer * (once + each)


@pytest.mark.parametrize("names", [{"clock": "fast"}, {"host": "1999"}])
def test_unknown_names_say_what_there_is(names):
    with pytest.raises(
        ValueError, match="measured or datasheet|measured .* or datasheet" if "clock" in names else ", ".join(HOSTS)
    ):
        find_settings(**names)


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
        with virtualgpu.dry_run(host="2023"):  # one of its own
            assert virtualgpu.machine().settings.host == "2023"
        assert virtualgpu.machine().settings.host == "2021"


def test_an_operation_of_many_kernels_costs_the_host_their_launches():
    assert weight_of("embedding_dense_backward", False, 12) == pytest.approx((1 + 11 * 0.2, 1 + 11 * 0.25))
    assert weight_of("add", True) == ELEMENTWISE and weight_of("mm", False, 3) == WEIGHTS["mm"]  # measured whole


def test_the_table_is_what_the_chains_say():
    """`python -m tests.gpu.host_table` writes it."""
    assert host_table.TABLE.read_text(encoding="utf-8") == host_table.written()
