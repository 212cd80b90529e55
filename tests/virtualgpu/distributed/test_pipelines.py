"""torch.distributed.pipelining on virtual GPUs: every schedule's gradients, bubble and memory, and which micro-batch a kernel is for."""

import re

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu.run.ranks import launch

WIDTH, BATCH, MICRO_BATCHES = 64, 16, 4
SCHEDULES = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
# Schedules keep and wait differently from version to version: these figures are those of the newest
OF_2_15 = pytest.mark.skipif(torch.__version__ < "2.15", reason="figures of PyTorch 2.15's schedules")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the last rank has the two stages in the middle, the first one both ends


def steps(jobs: list[tuple]) -> dict[tuple, tuple]:
    """Two steps by each schedule. (gradients by layer, spans of the second step, peak bytes above what was there before it)"""
    return {job: step(*job) for job in jobs}


def step(schedule: str, micro_batches: int, width: int, batch: int, layers: int) -> tuple:
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, kind = torch.device("cuda", rank), schedules.get_schedule_class(schedule)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    at = [rank, 2 * ranks - 1 - rank] if schedule in V_SHAPED else [rank, rank + ranks] if several else [rank]
    stages = ranks * len(at)
    each = layers // stages
    torch.manual_seed(0)
    model = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    parts = {stage: nn.Sequential(*model[stage * each : (stage + 1) * each]).to(device) for stage in at}
    made = [pipelining.PipelineStage(parts[stage], stage, stages, device) for stage in at]
    run = kind(made if several else made[0], micro_batches, loss_fn=nn.functional.mse_loss)
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
    peak = torch.cuda.max_memory_allocated() - before
    if virtualgpu.machine().dry:
        return {}, list(spans), peak
    gradients = {
        stage * each + i: [p.grad.cpu() for p in layer.parameters()]
        for stage, part in parts.items()
        for i, layer in enumerate(part)
    }
    return gradients, list(spans), peak


def one_device(last_first: bool) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)]
    x, y = (torch.randn(MICRO_BATCHES * BATCH, WIDTH) for _ in range(2))
    model = nn.Sequential(*layers)
    every = list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True))
    for inputs, targets in reversed(every) if last_first else every:
        (nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES).backward()
    return [[p.grad for p in layer.parameters()] for layer in layers]


