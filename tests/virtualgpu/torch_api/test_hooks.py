"""torch.profiler, torch.compile, TorchScript, torch.export, torch.func and flex_attention while virtual GPUs are on."""

import gzip
import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

import virtualgpu
from tests import forks
from tests.forks import DYNAMO, outcomes

ONE = torch.device("cuda:1")
BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
QUIET = pytest.mark.filterwarnings("ignore:torch.profiler cannot see virtual GPUs")

PROFILED = """
import sys, warnings
import torch
from torch.profiler import ProfilerActivity, profile
import virtualgpu
virtualgpu.gpus(2)
x = torch.ones(64, 64, device="cuda:1")
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True, profile_memory=True) as prof:
    for _ in range(20):
        y = (x @ x).relu()
prof.export_chrome_trace(sys.argv[1])
print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))
"""


def test_profiling_cuda_is_quiet_and_whole(tmp_path):
    """One warning on stderr, not two C++ traces an operation; the trace has the simulated kernels."""
    trace = tmp_path / "trace.json"
    done = forks.run("-c", PROFILED, trace)
    assert done.returncode == 0, done.stderr[-2000:]
    # PyTorch 2.11 warns twice by itself, and Kineto that it sees no driver
    assert len(done.stderr.splitlines()) <= 5 and "torch.profiler cannot see virtual GPUs" in done.stderr
    assert "aten::mm" in done.stdout and "aten::relu" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel" and event["name"] == "mm"]
    assert len(kernels) == 20 and all(event["dur"] > 0 and event["args"]["device"] == 1 for event in kernels)
    starts = [event["ts"] for event in kernels]
    assert starts == sorted(starts)


@QUIET
def test_a_scheduled_profile_of_training(gpus):
    model = nn.Linear(8, 8).to(ONE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, plan = [], schedule(wait=1, warmup=1, active=2)
    with profile(activities=BOTH, schedule=plan, on_trace_ready=lambda p: seen.append(p.key_averages())) as prof:
        for _ in range(4):
            with record_function("step"):
                model(torch.ones(2, 8, device=ONE)).sum().backward()
                optimizer.step()
            prof.step()
    assert len(seen) == 1 and {"step", "aten::addmm"} <= {row.key for row in seen[0]}
    with torch.autograd.profiler.profile(use_device="cuda") as old:
        model(torch.ones(2, 8, device=ONE))
    assert "aten::addmm" in {row.key for row in old.key_averages()}
    with torch.autograd.profiler.emit_nvtx(), torch.cuda.nvtx.range("x"), torch.cuda.profiler.profile():
        model(torch.ones(2, 8, device=ONE))


@QUIET
@pytest.mark.parametrize("zipped", [False, True])
def test_traces_for_tensorboard_have_the_kernels_and_so_has_a_recording(gpus, tmp_path, zipped):
    handler = tensorboard_trace_handler(str(tmp_path), use_gzip=zipped)
    with virtualgpu.recording() as spans:
        with profile(activities=BOTH, on_trace_ready=handler):
            torch.ones(4, device=ONE).cos()
        torch.ones(4, device=ONE).sin()
    (trace,) = tmp_path.iterdir()
    with gzip.open(trace, "rt") if zipped else open(trace) as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert [event["args"]["device"] for event in kernels if event["name"] == "cos"] == [1]
    assert [span.name for span in spans if span.name in ("cos", "sin")] == ["cos", "sin"]


def test_kernels_carry_the_name_of_their_record_function(gpus, tmp_path):
    """And the trace has it above them, as torch.profiler's own has."""
    x = torch.randn(4, 4, device=ONE, requires_grad=True)
    with record_function("outside"), virtualgpu.recording() as spans:
        with record_function("inside"):
            y = (x @ x).sum()
        y.backward()
    _ = x + 1
    assert [(span.name, span.annotation) for span in spans[:2]] == [("mm", "inside"), ("sum", "inside")]
    assert len(spans) > 3 and {span.annotation for span in spans[2:]} == {"outside"}
    spans.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    above = {event["name"]: event for event in events if event.get("cat") == "gpu_user_annotation"}
    assert above.keys() == {"inside", "outside"}
    for span in spans:
        event = above[span.annotation]
        assert event["ts"] <= span.start * 1e6 and span.end * 1e6 <= event["ts"] + event["dur"] + 1e-9


def test_compile_runs_eagerly_and_says_so_once(gpus):
    def double(x):
        return x * 2 + 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = torch.compile(nn.Linear(3, 2).to(ONE))
        function = torch.compile(double, mode="reduce-overhead", fullgraph=True)

        @torch.compile(dynamic=True)
        def decorated(x):
            return x.sin()

        x = torch.ones(4, 3, device=ONE)
        out = model(x)
        out.sum().backward()
        results = function(x), decorated(x)
        model.compile()
    assert [str(w.message) for w in caught if "virtual GPUs" in str(w.message)] == [
        "torch.compile: on virtual GPUs it runs eagerly, with eager's memory and time"
    ]
    assert out.device == ONE and next(model.parameters()).grad.device == ONE
    assert all(result.device == ONE for result in results) and torch.equal(results[0], x * 2 + 1)
    assert type(model).__name__ == "OptimizedModule" and "_orig_mod.weight" in model.state_dict()


# -- TorchScript


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_functions_that_make_tensors(gpus):
    @torch.jit.script
    def make(n: int, x: torch.Tensor):
        y = torch.zeros([n], device=x.device) + torch.ones([n], device=x.device) + torch.zeros_like(x)
        z = torch.tensor([1.0, 2.0]).sum() + torch.as_tensor(2.0)
        return (
            y * 3 + z.to(x.device),
            torch.arange(n),
            torch.full([n], 2.0),
            torch.randn([n]),
            torch.dropout(x, 0.5, True),
        )

    for device in ("cpu", ONE):
        made = make(2, torch.ones(2, device=device))
        assert made[0].tolist() == [8, 8] and made[1].tolist() == [0, 1]
        assert made[0].device == made[4].device == torch.device(device)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_and_tracing_a_model_on_a_gpu(gpus):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Dropout(0.5)).to(ONE).eval()
    x = torch.ones(4, 3, device=ONE)
    for compiled in (torch.jit.script(model), torch.jit.trace(model, x)):
        out = compiled(x)
        assert out.device == ONE and torch.equal(out, model(x))
    with pytest.raises(RuntimeError, match="failed in the TorchScript interpreter"):
        torch.jit.script(model)(torch.ones(4, 3))


