"""What is told at the end of a run, of figures written down by hand: the table, the trace of all processes, what lay on a GPU at its peak."""

import json
import os
import sys

import pytest
import torch

from tests.virtualgpu.run.test_environment import H100, T4
from virtualgpu.environment import Settings
from virtualgpu.memory.ledger import Communication, Entry, Usage
from virtualgpu.run import cli, report, results
from virtualgpu.run.report import LiveBlock, Peak

GIB, MIB = 1 << 30, 1 << 20
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


def entry(pid, born, last, *gpus, rank=-1):
    return Entry(pid, rank, born, last, True, 0, list(gpus))


def usage(allocated=0, reserved=0, busy=0.0, now=0.0, computing=None):
    return Usage(0, allocated, reserved, busy, now, busy if computing is None else computing)


def cells(lines):
    return [" ".join(line.split()) for line in lines]


# -- The table


def test_table_of_one_process():
    used = entry(1, 0, 9, usage(), usage(GIB, 3 * GIB, 0.5, 1.0, 0.25))
    lines = cells(report.table_lines([used], Settings((T4, H100), dry=True)))
    assert lines[0] == "virtualgpu: 1 x Tesla T4, 1 x NVIDIA H100 80GB HBM3, dry run, 1 process"
    assert lines[2:] == ["0 not used", "1 1.00 GiB 3.00 GiB 4 % of 79.18 GiB 50 % 25 % 1 s"]
    unused = ["virtualgpu: 1 x Tesla T4: no process used a GPU"]
    assert report.table_lines([], Settings((T4,))) == unused
    assert report.table_lines([entry(1, 0, 9, usage())], Settings((T4,))) == unused


def test_processes_in_turn_and_together():
    first, later = (0, 5, usage(10, 20, 1.0, 2.0)), (6, 9, usage(12, 15, 1.0, 4.0))
    assert report.merge([later, first]) == (Usage(0, 12, 20, 2.0, 6.0, 2.0), False)
    beside = (3, 8, usage(1, 2, 0.5, 1.0))
    assert report.merge([first, beside]) == (Usage(0, 11, 22, 1.5, 2.0, 1.5), True)
    full = (3, 8, usage(1, 2, 2.0, 2.0))  # kernels of one GPU take turns: 3 s of work last 3 s
    assert report.merge([first, full])[0].now == 3.0
    lines = report.table_lines([entry(1, *first), entry(2, *beside)], Settings((T4,)))
    assert lines[0].endswith("2 processes") and "upper bound" in lines[-1]


def test_ranks_of_several_launches():
    def ranks(*born):
        used, what = usage(10, 20, 1.0, 2.0), Communication(1, 8, 0.5)
        return [entry(at, at, at + 9, used)._replace(rank=at % 2, communication=what) for at in born]

    lines = report.table_lines(ranks(1, 2), Settings((T4,)))
    assert [line.split()[0] for line in lines[-4:-1]] == ["Where", "rank", "0"]
    lines = report.table_lines(ranks(1, 2, 21, 22), Settings((T4,)))
    assert [line.split()[:2] for line in lines[-5:]] == [["launch", "rank"], *([a, b] for a in "01" for b in "01")]


# -- The trace


def test_traces_merge_into_one(tmp_path):
    def span(name, pid, **more):
        return {"ph": "X", "name": name, "pid": pid, "tid": 7, "ts": 1.0, "dur": 2.0, **more}

    names = [{"ph": "M", "name": "process_name", "pid": gpu, "args": {"name": f"GPU {gpu}"}} for gpu in (0, 1)]
    (tmp_path / "11.trace").write_text(json.dumps({"traceEvents": [*names, span("a", 0), span("b", 1, id=3)]}))
    (tmp_path / "12.trace").write_text(json.dumps([span("c", 0, id=3)]))
    entries = [entry(11, 0, 9, rank=0), entry(13, 1, 9), entry(12, 2, 9)]
    sentence = results.merge(str(tmp_path), entries, str(tmp_path / "all.json"))
    assert sentence.startswith("Trace of 2 processes in ") and "ended without writing theirs: process 1" in sentence
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "rank 0 (pid 11): GPU 0", 1: "rank 0 (pid 11): GPU 1", 2: "process 2 (pid 12)"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["pid"], event["tid"]) for event in spans] == [("a", 0, 7), ("b", 1, 7), ("c", 2, 7)]
    assert spans[1]["id"] != spans[2]["id"]


