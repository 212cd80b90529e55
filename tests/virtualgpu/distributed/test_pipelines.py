"""torch.distributed.pipelining on virtual GPUs: stages by hand and traced, their gradients, bubble and memory; stages played alone."""

import inspect
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining import stage as stages_of_torch

import virtualgpu
from tests.virtualgpu.distributed.conftest import Rows, started

WIDTH, BATCH, MICRO_BATCHES = 64, 16, 4
SCHEDULES = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
# Schedules keep and wait differently from version to version: these figures are those of the newest
OF_2_15 = pytest.mark.skipif(torch.__version__ < "2.15", reason="figures of PyTorch 2.15's schedules")
WITH_CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="a wheel without CUDA: refused in a sentence")
THREE = Rows(3)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the last rank has the two stages in the middle, the first one both ends
# Micro-batches and layers whose kernels last long beside launch and message
RANKS, ROWS, LARGE, EACH = 4, 2048, 8192, 4


def layers(count: int, width: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]


def step(schedule: str, micro_batches=MICRO_BATCHES, width=WIDTH, batch=BATCH, count=8) -> tuple:
    """Of two steps the second: (gradients by layer, its spans, peak bytes above what was there before it)"""
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, kind = torch.device("cuda", rank), schedules.get_schedule_class(schedule)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    at = [rank, 2 * ranks - 1 - rank] if schedule in V_SHAPED else [rank, rank + ranks] if several else [rank]
    stages = ranks * len(at)
    each, model = count // stages, layers(count, width)
    parts = {stage: nn.Sequential(*model[stage * each : (stage + 1) * each]).to(device) for stage in at}
    built = [pipelining.PipelineStage(parts[stage], stage, stages, device) for stage in at]
    run = kind(built if several else built[0], micro_batches, loss_fn=nn.functional.mse_loss)
    x, y = (torch.randn(micro_batches * batch, width).to(device) for _ in range(2))
    given, targets = (x,) if 0 in at else (), {"target": y} if stages - 1 in at else {}
    run.step(*given, **targets)
    for part in parts.values():
        part.zero_grad()
    dist.all_reduce(torch.zeros(1, device=device))  # all begin together
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with virtualgpu.recording() as spans:
        run.step(*given, **targets)
        torch.cuda.synchronize()
    peak, gradients = torch.cuda.max_memory_allocated() - before, {}
    for stage, part in parts.items() if not virtualgpu.machine().dry else ():
        for i, layer in enumerate(part):
            gradients[stage * each + i] = [p.grad.cpu() for p in layer.parameters()]
    return gradients, list(spans), peak


SMALL = {schedule: partial(step, schedule) for schedule in SCHEDULES}


@pytest.fixture(scope="module")
def with_numbers():
    """Each rank's steps on two GPUs."""
    return started(SMALL)


@pytest.fixture(scope="module")
def on_shapes():
    """Steps on four GPUs, without numbers, by (schedule, micro-batches)."""
    jobs = [(schedule, 8) for schedule in SCHEDULES] + [("GPipe", 5), ("1F1B", 5)]
    cases = {job: partial(step, *job, LARGE, ROWS, RANKS * EACH) for job in jobs}
    return started(cases, RANKS, RANKS, like="H100", dry=True)