@pytest.mark.parametrize("constant", [1, 2.5, 2 + 1j])
def test_constants_of_a_traced_function(gpus, constant):
    """TorchScript asks for their value, and shows them, by operations that take tensors alone."""
    x = torch.linspace(0.5, 2, 4, device=ONE)
    traced = torch.jit.trace(lambda x: 1 / (x * x + constant), x)
    assert "Constant" in str(traced.graph)
    for _ in range(3):  # it is rewritten after the second
        assert torch.equal(traced(x), 1 / (x * x + constant)) and traced(x).device == ONE


# -- in a process of its own, where it is the first of its kind; forked once PyTorch is there

TRANSFORM = """
virtualgpu.gpus(2)
f, cpu = lambda a: (a**3).sum().exp(), torch.tensor([0.1, 0.2])
found, expected = [{} for x in (cpu.to("cuda:1"), cpu)]
print(found.device, torch.equal(found.cpu(), expected))
"""
TRANSFORMS = {  # PyTorch scripts their decompositions when they are first used
    "hessian": "torch.func.hessian(f)(x)",
    "jvp": "torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]",
    "vjp": "torch.func.vjp(f, x)[1](torch.ones_like(f(x)))[0]",
    "vmap": "torch.func.vmap(torch.func.grad(lambda a: (a**3).sum()))(x.view(-1, 1))",
    "forward mode": "torch.autograd.functional.jacobian(f, x, vectorize=True, strategy='forward-mode')",
}
COMPILED = """
with virtualgpu.gpus(1):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2, device="cuda"))
graphs = []
def backend(module, inputs):
    graphs.append(module); return module.forward
print(torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist(), len(graphs))
"""
EXPORTS = """
from torch import nn
virtualgpu.gpus(2)
model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).to("cuda:1"), torch.ones(4, 3, device="cuda:1")
for line in (
    lambda: torch.export.export(model, (x,)).module()(x),
    lambda: torch.fx.symbolic_trace(model)(x),
    lambda: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
):
    try:
        out = line()
        print(out.device, torch.equal(out, model(x)))
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
from torch._subclasses import FakeTensorMode
before = torch.cuda.memory_allocated(1) + 512  # what from_tensor is given
with FakeTensorMode() as mode:
    y = torch.ones(2, device="cuda:1") + mode.from_tensor(torch.ones(2, device="cuda:1"))
    print(y.device, torch.cuda.memory_allocated(1) <= before)
print("alive", (x + 1).device)
"""


def test_first_used_with_gpus_on(tmp_path):
    cases = {name: TRANSFORM.format(line) for name, line in TRANSFORMS.items()}
    cases |= {"compile": COMPILED, "export": EXPORTS}
    # the first of all imports what torch._dynamo needs by itself
    ended = outcomes(list(cases.values()), tmp_path, DYNAMO, first=1)
    printed = {name: lines for name, (_, lines) in zip(cases, ended, strict=True)}
    assert {name: printed[name] for name in TRANSFORMS if printed[name] != ["cuda:1 True"]} == {}
    assert printed["compile"][-1:] == ["[2.0, 2.0] 1"], printed["compile"]  # it works again after reset
    exported, *others = printed["export"]
    without_cuda = torch.version.cuda is None  # there C++ would end the process; a sentence says so
    assert exported.startswith("NotImplementedError torch.export" if without_cuda else "cuda:1 True")
    assert others == ["cuda:1 True"] * 3 + ["alive cuda:1"]