@pytest.mark.parametrize("quiet", [True, False])
def test_a_trace_that_was_not_written_is_said_even_to_the_quiet(tmp_path, capsys, quiet):
    def tell(trace):
        complete = cli._tell(Settings((T4,)), str(tmp_path), str(trace), quiet, sys.stderr)
        return complete, capsys.readouterr().err

    complete, message = tell(tmp_path / "gone" / "t.json")
    assert not complete and "The trace was not written: " in message
    complete, message = tell(tmp_path / "t.json")
    assert complete and bool(message) is not quiet


@needs_full
@pytest.mark.skipif(not os.access("/dev", os.W_OK), reason="a trace is first written beside its place")
@pytest.mark.parametrize(("ends", "status"), [(0, 1), (7, 7)])
def test_a_run_without_its_trace_has_failed(run, ends, status):
    ended = run("--trace", "/dev/full", "-c", f"raise SystemExit({ends})")
    assert ended.returncode == status and "The trace was not written: " in ended.stderr


def test_an_earlier_trace_stays_where_there_is_no_room(tmp_path, monkeypatch):
    def full(trace, file):
        file.write('{"trace')
        raise OSError(28, "No space left on device")

    path = tmp_path / "t.json"
    path.write_text("earlier")
    with monkeypatch.context() as patch:
        patch.setattr(results.json, "dump", full)
        sentence = results.merge(str(tmp_path), [], str(path))
    assert sentence == "The trace was not written: [Errno 28] No space left on device."
    assert (os.listdir(tmp_path), path.read_text()) == (["t.json"], "earlier")
    assert results.merge(str(tmp_path), [], os.devnull).startswith("Trace of 0 processes")
    assert not os.path.isfile(os.devnull)


# -- What lay on a GPU

HERE = ("/home/me/torch/train.py", 12, "step")
BLOCKS = (
    LiveBlock(600 * MIB, "activations", HERE),
    LiveBlock(200 * MIB, "activations", HERE),
    LiveBlock(150 * MIB, "parameters", ("/home/me/torch/train.py", 5, "build")),
    LiveBlock(50 * MIB, "something"),
)
FULL = Peak(0, "Tesla T4", 1024 * MIB, 1000 * MIB, blocks=BLOCKS, asked=344 * MIB)


def test_report_by_kind_and_line():
    lines = cells(report.peak_lines(Peak(0, "Tesla T4", 4 * GIB, 1024 * MIB, other=100 * MIB, blocks=BLOCKS)))
    assert lines == [
        "GPU 0 (Tesla T4, 4.00 GiB) at its peak: 1000.00 MiB in 4 blocks",
        *["parameters 150.00 MiB 15 %", "activations 800.00 MiB 80 %", "other 50.00 MiB 5 %"],
        "by the line that made them",
        "train.py:12 step 800.00 MiB 80 % 2 blocks, activations",
        "train.py:5 build 150.00 MiB 15 % 1 block, parameters",
        "(made before frames were recorded) 50.00 MiB 5 % 1 block, other",
        "It fits: 1.10 GiB of 4.00 GiB taken, 2.90 GiB left; 24.00 MiB of what is reserved was not in use.",
    ]
    blocks = tuple(LiveBlock(MIB * n, "activations", ("/a.py", n, "f")) for n in range(1, 21))
    lines = cells(report.peak_lines(Peak(0, "Tesla T4", GIB, GIB, blocks=blocks)))
    assert lines[3].startswith("a.py:20 f 20.00 MiB")
    assert any(line.startswith("10 more lines 55.00 MiB 26 % 10 blocks") for line in lines)


def test_report_when_it_does_not_fit():
    lines = report.peak_lines(FULL)
    assert "when it ran out of memory" in lines[0]
    assert lines[-1].strip() == (
        "It does not fit: 344.00 MiB more were asked for, with 24.00 MiB free: "
        "at least 320.00 MiB would have to go; as much as 40 % of the activations."
    )
    hopeless = report.verdict(FULL._replace(asked=4 * GIB))
    assert hopeless.endswith("no kind alone holds that much, all together hold 1000.00 MiB.")


