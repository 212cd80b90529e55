"""Ranks of a notebook on its virtual GPUs: what they did comes back to be drawn."""

import pytest
import torch
from torch import nn

import virtualgpu
from helpers import plots
from helpers.plots import figures
from virtualgpu.run.ranks.watch import WorkerError


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    virtualgpu.gpus(2)
    yield
    virtualgpu.reset()


def train(steps: int):
    from torch.distributed import get_rank
    from torch.nn.parallel import DistributedDataParallel

    rank = get_rank()
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(rank)
    model = DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=1)
    with virtualgpu.Monitor() as monitor:
        for _ in range(steps):
            model(torch.randn(2048, 512, device=rank)).sum().backward()
            monitor.step()
    return monitor, torch.cuda.max_memory_allocated()


def test_a_timeline_has_all_ranks(capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "display", lambda bundle, **_: drawn.append(bundle["text/plain"]))
    with virtualgpu.Timeline() as timeline:
        ranks = virtualgpu.launch(train, 2)
    assert list(timeline.rows) == ["cuda:0", "cuda:1"] and timeline.origin == "simulated"
    zero, one = ([s for s in row if s.kind == "communication"] for row in timeline.rows.values())
    assert zero and [(s.start, s.end) for s in zero] == [(s.start, s.end) for s in one]
    assert {"forward", "backward"} <= {span.kind for span in timeline.rows["cuda:1"]}
    assert timeline.seconds >= one[-1].end
    plots.timeline(timeline, "two ranks")
    for rank, (monitor, peak) in enumerate(ranks):
        plots.utilization(monitor, "one rank")
        shares = monitor.utilization()
        assert all(share > 0 for share in shares[f"cuda:{rank}"]) and all(
            share == 0 for share in shares[f"cuda:{1 - rank}"]
        )
        assert peak > 3 * 4 * 4 * 512 * 512
    assert drawn == ["Figure (simulated): two ranks", *["Figure (simulated): one rank"] * 2]


def test_shapes_alone(capsys):
    """A model of 16 GiB on T4s: it is too large, and says so before anything is allocated."""

    def too_large():
        from torch.distributed import get_rank

        return nn.Linear(1 << 16, 1 << 16, device=get_rank()).weight.shape

    with pytest.raises(WorkerError, match="CUDA out of memory"):
        virtualgpu.launch(too_large, dry=True)
    assert [m for _, m in virtualgpu.launch(train, 1, dry=True)] == [m for _, m in virtualgpu.launch(train, 1)]
    virtualgpu.reset()
    with pytest.raises(ValueError, match="gpus"):
        virtualgpu.launch(too_large, dry=True)
