"""What an operation costs the host: a program of short kernels takes as long on every card.

Beside what operations cost that of one H100 (tests/gpu/h100_host.csv: PyTorch 2.11, a Xeon of Sapphire Rapids, November 2026; of two visits):
chains of 40 alike, of a few numbers, from an empty queue; microseconds for each of the 40.
"""

import contextlib
import csv
import functools
import math
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import virtualgpu
from tests.accuracy.kernels import within
from tests.gpu import host_table
from virtualgpu.hardware.machine import DATASHEET, HOSTS, find_settings
from virtualgpu.run import cli
from virtualgpu.timing.host import BEGUN, ELEMENTWISE, FURTHER, STEP, WEIGHTS, weight_of

resnet50 = pytest.importorskip("torchvision").models.resnet50
GPU = Path(__file__).parents[2] / "gpu"
TABLE, MIXED = GPU / "h100_host.csv", GPU / "mixed_host.csv"
LENGTH, HOST = 40, HOSTS["2026"]


@pytest.fixture
def h100():
    """In a dry run, with the host of this year."""
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        yield virtualgpu.machine().clock


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
        model, x = resnet50().cuda().eval(), torch.zeros(batch, 3, 224, 224, device="cuda")
        clock = virtualgpu.machine().clock
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
def test_what_a_call_costs(h100, name):
    call, forward, backward = CALLS[name]
    x, made = torch.zeros(2, 3, 4, device="cuda", requires_grad=True), []
    kernels = [*h100.computing]
    assert passed(lambda: made.append(call(x))) == pytest.approx(28 * forward, abs=0.01)
    if "view" in name:
        assert h100.computing == kernels
    for _ in range(0 if backward is None else 2):  # each a pass of its own
        one = torch.ones_like(made[0])
        took = passed(lambda one=one: torch.autograd.grad(made[0], x, one, retain_graph=True))
        assert took == pytest.approx(21 * (BEGUN + backward), abs=0.01)


def test_what_autograd_does_not_note_costs_less(h100):
    """Of 119 chains beside an H100 the median took 0.8 of what they took with its notes."""
    x = torch.zeros(2, 3, device="cuda", requires_grad=True)
    noted = passed(x.exp)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert passed(x.exp) == pytest.approx(0.8 * noted)


def test_lists_cost_by_their_length(h100):
    """Beside an H100 `_foreach_add_` of 400 took 82 us, of two lists 159, and `_foreach_mul`, which makes 400, 1158."""
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
        (torch.optim.AdamW, {"fused": True}, 680),
        (torch.optim.AdamW, {"foreach": False}, 16158),
    ],
)
def test_a_step_costs_the_host_what_it_cost_that_of_the_h100(h100, kind, options, measured):
    """Of 160 tensors, in microseconds."""
    parameters = [torch.zeros(64, device="cuda", requires_grad=True) for _ in range(160)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = kind(parameters, **options)
    optimizer.step()  # with the beginnings of its state
    assert passed(optimizer.step) == pytest.approx(measured, rel=0.35)


def test_a_step_costs_its_python_also_right_after_a_backward_pass(h100):
    parameters = [torch.zeros(4, device="cuda", requires_grad=True) for _ in range(20)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)

    def backward():
        sum(weight.sum() for weight in parameters).backward()

    backward()
    apart = passed(backward) + passed(optimizer.step)
    assert passed(lambda: (backward(), optimizer.step())) == pytest.approx(apart)


def test_a_step_inside_a_backward_pass_costs_its_python(h100):
    """As where a hook of each parameter steps its own optimizer, so that no gradient outlives it."""
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
    words = "measured .*or datasheet" if "clock" in names else ", ".join(HOSTS)
    with pytest.raises(ValueError, match=words):
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


# -- chains of one operation, and operations in mixed order


ALIKE = {"evaluation": 20e-6 / HOST.forward, "forward": 20e-6 / HOST.forward, "backward": 16e-6 / HOST.backward}
IMAGES, TOKENS = (2, 64, 8, 8), (2, 8, 64)


class Square64(nn.Module):
    """A product with a weight, and no bias beside it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return x @ self.weight


CHAINS = {
    "linear": (lambda: nn.Linear(64, 64), TOKENS),
    "linear no bias": (lambda: nn.Linear(64, 64, bias=False), TOKENS),
    "matmul": (Square64, TOKENS),
    "conv3x3": (lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False), IMAGES),
    "conv1x1": (lambda: nn.Conv2d(64, 64, 1, bias=False), IMAGES),
    "batch_norm": (lambda: nn.BatchNorm2d(64), IMAGES),
    "relu": (nn.ReLU, IMAGES),
    "layer_norm": (lambda: nn.LayerNorm(64), TOKENS),
    "group_norm": (lambda: nn.GroupNorm(8, 64), IMAGES),
    "rms_norm": (lambda: nn.RMSNorm(64), TOKENS),
    "silu": (nn.SiLU, TOKENS),
    "gelu": (nn.GELU, TOKENS),
    "softmax": (lambda: nn.Softmax(-1), TOKENS),
    "max_pool": (lambda: nn.MaxPool2d(3, 1, 1), IMAGES),
}
AUTOCAST = {"AMP bfloat16": torch.bfloat16, "AMP": torch.float16}


@functools.cache
def simulated(name: str, precision: str) -> dict[str, float]:
    """Microseconds by pass."""
    make, shape = CHAINS[name]
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        chain = nn.Sequential(*[make() for _ in range(LENGTH)]).cuda().to(dtype)
        x, cast = torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(), AUTOCAST.get(precision)
        results = []

        def forward():
            with torch.autocast("cuda", cast) if cast else contextlib.nullcontext():
                results.append(chain(x))

        def taken(kind, function):
            torch.cuda.synchronize()
            return ALIKE[kind] * passed(function) / LENGTH

        for _ in range(2):
            chain.zero_grad()
            times = {"forward": taken("forward", forward)}
            x.grad, gradient = None, torch.ones_like(results[-1])
            times["backward"] = taken("backward", lambda gradient=gradient: results[-1].backward(gradient))
        chain.eval()
        with torch.no_grad():
            return times | {"evaluation": taken("evaluation", forward)}


@pytest.mark.parametrize("pass_", ["evaluation", "forward", "backward"])
def test_an_operation_costs_the_host_what_it_cost_that_of_the_h100(pass_):
    """In chains; in mixed order, as each is followed by another in a program as here, it costs more."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["chain"] in CHAINS and row["pass"] == pass_]
    logs = [math.log(float(row["us"]) / simulated(row["chain"], row["precision"])[pass_]) for row in rows]
    assert len(logs) >= 10 and abs(median(logs)) < math.log(1.15) and within(logs, 30) > 0.6, sorted(
        map(math.exp, logs)
    )
    if pass_ != "evaluation":
        with open(MIXED, encoding="utf-8", newline="") as file:
            mixed = [row for row in csv.DictReader(file) if row["pass"] == pass_]
        longer = [float(row["mixed_us"]) / float(row["parts_us"]) for row in mixed]
        assert len(longer) == 12 and 1 / ALIKE[pass_] == pytest.approx(median(longer), rel=0.02)
