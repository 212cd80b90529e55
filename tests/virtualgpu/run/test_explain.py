"""`python -m virtualgpu --explain`: its command line, what fails and how it says so, and nothing left at an interrupt."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.processes import family, runs, wait_until
from virtualgpu import environment
from virtualgpu.hardware import specs
from virtualgpu.run import cli, results
from virtualgpu.run.explain import changes
from virtualgpu.run.explain import runs as explain
from virtualgpu.run.explain import table as explain_table
from virtualgpu.run.explain.changes import Explained, Parts

PROGRAM = """
import sys, torch
from torch import nn
fault = sys.argv[1]
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({"half": 2, "one": 1}.get(fault, 10**6)):
    optimizer.zero_grad()
    rows = 10**7 if fault == "memory" and step == 3 else 512
    model(torch.randn(rows, 1024, device="cuda")).square().mean().backward()
    if fault == "key" and step == 3:
        {}["missing"]
    if fault == "half" and torch.is_autocast_enabled("cuda"):
        torch.empty(10**12, device="cuda")
    optimizer.step()
"""


def start(script, *arguments, like="T4"):
    return explain.run([script, *arguments], environment.Settings(cli.find_cards(1, like, None)))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "name a program to run"),
        (["--like", "T5", "a.py"], "T5"),
        (["--trace", "t.json", "a.py"], "leave out --trace"),
        (["--report", "a.py"], "leave out --report"),
        (["--steps", "1", "a.py"], "one step has the beginnings"),
        (["--steps", "two", "a.py"], "give a whole number"),
        (["--jobs"], "--jobs needs a value"),
        (["no_such_command"], "neither a file here nor a command"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(capsys, arguments, words):
    assert cli.main(["--explain", "--gpus", "1", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m virtualgpu: ") and words in error and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--steps=3", "--jobs=1"])
def test_options_of_explain_alone(capsys, option):
    assert cli.main([option, "a.py"]) == 2
    assert "is of --explain" in capsys.readouterr().err


def test_real_gpus_are_taken_where_nobody_asks_for_virtual_ones():
    assert cli.parse(["--explain", "--steps", "4", "a.py"]).real
    assert not cli.parse(["--explain", "--like", "T4", "a.py"]).real and not cli.parse(["a.py"]).real


@pytest.mark.parametrize(
    "fault, words",
    [("key", "KeyError: 'missing' (train it.py:12)"), ("memory", "out of memory: 38.15 GiB more were asked for")],
)
def test_a_program_that_fails_says_how(script, fault, words, warm):
    assert start(script, fault).failed == words


def test_a_program_that_uses_no_gpu(script, warm):
    with open(script, "w") as file:
        file.write(PROGRAM.replace(".cuda()", "").replace(', device="cuda"', ""))
    assert start(script, "").failed == "the program used no GPU"


def test_a_program_that_steps_no_optimizer_is_ended(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text("import time\ntime.sleep(1000)\n")
    settings = environment.Settings(cli.find_cards(1, "T4", None))
    assert explain.run([str(path)], settings, limit=0.5).failed == explain.NOT_ENDED


def test_two_steps_are_enough_and_a_run_that_fails_is_told(script, capsys):
    assert cli.main(["--explain", "--gpus", "1", "--like", "P100", "--json", script, "half"]) == 0
    told = json.loads(capsys.readouterr().out)
    (row,) = told["rows"]
    assert row["step"] == told["step"] == pytest.approx(sum(row["computing"].values()) + sum(row["idle"].values()))
    (half,) = told["tried"]
    assert (half["change"], half["step"], told["failed"]) == ("half precision", None, "")
    assert half["failed"].startswith("out of memory")


def test_what_a_full_disk_left_out_is_not_laid_at_the_programs_door(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    ended = SimpleNamespace(output_of=lambda *args: (0, ""))
    settings = environment.Settings(cli.find_cards(1, "T4", None))
    assert explain.once(ended, settings, ["a.py"]).failed.startswith("the program ended after 0 steps of an optimizer")
    monkeypatch.setattr(results, "leave", full)
    failed = explain.once(ended, settings, ["a.py"]).failed
    assert failed.startswith("its figures could not be written: No space left on device in ") and "TMPDIR" in failed


def test_what_is_not_known_is_said():
    change = changes.Change("half precision", "In half precision", changes.COMPUTING)
    found = explain.Explanation(1.0, (), (explain.Tried(change, None, "out of memory: 1 GiB"),))
    assert explain_table.sentences(found)[-1].startswith(
        "Not known: half precision, for the run with it failed (out of memory"
    )


def test_one_step_is_too_few(script, capsys, warm):
    assert cli.main(["--explain", "--gpus", "1", "--json", script, "one"]) == 2
    words = "the program ended after 1 step of an optimizer of torch.optim: two at least can be told of"
    assert json.loads(capsys.readouterr().out)["failed"] == words


def of(step, rank=0, computing=0.0, **idle):
    idle = {"communication": 0.0, "waiting": 0.0, **idle}
    return Explained(
        rank, {"0": [Parts(step, {"matrix products": computing}, idle, 0.0)] * 2}, {}, None, False, True, False, None
    )


@pytest.mark.parametrize(
    "explained, names",
    [
        ([of(1.0, computing=1.0)], []),
        ([of(1.0, computing=1.0)._replace(half=False)], ["half precision"]),
        ([of(1.0, computing=0.985, launches=0.015)], []),
        ([of(1.0, launches=1.0)], ["no launches"]),
        ([of(1.0, loader=0.5, copies=0.5)], ["no loader", "copies ahead"]),
        ([of(1.0, communication=0.5)._replace(bucket_cap=1.0)], ["no communication", "NVLink", "larger buckets"]),
        ([of(1.0, communication=0.5)], ["no communication", "NVLink"]),
        ([of(1.0, communication=0.5)._replace(compressible=True)], ["no communication", "NVLink", "half gradients"]),
        ([of(1.0, waiting=0.5, computing=0.5), of(1.0, 1, computing=1.0)], ["equal ranks"]),
        (
            [of(1.0, communication=0.5)._replace(together={"all_reduce": [50.0, 1e6, 0.4, 0.1]})],
            ["no communication", "NVLink", "fewer collectives"],
        ),
        (
            [of(1.0, communication=0.5)._replace(together={"all_gather": [8.0, 3.2e9, 0.4, 0.1]})],
            ["no communication", "NVLink"],
        ),
    ],
)
def test_what_is_tried(explained, names):
    settings = environment.Settings(cli.find_cards(2, "T4", None))
    tries = changes.candidates(explained, settings, {})
    assert [change.name for change in tries] == names


@pytest.mark.parametrize(
    "like, gpus, words",
    [
        ("T4", 2, "NVLink as a V100 has it (this card takes none)"),
        ("RTX 3090", 2, "NVLink (the bridge of two such cards)"),
        ("RTX 3090", 4, "NVLink as an A100 has it (its bridge joins two)"),
        ("RTX 5090", 2, "NVLink as a B200 has it (this card takes none)"),
    ],
)
def test_whose_nvlink(like, gpus, words):
    spec, told = changes.nvlinked(specs.find_spec(like), gpus)
    assert told == words and spec.nvlink and spec.peer_access
    with pytest.raises(ValueError, match="has NVLink"):
        changes.nvlinked(spec, gpus)


@pytest.mark.parametrize(
    "gpus, settings, joined",
    [
        (4, {}, 4),
        (4, {"gpus_per_node": 2}, 2),
        (1, {"single_rank": (2, 0, 8)}, 2),  # one rank plays alone
        (1, {"single_rank": (64, 9, 8)}, 8),
    ],
)
def test_nvlink_joins_the_gpus_of_a_node(gpus, settings, joined):
    settings = environment.Settings(cli.find_cards(gpus, "RTX 3090", None), **settings)
    (change,) = (one for one in changes.candidates([of(1.0, communication=0.5)], settings, {}) if one.name == "NVLink")
    assert change.setting["link"] == joined and ("two such cards" in change.words) == (joined == 2)


def test_where_a_variable_holds_nccl_up():
    settings = environment.Settings(cli.find_cards(2, "V100", None))
    environ = {"NCCL_P2P_DISABLE": "1"}
    tries = changes.candidates([of(1.0, communication=0.5)], settings, environ)
    assert [change.name for change in tries] == ["no communication", "peer to peer"]
    assert "NCCL_P2P_DISABLE" in tries[1].words and "NCCL_P2P_DISABLE" in tries[1].without
    assert [change.name for change in changes.candidates([of(1.0, communication=0.5)], settings, {})] == [
        "no communication"
    ]


def test_equal_work_is_the_mean_of_the_ranks():
    one, two = of(3.0, waiting=2.0, computing=1.0), of(3.0, 1, computing=3.0)
    assert changes._factors([one, two]) == {"0": [2.0] * 4, "1": [pytest.approx(2 / 3)] * 4}


def test_many_ranks_are_three_columns():
    rows = tuple(
        explain.Row(rank, 0, of(1.0, rank, computing=0.1 * rank, waiting=1 - 0.1 * rank).gpus["0"][0])
        for rank in range(1, 9)
    )
    table = explain_table.lines(explain.Explanation(1.0, rows), "8 x T4")
    assert "rank 1, least work" in table[1] and "rank 8, most work" in table[1] and "mean of 8" in table[1]
    assert table[2].split()[:2] == ["computing", "100"] and table[2].split()[-4:] == ["450", "ms", "45", "%"]


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])  # SIGKILL: test_fit
def test_a_signal_leaves_no_process(script, monkeypatch, tmp_path, number, status):
    monkeypatch.setenv("MARK", str(tmp_path))
    words = [sys.executable, "-m", "virtualgpu", "--explain", "--gpus", "1", "--steps", "0", script, ""]
    search = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: runs(script, "MARK", str(tmp_path)), 120)
    search.send_signal(number)
    _, errors = search.communicate(timeout=60)
    assert search.returncode == status, errors
    assert ("Interrupted: no program is left." in errors) == (number == signal.SIGINT), errors
    wait_until(lambda: not family("MARK", str(tmp_path)), 10)
    assert os.path.exists(script)