def test_reports_of_processes_meet(tmp_path, monkeypatch):
    """Also of one that was killed while it wrote, or whose disk was full."""
    monkeypatch.setenv("RANK", "1")
    assert report.collect(str(tmp_path))[0].startswith("Report: no process left one")
    report.leave(str(tmp_path), [FULL])
    assert report.collect(str(tmp_path)) == ["", *report.peak_lines(FULL, "rank 1, ")]
    (tmp_path / "12.report").write_text('[{"gpu": 0, "card": "Tes')
    (tmp_path / "13.report").touch()
    assert report.collect(str(tmp_path))[0] == "Report: 2 processes did not finish writing one."


def test_frames_begin_in_the_readers_code():
    inside = (torch.nn.Linear.forward.__code__.co_filename, 134, "forward")
    assert report.own_frames((inside, inside, HERE, inside)) == (HERE, inside)
    assert report.own_frames((inside, inside)) == (inside,) and report.own_frames(()) == ()


@pytest.mark.parametrize(
    "file", ["/home/me/train.py", "/usr/src/app/train.py", "/tmp/ipykernel_7/1.py", "bin/train.py"]
)
def test_files_of_the_program(file):
    others = [os.__file__, torch.__file__, report.__file__, "/usr/bin/torchrun", "<frozen runpy>"]
    assert report.is_the_programs(file) and not any(map(report.is_the_programs, others))


def test_sizes():
    sizes = {512: "512 bytes", 2048: "2.00 KiB", 3 * MIB // 2: "1.50 MiB", GIB: "1.00 GiB"}
    assert {nbytes: report.size(nbytes) for nbytes in sizes} == sizes


OUT_OF_MEMORY = """
import sys, torch
from torch import nn
try:
    torch.empty(2**30, device="cuda")
except torch.OutOfMemoryError:
    pass
try:
    1 / 0
except ZeroDivisionError:
    sys.excepthook(*sys.exc_info())  # as if nobody had caught it
model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).cuda()
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(8, 4096, device="cuda")).sum().backward()
optimizer.step()
kept = torch.empty(2**26, device="cuda")
torch.empty(2**27, device="cuda")
"""


def test_an_uncaught_out_of_memory_tells_what_lay_there(run):
    """Not one that was caught, nor another error."""
    ended = run("--gpus", "1", "--memory", "1GB", "--dry", "-c", OUT_OF_MEMORY)
    assert ended.returncode == 1
    before, _, after = ended.stderr.partition("ZeroDivisionError: division by zero\n")
    assert "when it ran out of memory" not in before and after.count("when it ran out of memory") == 1
    lines = after[after.index("GPU 0 (Tesla T4, 1.00 GiB) when it ran out of memory") :].splitlines()
    kinds = {line.split()[0]: line.split()[1] for line in lines[1:5]}
    assert kinds.keys() == {"parameters", "gradients", "optimizer", "activations"}
    assert kinds["parameters"] == "128.03" and kinds["optimizer"] == "256.06" and float(kinds["activations"]) >= 256
    assert lines[5].startswith("  It does not fit: 512.00 MiB more were asked for") and "would have to go" in lines[5]
    assert "--report" in lines[6]


def test_what_a_list_held_that_was_being_made_counts(run):
    """Its frame has ended, and the tensors are free, when Python prints the traceback."""
    code = "import torch\n[torch.empty(1 << 28, device='cuda') for _ in range(20)]"
    said = run("--gpus", "1", "--dry", "-c", code).stderr
    assert "when it ran out of memory: 14.00 GiB\n    activations    14.00 GiB  100 %\n" in said


RESETS = """
import torch
first = torch.empty(24 << 20, dtype=torch.uint8, device="cuda")
del first
for size in (20, 3):
    torch.empty(size << 20, dtype=torch.uint8, device="cuda")
torch.cuda.reset_peak_memory_stats()
print(torch.cuda.max_memory_allocated())
"""


def test_the_table_has_the_peak_of_the_whole_run(run):
    """Many programs look at the peak of each step, and reset it; no segment is taken meanwhile."""
    ended = run("--gpus", 1, "-c", RESETS)
    assert ended.stdout == "0\n" and " 24.00 MiB      24.00 MiB " in ended.stderr