# -- flex_attention: its numbers and gradients, and the memory and time of the one kernel that it is on a GPU

LENGTH, DOCUMENT = 256, 100


def documents(device):
    """Tokens see those before them in their document: a mask that takes a tensor from around it."""
    of = torch.arange(LENGTH).to(device) // DOCUMENT
    return lambda batch, head, query, key: (query >= key) & (of[query] == of[key])


def leaves(device="cpu"):
    """Query, key and value [2, heads, LENGTH, 16], of 4, 2 and 2 heads, the same on every device."""
    torch.manual_seed(0)
    return [torch.randn(2, heads, LENGTH, 16).to(device).requires_grad_() for heads in (4, 2, 2)]


def test_it_learns_what_attention_with_that_mask_does(gpus):
    rows = torch.arange(LENGTH)
    plain, virtual = leaves(), leaves("cuda")
    mask = documents("cpu")(0, 0, rows[:, None], rows[None])
    F.scaled_dot_product_attention(*plain, attn_mask=mask, enable_gqa=True).sin().sum().backward()
    blocks = create_block_mask(documents("cuda"), None, None, LENGTH, LENGTH, device="cuda")
    before = torch.cuda.memory_allocated()
    out = torch.compile(flex_attention)(*virtual, block_mask=blocks, enable_gqa=True)
    # one output, and a float for each row of scores; never the scores, 2 MiB
    assert torch.cuda.memory_allocated() - before == out.nbytes + 2 * 4 * LENGTH * 4
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    out.sin().sum().backward()
    for expected, leaf in zip(plain, virtual, strict=True):
        assert leaf.grad.is_cuda
        torch.testing.assert_close(leaf.grad.cpu(), expected.grad, atol=1e-5, rtol=1e-4)
    on_cpu = flex_attention(*(tensor.detach() for tensor in plain), enable_gqa=True)  # none of its business
    assert on_cpu.device.type == "cpu"


def test_scores_may_change_by_a_constant_and_not_by_what_would_learn(gpus):
    query, key, value = leaves("cuda")
    bias = torch.randn(4, device="cuda", requires_grad=True)
    constant = bias.detach()
    flex_attention(query, key, value, lambda s, b, h, q, k: s + constant[h], enable_gqa=True).sum().backward()
    assert query.grad.abs().sum() > 0
    with pytest.raises(NotImplementedError, match="detach it before"):
        flex_attention(query, key, value, lambda s, b, h, q, k: s + bias[h], enable_gqa=True)


def test_a_dry_run_has_the_kernel_and_not_the_scores():
    with virtualgpu.dry_run(like="H100"):
        x = torch.randn(1, 4, 8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with virtualgpu.recording() as spans:
            flex_attention(x, x, x).sum().backward()
        assert x.grad.shape == x.shape
        assert torch.cuda.max_memory_allocated() < 64 << 20  # the scores alone would be 1 GiB
        assert [span.name for span in spans if "flex" in span.name] == ["flex_attention", "flex_attention_backward"]


def test_autocast_casts_flex_attention(gpus):
    query, key, value = leaves("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = flex_attention(query, key, value, enable_gqa=True)
        out.sum().backward()
    assert out.dtype == torch.bfloat16 and query.grad.dtype == torch.float32
    expected = flex_attention(*(tensor.bfloat16() for tensor in (query, key, value)), enable_gqa=True)
    assert torch.equal(out, expected)


def test_it_works_on_the_blocks_that_its_mask_leaves():
    """A causal mask over 16 x 16 blocks leaves 136 of them; where a dry run does not know the mask, it takes all."""
    length = 2048

    def seconds(mask_mod):
        blocks = create_block_mask(mask_mod, None, None, length, length, device="cuda")
        x = torch.randn(1, 8, length, 64, device="cuda").requires_grad_()
        with virtualgpu.recording() as spans, torch.no_grad():
            flex_attention(x, x, x, block_mask=blocks)
        return sum(span.end - span.start for span in spans if span.name == "flex_attention")

    with virtualgpu.gpus(1, like="T4"):
        full = seconds(lambda b, h, q, k: q >= 0)
        assert seconds(lambda b, h, q, k: q >= k) / full == pytest.approx(136 / 256, rel=0.05)
    with virtualgpu.dry_run(1, like="T4"):
        assert seconds(lambda b, h, q, k: q >= k) == pytest.approx(full)
