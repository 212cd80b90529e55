"""torch.distributed.pipelining on virtual GPUs: gradients of one device, the bubble of each schedule, the same times in every run."""

import pytest
import torch
from torch import nn

import virtualgpu

WIDTH, BATCH = 256, 64
LARGE = 512, 256  # where kernels last longer than their launch


def pipeline(schedule: str, micro_batches: int, width: int = WIDTH, batch: int = BATCH):
    """One step of a pipeline: this rank's gradients, the GPU's bubble and peak, and what it did."""
    import torch.distributed as dist
    from torch.distributed import pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    several = schedule != "ScheduleGPipe" and schedule != "Schedule1F1B"
    at = [rank, 2 * ranks - 1 - rank] if "ZBV" in schedule else [rank, rank + ranks] if several else [rank]
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    stages = ranks * len(at)
    each = len(layers) // stages
    parts = {stage: nn.Sequential(*layers[stage * each : (stage + 1) * each]).to(device) for stage in at}
    made = [pipelining.PipelineStage(parts[stage], stage, stages, device) for stage in at]
    kind = getattr(pipelining, schedule)
    steps = kind(made if several else made[0], micro_batches, loss_fn=nn.functional.mse_loss)
    x, y = (torch.randn(micro_batches * batch, width).to(device) for _ in range(2))
    arguments, targets = (x,) if 0 in at else (), {"target": y} if stages - 1 in at else {}
    steps.step(*arguments, **targets)
    for part in parts.values():
        part.zero_grad()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with virtualgpu.recording() as spans:
        steps.step(*arguments, **targets)
        torch.cuda.synchronize()
    kernels = [(span.start, span.end) for span in spans if span.kind in ("forward", "backward")]
    gradients = {stage: [p.grad.cpu().tolist() for p in part.parameters()] for stage, part in parts.items()}
    told = [(span.kind, span.name, span.start, span.end, span.stream) for span in spans]
    return gradients, kernels, torch.cuda.max_memory_allocated() - before, told


def one_device(micro_batches: int, stages: int) -> dict[int, list]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)]
    x, y = (torch.randn(micro_batches * BATCH, WIDTH) for _ in range(2))
    model = nn.Sequential(*layers)
    for inputs, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        (nn.functional.mse_loss(model(inputs), targets) / micro_batches).backward()
    each = len(layers) // stages
    return {
        stage: [p.grad.tolist() for layer in layers[stage * each : (stage + 1) * each] for p in layer.parameters()]
        for stage in range(stages)
    }


def bubble(ranks) -> float:
    every = [kernel for _, kernels, *_ in ranks for kernel in kernels]
    whole = max(end for _, end in every) - min(begin for begin, _ in every)
    return 1 - sum(end - begin for begin, end in every) / (whole * len(ranks))


SCHEDULES = [
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_one_device(on_gpus, schedule):
    several = SCHEDULES.index(schedule) > 1
    found = on_gpus(pipeline, schedule, 4)
    expected = one_device(4, 4 if several else 2)
    for gradients, *_ in found:
        for stage, own in gradients.items():
            assert own == expected[stage]


def test_more_micro_batches_leave_a_smaller_bubble_and_1f1b_needs_less_memory(on_gpus):
    few, many = on_gpus(pipeline, "ScheduleGPipe", 2, *LARGE), on_gpus(pipeline, "ScheduleGPipe", 12, *LARGE)
    assert bubble(few) > 1 / 3 > bubble(many) > 1 / 13  # (ranks - 1) / (micro-batches + ranks - 1) is the least
    in_turn = on_gpus(pipeline, "Schedule1F1B", 12, *LARGE)
    assert in_turn[0][2] < 0.5 * many[0][2]
    assert [rank[3] for rank in in_turn] == [rank[3] for rank in on_gpus(pipeline, "Schedule1F1B", 12, *LARGE)]
