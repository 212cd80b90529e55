"""Table, trace and report, from figures written down by hand."""

import json

import pytest
import torch

from tests.virtualgpu.run.test_environment import H100, T4
from virtualgpu.environment import Settings
from virtualgpu.memory.ledger import Communication, Entry, Usage
from virtualgpu.run import report, results
from virtualgpu.run.report import LiveBlock, Peak

GIB, MIB = 1 << 30, 1 << 20


def entry(pid, born, last, *gpus, rank=-1):
    return Entry(pid, rank, born, last, True, 0, list(gpus))


def usage(allocated=0, reserved=0, busy=0.0, now=0.0, computing=None):
    return Usage(0, allocated, reserved, busy, now, busy if computing is None else computing)


def test_table_of_one_process():
    lines = report.table_lines(
        [entry(1, 0, 9, usage(), usage(GIB, 3 * GIB, 0.5, 1.0, 0.25))], Settings((T4, H100), dry=True)
    )
    assert lines[0] == "virtualgpu: 1 x Tesla T4, 1 x NVIDIA H100 80GB HBM3, dry run, 1 process"
    assert [line.split() for line in lines[2:]] == [
        ["0", "not", "used"],
        ["1", "1.00", "GiB", "3.00", "GiB", "4", "%", "of", "79.18", "GiB", "50", "%", "25", "%", "1", "s"],
    ]


def test_table_without_use():
    assert report.table_lines([], Settings((T4,))) == ["virtualgpu: 1 x Tesla T4: no process used a GPU"]
    idle = entry(1, 0, 9, usage())
    assert report.table_lines([idle], Settings((T4,))) == report.table_lines([], Settings((T4,)))


def test_processes_in_turn_and_together():
    first, later = (0, 5, usage(10, 20, 1.0, 2.0)), (6, 9, usage(12, 15, 1.0, 4.0))
    assert report.merge([later, first]) == (Usage(0, 12, 20, 2.0, 6.0, 2.0), False)
    beside = (3, 8, usage(1, 2, 0.5, 1.0))
    assert report.merge([first, beside]) == (Usage(0, 11, 22, 1.5, 2.0, 1.5), True)
    full = (3, 8, usage(1, 2, 2.0, 2.0))  # kernels of one GPU take turns: 3 s of work last 3 s
    assert report.merge([first, full])[0].now == 3.0
    lines = report.table_lines([entry(1, *first[:2], first[2]), entry(2, *beside[:2], beside[2])], Settings((T4,)))
    assert lines[0].endswith("2 processes") and "upper bound" in lines[-1]


def test_ranks_of_several_launches():
    def ranks(*born):
        used, what = usage(10, 20, 1.0, 2.0), Communication(1, 8, 0.5)
        return [entry(at, at, at + 9, used)._replace(rank=at % 2, communication=what) for at in born]

    lines = report.table_lines(ranks(1, 2), Settings((T4,)))
    assert [line.split()[0] for line in lines[-4:-1]] == ["Where", "rank", "0"]
    lines = report.table_lines(ranks(1, 2, 21, 22), Settings((T4,)))
    assert [line.split()[:2] for line in lines[-5:]] == [["launch", "rank"], *([a, b] for a in "01" for b in "01")]


def test_traces_merge_into_one(tmp_path):
    def span(name, pid, **more):
        return {"ph": "X", "name": name, "pid": pid, "tid": 7, "ts": 1.0, "dur": 2.0, **more}

    names = [{"ph": "M", "name": "process_name", "pid": gpu, "args": {"name": f"GPU {gpu}"}} for gpu in (0, 1)]
    (tmp_path / "11.trace").write_text(json.dumps({"traceEvents": [*names, span("a", 0), span("b", 1, id=3)]}))
    (tmp_path / "12.trace").write_text(json.dumps([span("c", 0, id=3)]))
    entries = [entry(11, 0, 9, rank=0), entry(13, 1, 9), entry(12, 2, 9)]
    told = results.merge(str(tmp_path), entries, str(tmp_path / "all.json"))
    assert told.startswith("Trace of 2 processes in ") and "ended without writing theirs: process 1" in told
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "rank 0 (pid 11): GPU 0", 1: "rank 0 (pid 11): GPU 1", 2: "process 2 (pid 12)"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["pid"], event["tid"]) for event in spans] == [("a", 0, 7), ("b", 1, 7), ("c", 2, 7)]
    assert spans[1]["id"] != spans[2]["id"]