def passes(spans, way: str) -> dict[tuple[int, int], list]:
    """The spans of one kind of pass ("F", "B", "I" or "W") by (stage, micro-batch)."""
    found: dict = {}
    for span in spans:
        action = re.fullmatch(r"PP:(\d+)([FBIW])(\d+)", span.annotation)
        if action is not None and action[2] == way:
            found.setdefault((int(action[1]), int(action[3])), []).append(span)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_one_device_and_kernels_know_their_micro_batch(with_numbers, schedule):
    """Kernels of the weights' gradients that autograd does not launch count as backward, too. The first stage has no gradient of an input
    to compute."""
    model = nn.Sequential(*layers(8, WIDTH))
    x, y = (torch.randn(MICRO_BATCHES * BATCH, WIDTH) for _ in range(2))
    micro_batches = list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True))
    for inputs, targets in reversed(micro_batches) if schedule == "LoopedBFS" else micro_batches:  # to the last bit
        (nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES).backward()
    found = {layer: its for gradients, _, _ in with_numbers[schedule] for layer, its in gradients.items()}
    assert sorted(found) == list(range(8))
    for layer, gradients in found.items():
        for gradient, parameter in zip(gradients, model[layer].parameters(), strict=True):
            assert torch.equal(gradient, parameter.grad)
    for rank, (_, spans, _) in enumerate(with_numbers[schedule]):
        at = [rank, 3 - rank] if schedule in V_SHAPED else [rank] if schedule in SCHEDULES[:2] else [rank, rank + 2]
        every = {(stage, number) for stage in at for number in range(MICRO_BATCHES)}
        assert passes(spans, "F").keys() == every
        assert passes(spans, "B").keys() | passes(spans, "W").keys() == every
        assert passes(spans, "I").keys() == {(stage, number) for stage, number in passes(spans, "W") if stage}
        assert passes(spans, "W") or schedule not in ("InterleavedZeroBubble", "ZBVZeroBubble")
        for way in "BIW":
            for its in passes(spans, way).values():
                assert {span.kind for span in its} == {"backward"} and any(span.name == "mm" for span in its)


def test_every_run_takes_the_same_time(with_numbers):
    """Zero bubble aside: PyTorch goes through its weights in the order of their addresses."""
    again = started({schedule: SMALL[schedule] for schedule in SCHEDULES[:4]})
    for schedule, ranks in again.items():
        assert [rank[1:] for rank in ranks] == [rank[1:] for rank in with_numbers[schedule]]


def bubbles(ranks) -> list[float]:
    """The share of the step in which each GPU has no kernel of forward or backward."""
    every = [[(s.start, s.end) for s in spans if s.kind in ("forward", "backward")] for _, spans, _ in ranks]
    whole = max(end for its in every for _, end in its) - min(start for its in every for start, _ in its)
    return [1 - sum(end - start for start, end in its) / whole for its in every]