def started(ranks: int, jobs: list[tuple], dry: bool, like: str = "T4") -> list[dict[tuple, tuple]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELPERS_GPUS", "virtual")
        virtualgpu.reset()
        virtualgpu.gpus(ranks, like=like)
        try:
            return launch(steps, jobs, nprocs=ranks, dry=dry, timeout=300)
        finally:
            virtualgpu.reset()


def small(schedule: str) -> tuple:
    return schedule, MICRO_BATCHES, WIDTH, BATCH, 8


@pytest.fixture(scope="module")
def with_numbers():
    """Each rank's steps on two GPUs."""
    return started(2, [small(schedule) for schedule in SCHEDULES], dry=False)


RANKS, ROWS, LARGE, EACH = (
    4,
    2048,
    8192,
    4,
)  # micro-batches and layers whose kernels last long beside launch and message


def large(schedule: str, micro_batches: int = 8) -> tuple:
    return schedule, micro_batches, LARGE, ROWS, RANKS * EACH


@pytest.fixture(scope="module")
def on_shapes():
    """Steps on four GPUs, without numbers."""
    jobs = [large(schedule) for schedule in SCHEDULES] + [large(name, 5) for name in ("GPipe", "1F1B")]
    return started(RANKS, jobs, dry=True, like="H100")


def passes(spans, way: str) -> dict[tuple[int, int], list]:
    """The spans of one kind of pass ("F", "B", "I" or "W") by (stage, micro-batch)."""
    found: dict = {}
    for span in spans:
        action = re.fullmatch(r"PP:(\d+)([FBIW])(\d+)", span.annotation)
        if action is not None and action[2] == way:
            found.setdefault((int(action[1]), int(action[3])), []).append(span)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_one_device(with_numbers, schedule):
    found = {layer: own for rank in with_numbers for layer, own in rank[small(schedule)][0].items()}
    expected = one_device(
        last_first=schedule == "LoopedBFS"
    )  # the order in which gradients are added decides over the last bit
    assert sorted(found) == list(range(len(expected)))
    for layer, gradients in enumerate(expected):
        for gradient, other in zip(gradients, found[layer], strict=True):
            assert torch.equal(gradient, other)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kernels_know_their_micro_batch(with_numbers, schedule):
    """And kernels of the weights' gradients that autograd does not launch count as backward, too. The first stage has no gradient of
    an input to compute."""
    for rank, own in enumerate(with_numbers):
        spans = own[small(schedule)][1]
        at = [rank, 3 - rank] if schedule in V_SHAPED else [rank] if schedule in SCHEDULES[:2] else [rank, rank + 2]
        every = {(stage, number) for stage in at for number in range(MICRO_BATCHES)}
        assert passes(spans, "F").keys() == every
        assert passes(spans, "B").keys() | passes(spans, "W").keys() == every
        assert passes(spans, "I").keys() == {(stage, number) for stage, number in passes(spans, "W") if stage}
        for way in "BIW":
            for own in passes(spans, way).values():
                assert {span.kind for span in own} == {"backward"} and any(span.name == "mm" for span in own)
        if schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
            assert passes(spans, "W")


def test_every_run_takes_the_same_time(with_numbers):
    """Zero bubble aside: PyTorch goes through its weights in the order of their addresses."""
    sure = [small(schedule) for schedule in SCHEDULES[:4]]
    again = started(2, sure, dry=False)
    for first, second in zip(with_numbers, again, strict=True):
        assert [first[job][1:] for job in sure] == [second[job][1:] for job in sure]


def bubbles(ranks, schedule: str) -> list[float]:
    """The share of the step in which each GPU has no kernel of forward or backward."""
    every = [
        [(s.start, s.end) for s in rank[large(schedule)][1] if s.kind in ("forward", "backward")] for rank in ranks
    ]
    whole = max(end for own in every for _, end in own) - min(start for own in every for start, _ in own)
    return [1 - sum(end - start for start, end in own) / whole for own in every]


@OF_2_15
def test_the_bubble_is_the_formulas(on_shapes):
    """(p - 1) / (v m + p - 1) for p ranks of v stages and m micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2, as a share
    of the whole step). Beyond it: messages that nothing hides, weights' gradients that are added from the second micro-batch on,
    and loss and scaling. The first stage computes no gradient of its input, and so waits more."""
    for schedule, v in [("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("Interleaved1F1B", 2)]:
        formula = (RANKS - 1) / (v * 8 + RANKS - 1)
        first, *others = bubbles(on_shapes, schedule)
        assert others == pytest.approx([formula] * 3, abs=0.008)
        assert first > formula + 0.03


@OF_2_15
def test_zero_bubble_waits_less(on_shapes):
    found = {schedule: sum(bubbles(on_shapes, schedule)) / RANKS for schedule in SCHEDULES}
    assert found["ZBVZeroBubble"] < 0.6 * found["Interleaved1F1B"] < 0.6 * found["1F1B"]
    assert found["InterleavedZeroBubble"] < 0.6 * found["Interleaved1F1B"]
    assert found["DualPipeV"] < found["Interleaved1F1B"]


@OF_2_15
def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_to_come(on_shapes):
    """GPipe keeps all. Each is the stage's input, where that was received, and what each layer's ReLU gave."""
    tensor = ROWS * LARGE * 4
    peak = {(name, m): [rank[large(name, m)][2] for rank in on_shapes] for name in ("GPipe", "1F1B") for m in (5, 8)}
    for rank, received in [(0, 0), (1, 1), (2, 1)]:
        assert peak["GPipe", 8][rank] - peak["GPipe", 5][rank] == 3 * (EACH + received) * tensor
        assert peak["1F1B", 8][rank] == peak["1F1B", 5][rank]
    assert peak["1F1B", 8][1] - peak["1F1B", 8][2] == (EACH + 1) * tensor  # 3 micro-batches and 2
    assert peak["1F1B", 8][0] < peak["GPipe", 8][0]
