"""`python -m virtualgpu fit`: what fits, how fast, what failed and where; a search for the largest; nothing left at an interrupt."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.processes import family, wait_until
from virtualgpu.run import fit, fit_cli, fit_table

PROGRAM = """
import argparse, os, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--fault", default="")
options = parser.parse_args()
rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(rank)
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**6):
    optimizer.zero_grad()
    loss = model(torch.randn(options.batch_size, 1024, device="cuda")).square().mean()
    loss.backward()
    if options.fault == "key":
        {}["missing"]
    if options.fault == "value" and loss.item() > 1:
        print("large")
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train it.py"
    path.write_text(PROGRAM)
    return str(path)


def test_what_fits_and_what_does_not(script):
    trials = fit.run([script], like=["T4", "A100"], vary={"batch-size": ["256", "300000"]})
    assert [(t.card, t.values["batch-size"], t.status) for t in trials] == [
        ("T4", "256", "fits"),
        ("T4", "300000", "out of memory"),
        ("A100", "256", "fits"),
        ("A100", "300000", "fits"),
    ]
    small, large, *_ = trials
    assert (
        32 * 2**20 < small.reserved < 2**28
        and small.step > 0
        and small.ranks == 1
        and "more were asked for" in large.words
    )
    lines = fit_table.lines(trials, {"T4": 1.0, "A100": 1000.0})
    assert lines[0].split()[:3] == ["card", "GPUs", "batch-size"] and "samples/s" in lines[0]
    assert [line for line in lines if line.endswith("<")] == [lines[1]]


def test_the_largest_that_fits_is_searched(script):
    trials = fit.run([script], vary={"batch-size": fit.Range(64000, 512000)}, memory="8GB", step=2)
    assert [int(t.values["batch-size"]) for t in trials] == [64000, 128000, 256000, 192000]
    best = fit.largest(trials, "batch-size")["T4", 1]
    assert int(best.values["batch-size"]) in (128000, 192000)
    assert {t.status for t in trials} == {"fits", "out of memory"}


@pytest.mark.parametrize(
    "low, high, limit, tried",
    [
        (8, 512, 100, [8, 16, 32, 64, 128, 96, 112, 104]),
        (8, 64, 1000, [8, 16, 32, 64]),
        (8, 50, 1000, [8, 16, 32, 50]),
        (8, 512, 7, [8]),
        (1, 1, 5, [1]),
    ],
)
def test_the_order_of_a_search(low, high, limit, tried):
    def trial(value):
        return fit.Trial("T4", 1, {}, "fits" if value <= limit else "out of memory", reserved=value)

    assert [result.reserved for result in fit._search(low, high, trial)] == tried


def test_more_gpus_by_torchrun(script):
    command = ["torchrun", "--standalone", "--nproc-per-node={gpus}", script, "--batch-size", "8"]
    one, two = fit.run(command, gpus=[1, 2], vary={"batch-size": ["4096"]})
    assert (one.status, one.ranks, two.status, two.ranks) == ("fits", 1, "fits", 2), (one, two)
    assert two.step > one.step  # gradients pass the host
    told = fit_table.lines([one, two], {})
    assert "against 1 GPU" in told[0] and f"{100 * one.step / two.step:.0f} %" in told[2]


def test_a_program_that_fails_says_where(script):
    (trial,) = fit.run([script, "--fault", "key"])
    assert trial.status == "failed" and trial.words == "KeyError: 'missing' (train it.py:20)", trial
    assert trial.words in fit_table.lines([trial], {})[-1]


def test_a_program_that_decides_by_a_value_is_told_so(script):
    (trial,) = fit.run([script, "--fault", "value"])
    assert trial.status == "fits" and trial.reads == "train it.py:21"
    assert fit_table.lines([trial], {})[-1].startswith(
        "train it.py:21 reads a value of the GPU: a dry run has nan there"
    )


@pytest.mark.parametrize(
    "command, values, filled",
    [
        (["a.py"], {"batch-size": "8"}, ["a.py", "--batch-size", "8"]),
        (["a.py", "--batch_size", "4", "x"], {"batch-size": "8"}, ["a.py", "--batch_size", "8", "x"]),
        (["a.py", "--lr=1"], {"lr": "2"}, ["a.py", "--lr=2"]),
        (["a.py", "train.batch={b}"], {"b": "8"}, ["a.py", "train.batch=8"]),
        (["torchrun", "--nproc-per-node={gpus}"], {"gpus": "2"}, ["torchrun", "--nproc-per-node=2"]),
    ],
)
def test_values_reach_the_program(command, values, filled):
    assert fit.filled(command, values) == filled


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "name a program to try"),
        (["--like", "T5", "a.py"], "T5"),
        (["--gpus", "two", "a.py"], "--gpus 'two': give whole numbers with commas"),
        (["--vary", "batch-size", "a.py"], "give an option of the program and its values"),
        (["--vary", "n=9..3", "a.py"], "n=9..3: the first number"),
        (["--vary", "n=1..3", "--vary", "m=1..3", "a.py"], "one option can be searched at a time"),
        (["--prices", "nowhere.csv", "a.py"], "columns card and usd_per_hour"),
        (["--cheap", "a.py"], "there is no option '--cheap'"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(capsys, arguments, words):
    assert fit_cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m virtualgpu fit: ") and words in error and error.count("\n") == 1


def test_json_and_the_exit_status(script, capsys):
    assert fit_cli.main(["--json", "--memory", "1GB", "--vary", "batch-size=100000", script]) == 1
    (trial,) = json.loads(capsys.readouterr().out)
    assert trial["status"] == "out of memory" and trial["capacity"] == 2**30 and trial["usd"] is None


def test_the_dated_prices_are_of_cards_that_there_are():
    from virtualgpu.hardware.specs import SPECS

    assert fit_table.prices().keys() <= SPECS.keys() and min(fit_table.prices().values()) > 0


def test_an_interrupt_leaves_no_process(script, monkeypatch, tmp_path):
    monkeypatch.setenv("MARK", str(tmp_path))
    command = [sys.executable, "-m", "virtualgpu", "fit", "--gpus", "1,2", "--steps", "0", script]
    search = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_until(
        lambda: any(p.cmdline()[-1] == script and "fit" not in p.cmdline() for p in family("MARK", str(tmp_path))), 60
    )
    search.send_signal(signal.SIGINT)
    _, errors = search.communicate(timeout=60)
    assert search.returncode == 130 and "Interrupted: no program is left." in errors, errors
    wait_until(lambda: not family("MARK", str(tmp_path)), 10)
    assert os.path.exists(script)