@OF_2_15
def test_the_bubble_is_the_formulas(on_shapes):
    """(p - 1) / (v m + p - 1) for p ranks of v stages and m micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2, as a share
    of the whole step). Beyond it: messages that nothing hides, weights' gradients that are added from the second micro-batch on,
    and loss and scaling. The first stage computes no gradient of its input, and so waits more."""
    for schedule, v in [("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("Interleaved1F1B", 2)]:
        formula = (RANKS - 1) / (v * 8 + RANKS - 1)
        first, *others = bubbles(on_shapes[schedule, 8])
        assert others == pytest.approx([formula] * 3, abs=0.008)
        assert first > formula + 0.03
    found = {schedule: sum(bubbles(on_shapes[schedule, 8])) / RANKS for schedule in SCHEDULES}
    assert found["ZBVZeroBubble"] < 0.6 * found["Interleaved1F1B"] < 0.6 * found["1F1B"]
    assert found["InterleavedZeroBubble"] < 0.6 * found["Interleaved1F1B"]
    assert found["DualPipeV"] < found["Interleaved1F1B"]


@OF_2_15
def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_to_come(on_shapes):
    """GPipe keeps all. Each is the stage's input, where that was received, and what each layer's ReLU gave."""
    tensor, jobs = ROWS * LARGE * 4, [(name, m) for name in ("GPipe", "1F1B") for m in (5, 8)]
    peak = {job: [bytes_held for _, _, bytes_held in on_shapes[job]] for job in jobs}
    for rank, received in [(0, 0), (1, 1), (2, 1)]:
        assert peak["GPipe", 8][rank] - peak["GPipe", 5][rank] == 3 * (EACH + received) * tensor
        assert peak["1F1B", 8][rank] == peak["1F1B", 5][rank]
    assert peak["1F1B", 8][1] - peak["1F1B", 8][2] == (EACH + 1) * tensor  # 3 micro-batches and 2
    assert peak["1F1B", 8][0] < peak["GPipe", 8][0]


# -- a stage that is played alone, and stages that are sharded


def stage(told: bool = True):
    """The peak of two steps of this rank's stage by 1F1B. told: it is given the shapes of what it receives and sends."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    part = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(device)
    received, sent = (torch.empty(64, 256, device=device, requires_grad=wants) for wants in (rank > 0, True))
    known = {"input_args": (received,), "output_args": (sent,)} if told else {}
    run = Schedule1F1B(PipelineStage(part, rank, ranks, device, **known), 8, loss_fn=nn.functional.mse_loss)
    x, y = (torch.randn(8 * 64, 256, device=device) for _ in range(2))
    for _ in range(2):
        run.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == ranks - 1 else {}))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def played(rank: int, ranks: int, **options):
    import torch.distributed as dist

    with virtualgpu.dry_run(like="T4", world_size=ranks, rank=rank):
        dist.init_process_group("nccl")
        return stage(**options)


def test_a_stage_alone_has_the_memory_that_it_has_among_all(on_gpus):
    ranks = on_gpus(stage, n=3, dry=True)
    virtualgpu.reset()
    with pytest.warns(UserWarning, match="the other side is taken to be there"):
        assert [played(rank, 3) for rank in range(3)] == ranks
    with pytest.raises(NotImplementedError, match="given input_args= and output_args="):
        played(2, 4, told=False)


def model_and_data():
    torch.manual_seed(0)
    parts = [nn.Sequential(*[nn.Linear(16, 16) for _ in range(2)]) for _ in range(2)]
    return parts, torch.randn(16, 16), torch.randn(16, 16)


def two_dimensional():
    """A pipeline of two stages, each on two ranks that share its parameters by FSDP2."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    device = torch.device("cuda", dist.get_rank())
    mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
    at, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    parts, x, y = model_and_data()
    part = parts[at].to(device)
    for layer in (*part, part):
        fully_shard(layer, mesh=mesh["dp"])
    pipe = PipelineStage(part, at, 2, device, group=mesh.get_group("pp"))
    run = Schedule1F1B(pipe, 2, loss_fn=nn.functional.mse_loss)
    x, y = x.chunk(2)[replica].to(device), y.chunk(2)[replica].to(device)
    run.step(*((x,) if at == 0 else ()), **({"target": y} if at == 1 else {}))
    return at, [p.grad.full_tensor().cpu() for p in part.parameters()]


def test_stages_that_are_sharded(on_gpus):
    parts, x, y = model_and_data()
    nn.functional.mse_loss(parts[1](parts[0](x)), y).backward()
    for at, gradients in on_gpus(two_dimensional, n=4):
        for gradient, parameter in zip(gradients, parts[at].parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


# -- pipelines that PyTorch's tracer cuts


class Skips(nn.Module):
    """`first` goes from stage 0 to stage 2 and past stage 1, beside what stage 1 makes of it; a tensor of whole numbers goes along."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.b, self.c = nn.Embedding(50, 16), *(nn.Linear(16, 16) for _ in range(3))
        self.attend = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, tokens):
        first = self.a(self.embed(tokens))
        mask = tokens > 25  # older versions ask gradients of whatever a stage receives
        mask = mask if "is_floating_point" in inspect.getsource(stages_of_torch) else mask.float()
        second = self.b(self.attend(first)).relu()
        return self.c(second * self.scale + first) * mask.unsqueeze(-1)


SPLIT = {"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING}


def tokens_and_targets():
    torch.manual_seed(1)
    return torch.randint(0, 50, (MICRO_BATCHES * 8, 5)), torch.randn(MICRO_BATCHES * 8, 5, 16)


def traced(where: str):
    """Gradients of this rank's stage, by the names that the whole model has for them, and losses. where: the model is traced."""
    import torch.distributed as dist
    from torch.distributed import pipelining

    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    model = Skips().to(device if where == "cuda" else "cpu")
    x, y = tokens_and_targets()
    pipe = pipelining.pipeline(model, mb_args=(x[:8].to(device if where == "cuda" else "cpu"),), split_spec=SPLIT)
    steps = pipelining.ScheduleGPipe(pipe.build_stage(rank, device), MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    losses = []
    given = (x.to(device),) if rank == 0 else ()
    steps.step(*given, **({"target": y.to(device), "losses": losses} if rank == 2 else {}))
    part = pipe.get_stage_module(rank)
    assert {p.device for p in part.parameters()} == {b.device for b in part.buffers()} | {device}
    return {name: p.grad.cpu() for name, p in part.named_parameters() if p.grad is not None}, [v.item() for v in losses]


@THREE.row
def traced_on_cpu():
    return traced("cpu")


@THREE.row
def traced_on_cuda():
    return traced("cuda")


@pytest.mark.parametrize("where", [traced_on_cpu, pytest.param(traced_on_cuda, marks=WITH_CUDA)])
def test_a_traced_pipeline_with_skip_connections(where):
    ranks = THREE[where]
    torch.manual_seed(0)
    model, (x, y), losses = Skips(), tokens_and_targets(), []
    for inputs, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        loss = nn.functional.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        loss.backward()
    assert ranks[2][1] == pytest.approx(losses, rel=1e-6)
    found = {name: gradient for gradients, _ in ranks for name, gradient in gradients.items()}
    expected = {name: p.grad / MICRO_BATCHES for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected)


class Numbers(nn.Module):
    """What it computes with is made on the GPU of its input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        shift = torch.full([], 3.0, device=x.device) + torch.tensor(1.0).to(x.device)
        return self.b(self.a(x) * torch.tensor(2.0, device=x.device) + shift)


TRACED = [
    (Skips, lambda: tokens_and_targets()[0][:8], SPLIT),
    (Numbers, lambda: torch.randn(3, 4), {"b": SplitPoint.BEGINNING}),
]


@WITH_CUDA
@pytest.mark.parametrize(("kind", "given", "split"), TRACED)
def test_tracing_takes_no_memory_and_no_time_of_a_gpu(kind, given, split):
    _, gpu = virtualgpu.gpus(2)
    model, inputs, clock = kind().to(gpu), given().to(gpu), virtualgpu.machine().clock
    torch.cuda.synchronize(gpu)
    held, busy = torch.cuda.memory_allocated(gpu), clock.busy[1]
    pipe = pipeline(model, mb_args=(inputs,), split_spec=split)
    assert (torch.cuda.memory_allocated(gpu), clock.busy[1]) == (held, busy)
    assert torch.equal(pipe(inputs)[0], model(inputs))


@pytest.mark.parametrize("gpus_on", [False, True])
def test_a_model_without_values(gpus_on):
    """The same stages as where no virtual GPUs are on; dropout's decomposition asks the device of a tensor on meta."""
    if gpus_on:
        virtualgpu.gpus(2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 2))
        x = torch.randn(2, 3, 4)
    pipe = pipeline(model, mb_args=(x,), split_spec={"1": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2
    assert {p.device.type for p in pipe.get_stage_module(1).parameters()} == {"meta"}


def test_to_a_tensor_without_values():
    """Stages of older versions tell each other shapes so: nobody's memory."""
    with virtualgpu.dry_run(1):
        shape = torch.ones(1 << 20, device="cuda").to("meta")
        assert torch.cuda.memory_allocated() == 0 and shape.shape == (1 << 20,) and shape.device.type != "cuda"
    virtualgpu.gpus(1)
    like = torch.empty(2, device="meta", dtype=torch.half)
    for x in (torch.ones(3), torch.ones(3, device="cuda")):
        assert x.to(like).device.type == "meta" and x.to(like).dtype == torch.half


def test_what_export_asserts_of_a_tensor():
    virtualgpu.gpus(2)
    x = torch.ones(2, device="cuda:1")
    check = torch.ops.aten._assert_tensor_metadata.default
    assert check(x, dtype=torch.float32, device=torch.device("cuda", 1), layout=torch.strided) is None
    for wrong in ({"device": torch.device("cuda", 0)}, {"dtype": torch.int32}):
        with pytest.raises(RuntimeError, match="mismatch"):
            check(x, **wrong)