def test_a_trace_that_cannot_be_written_is_said(tmp_path):
    assert results.merge(str(tmp_path), [], str(tmp_path / "gone" / "t.json")).startswith("The trace was not written: ")


HERE = ("/home/me/torch/train.py", 12, "step")
BLOCKS = (
    LiveBlock(600 * MIB, "activations", HERE),
    LiveBlock(200 * MIB, "activations", HERE),
    LiveBlock(150 * MIB, "parameters", ("/home/me/torch/train.py", 5, "build")),
    LiveBlock(50 * MIB, "something"),
)


def rows(lines):
    return [" ".join(line.split()) for line in lines]


def test_report_by_kind_and_line():
    told = rows(report.peak_lines(Peak(0, "Tesla T4", 4 * GIB, 1024 * MIB, other=100 * MIB, blocks=BLOCKS)))
    assert told[0] == "GPU 0 (Tesla T4, 4.00 GiB) at its peak: 1000.00 MiB in 4 blocks"
    assert told[1:4] == ["parameters 150.00 MiB 15 %", "activations 800.00 MiB 80 %", "other 50.00 MiB 5 %"]
    assert told[5:8] == [
        "train.py:12 step 800.00 MiB 80 % 2 blocks, activations",
        "train.py:5 build 150.00 MiB 15 % 1 block, parameters",
        "(made before frames were recorded) 50.00 MiB 5 % 1 block, other",
    ]
    assert (
        told[8] == "It fits: 1.10 GiB of 4.00 GiB taken, 2.90 GiB left; 24.00 MiB of what is reserved was not in use."
    )


def test_report_when_it_does_not_fit():
    told = report.peak_lines(Peak(0, "Tesla T4", 1024 * MIB, 1000 * MIB, blocks=BLOCKS, asked=344 * MIB))
    assert "when it ran out of memory" in told[0]
    assert told[-1].strip() == (
        "It does not fit: 344.00 MiB more were asked for, with 24.00 MiB free: "
        "at least 320.00 MiB would have to go; as much as 40 % of the activations."
    )
    hopeless = report.verdict(Peak(0, "Tesla T4", 1024 * MIB, 1000 * MIB, blocks=BLOCKS, asked=4 * GIB))
    assert hopeless.endswith("no kind alone holds that much, all together hold 1000.00 MiB.")


def test_report_of_many_lines_is_short():
    blocks = tuple(LiveBlock(MIB * n, "activations", ("/a.py", n, "f")) for n in range(1, 21))
    told = rows(report.peak_lines(Peak(0, "Tesla T4", GIB, GIB, blocks=blocks)))
    assert told[3].startswith("a.py:20 f 20.00 MiB")
    assert any(line.startswith("10 more lines 55.00 MiB 26 % 10 blocks") for line in told)


def test_reports_of_processes_meet(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert report.collect(str(tmp_path))[0].startswith("Report: no process left one")
    peak = Peak(1, "Tesla T4", 4 * GIB, GIB, blocks=BLOCKS, asked=5 * GIB)
    report.leave(str(tmp_path), [peak])
    assert report.collect(str(tmp_path)) == ["", *report.peak_lines(peak, "rank 1, ")]


def test_frames_begin_in_the_readers_code():
    inside = (torch.nn.Linear.forward.__code__.co_filename, 134, "forward")
    assert report.own_frames((inside, inside, HERE, inside)) == (HERE, inside)
    assert report.own_frames((inside, inside)) == (inside,) and report.own_frames(()) == ()


@pytest.mark.parametrize(
    ("nbytes", "text"), [(512, "512 bytes"), (2048, "2.00 KiB"), (3 * MIB // 2, "1.50 MiB"), (GIB, "1.00 GiB")]
)
def test_sizes(nbytes, text):
    assert report.size(nbytes) == text
