"""Pipelines that PyTorch's tracer cuts: models on the CPU, on a GPU and without values; values that skip stages, several at a time."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline, stage

import virtualgpu

WITH_CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="a wheel without CUDA: refused in a sentence")

WIDTH, BATCH, MICRO_BATCHES = 16, 8, 4
# Older ones ask gradients of whatever a stage receives
ANY_TYPE = "is_floating_point" in inspect.getsource(stage)


class Skips(nn.Module):
    """`first` goes from stage 0 to stage 2 and past stage 1, beside what stage 1 makes of it; a tensor of whole numbers goes along."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.b, self.c = nn.Embedding(50, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attend = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, tokens):
        first = self.a(self.embed(tokens))
        mask = tokens > 25 if ANY_TYPE else (tokens > 25).float()
        second = self.b(self.attend(first)).relu()
        return self.c(second * self.scale + first) * mask.unsqueeze(-1)


SPLIT = {"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING}


def data():
    torch.manual_seed(1)
    return torch.randint(0, 50, (MICRO_BATCHES * BATCH, 5)), torch.randn(MICRO_BATCHES * BATCH, 5, WIDTH)


def traced(where: str, schedule: str):
    """Gradients of this rank's stage, by the names that the whole model has for them, and where they are."""
    import torch.distributed as dist
    from torch.distributed import pipelining

    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    model = Skips().to(device if where == "cuda" else "cpu")
    x, y = data()
    example = x[:BATCH].to(device if where == "cuda" else "cpu")
    pipe = pipelining.pipeline(model, mb_args=(example,), split_spec=SPLIT)
    assert pipe.num_stages == 3
    stage = pipe.build_stage(rank, device)
    loss = nn.functional.mse_loss
    steps = getattr(pipelining, schedule)(stage, MICRO_BATCHES, loss_fn=loss)
    losses = []
    given = (x.to(device),) if rank == 0 else ()
    steps.step(*given, **({"target": y.to(device), "losses": losses} if rank == 2 else {}))
    part = pipe.get_stage_module(rank)
    assert {p.device for p in part.parameters()} == {b.device for b in part.buffers()} | {device}
    return {name: p.grad.cpu() for name, p in part.named_parameters() if p.grad is not None}, [v.item() for v in losses]


@pytest.mark.parametrize(
    "where, schedule", [("cpu", "ScheduleGPipe"), pytest.param("cuda", "ScheduleGPipe", marks=WITH_CUDA)]
)
def test_a_traced_pipeline_with_skip_connections(on_gpus, where, schedule):
    ranks = on_gpus(traced, where, schedule, n=3)
    torch.manual_seed(0)
    model, (x, y) = Skips(), data()
    losses = []
    for inputs, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        loss = nn.functional.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        loss.backward()
    assert ranks[2][1] == pytest.approx(losses, rel=1e-6)
    found = {name: gradient for gradients, _ in ranks for name, gradient in gradients.items()}
    expected = {name: p.grad / MICRO_BATCHES for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@WITH_CUDA
def test_tracing_takes_no_memory_and_no_time_of_a_gpu():
    gpu, _ = virtualgpu.gpus(2)
    model, tokens = Skips().to(gpu), data()[0][:BATCH].to(gpu)
    torch.cuda.synchronize()
    held, clock = torch.cuda.memory_allocated(), virtualgpu.machine().clock
    before = clock.busy[0]
    pipe = pipeline(model, mb_args=(tokens,), split_spec=SPLIT)
    assert (torch.cuda.memory_allocated(), clock.busy[0]) == (held, before)
    assert torch.equal(pipe(tokens)[0], model(tokens))


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
    virtualgpu.gpus(1)
    like = torch.empty(2, device="meta", dtype=torch.half)
    for x in (torch.ones(3), torch.ones(3, device="cuda")):
        assert x.to(like).device.type == "meta" and x.to(like).dtype == torch.half


class Numbers(nn.Module):
    """What it computes with is made on the GPU of its input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        shift = torch.full([], 3.0, device=x.device) + torch.tensor(1.0).to(x.device)
        return self.b(self.a(x) * torch.tensor(2.0, device=x.device) + shift)


@WITH_CUDA
def test_a_model_that_makes_numbers_on_its_gpu():
    _, gpu = virtualgpu.gpus(2)
    model, x = Numbers().to(gpu), torch.randn(3, 4, device=gpu)
    pipe = pipeline(model, mb_args=(x,), split_spec={"b": SplitPoint.BEGINNING})
    assert torch.equal(pipe(x)[0], model(x))
