"""A trace of torch.profiler from real GPUs, made by hand: two ranks, two steps, NCCL, a copy and a loader."""

import json
from pathlib import Path

import pytest

from virtualgpu.run.explain import real
from virtualgpu.run.explain import table as explain_table

TRACES = json.loads(Path(__file__).with_name("explain_traces.json").read_text("utf-8"))


def test_a_trace_is_read():
    trace = real.read_trace(TRACES["0"])
    assert trace.ends == pytest.approx([0.0001, 0.0011, 0.0021])
    assert trace.loading == [pytest.approx((0.00015, 0.00025))]
    kinds = {(span.kind, span.name) for span in trace.spans}
    assert ("forward", "mm") in kinds and ("optimizer", "elementwise") in kinds and ("forward", "convolution") in kinds
    assert any(kind == "communication" for kind, _ in kinds) and any(kind == "copy" for kind, _ in kinds)


def test_what_ranks_wait_for_each_other_is_no_communication():
    """Rank 0's kernel of NCCL lasts 400 us, rank 1's, which came last, 200 us."""
    found = real.explained([(int(rank), events) for rank, events in TRACES.items()])
    assert not found.failed and found.step == pytest.approx(1e-3) and found.has_loader
    zero, one = (row.parts for row in found.rows)
    for parts in (zero, one):
        assert sum(parts.computing.values()) + sum(parts.idle.values()) == pytest.approx(parts.step)
    # in the first of two steps; the second has no collective
    assert zero.idle["waiting"] == pytest.approx(100e-6) and zero.idle["communication"] == pytest.approx(100e-6)
    assert one.idle["waiting"] == 0 and one.idle["communication"] == pytest.approx(100e-6)
    assert zero.computing["convolutions"] == pytest.approx(50e-6) and zero.computing["optimizer"] == pytest.approx(
        100e-6
    )
    assert zero.idle["loader"] == pytest.approx(50e-6) and zero.idle["copies"] == pytest.approx(25e-6)
    told = "\n".join(explain_table.lines(found, explain_table.REAL))
    assert "waiting for other ranks" in told and "torch.profiler" in told and "--gpus and --like" in told


def test_the_optimizer_marks_steps_where_nobody_else_does():
    events = [event for event in TRACES["1"] if event["name"] != real.MARK]
    assert len(real.read_trace(events).ends) == 2


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "process_name", "pid": 0}]])
def test_a_trace_of_nothing(events):
    assert "before the profiler had seen a step" in real.explained([(0, events)]).failed


def test_a_program_without_a_gpu_is_profiled(tmp_path):
    """The same way as on a machine with GPUs, but for their kernels."""
    path = tmp_path / "cpu.py"
    path.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(100):\n    model(torch.ones(4)).sum().backward()\n    optimizer.step()\n"
        f"    open({str(tmp_path / 'steps')!r}, 'a').write('.')\n"
    )
    assert real.run([str(path)]).failed == "the program used no GPU"
    assert (tmp_path / "steps").read_text() == "....", "the fifth step ended it"
