"""`python -m virtualgpu fit`: what fits, how fast, what failed and where; a search for the largest; nothing left at an interrupt."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.processes import family, runs, wait_until
from virtualgpu import environment
from virtualgpu.run import cli, results
from virtualgpu.run.fit import cli as fit_cli
from virtualgpu.run.fit import search as fit
from virtualgpu.run.fit import table as fit_table
from virtualgpu.run.fit.table import Price
from virtualgpu.run.trials import steps

PROGRAM = """
import argparse, os, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--fault", default="")
parser.add_argument("--micro-steps", type=int, default=1)
parser.add_argument("--total", action="store_true")
options = parser.parse_args()
rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
batch_size = options.batch_size // (ranks if options.total else 1)
torch.cuda.set_device(rank)
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**6):
    optimizer.zero_grad()
    for micro in range(options.micro_steps):
        loss = model(torch.randn(batch_size, 1024, device="cuda")).square().mean()
        loss.backward()
    if options.fault == "key" and rank == ranks - 1:
        {}["missing"]
    if options.fault == "value" and loss.item() > 1:
        print("large")
    optimizer.step()
"""


def test_what_fits_and_what_does_not(script, warm):
    samples = "{batch-size}*{gpus}*3"
    trials = fit.run([script], like=["T4", "A100"], vary={"batch-size": ["300000"]}, samples=samples)
    assert [(t.card, t.values["batch-size"], t.status, t.samples) for t in trials] == [
        ("T4", "300000", "out of memory", 900_000),
        ("A100", "300000", "fits", 900_000),
    ]
    small, large = trials
    assert 2**30 < large.reserved < 32 * 2**30 and large.step > 0 and large.ranks == 1
    assert "more were asked for" in small.words
    lines = fit_table.lines(trials, {"T4": Price(1.0), "A100": Price(1000.0)})
    assert lines[0].split()[:3] == ["card", "GPUs", "batch-size"] and "samples/s" in lines[0]
    assert [line for line in lines if line.endswith("<")] == [lines[2]]


def test_what_a_full_disk_left_out_is_not_laid_at_the_programs_door(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    ended = SimpleNamespace(output_of=lambda *args: (0, ""))
    tried = ended, environment.Settings(cli.find_cards(1, "T4", None)), ["a.py"], fit.Trial("T4", 1, {}, "fits"), None
    assert fit._trial(*tried).words == "the program used no GPU"
    monkeypatch.setattr(results, "leave", full)
    trial = fit._trial(*tried)
    assert trial.status == "failed" and trial.words.startswith("its figures could not be written: No space left")


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


def test_more_gpus_by_torchrun(script, warm):
    command = ["torchrun", "--standalone", "--nproc-per-node={gpus}", script, "--batch-size", "8"]
    one, two = trials = fit.run(command, gpus=[1, 2], vary={"batch-size": ["4096"]})
    assert (one.status, one.ranks, two.status, two.ranks) == ("fits", 1, "fits", 2), trials
    assert (one.samples, two.samples) == (4096, 8192), trials
    assert two.step > one.step  # gradients pass the host
    assert fit_table.efficiency(two, trials) == pytest.approx(one.step / two.step)
    told = fit_table.lines(trials, {})
    assert "against 1 GPU" in told[0] and f"{100 * one.step / two.step:.0f} %" in told[2]


@pytest.mark.parametrize(
    "options, samples", [(["--micro-steps", "2"], 64 * 2 * 16), (["--micro-steps", "3", "--total"], 64 * 3)]
)
def test_one_rank_that_plays_alone_counts_for_all(script, options, samples, warm):
    (trial,) = fit.run([script, "--batch-size", "64", *options], world_size=16)
    assert trial.samples == samples


GAN = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int)
n = parser.parse_args().batchSize
make, judge = nn.Linear(8, 8).cuda(), nn.Linear(8, 1).cuda()
optimizers = [torch.optim.SGD(model.parameters()) for model in (judge, make)]
for step in range(99):
    judge(torch.randn(n, 8, device="cuda")).sum().backward()
    fake = make(torch.randn(n, 8, device="cuda"))
    judge(fake.detach()).sum().backward()
    optimizers[0].step()
    judge(fake).sum().backward()
    optimizers[1].step()
"""
CHECKPOINTED = """
import argparse, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
n = parser.parse_args().batch_size
class Model(nn.Linear):
    def forward(self, x, reentrant):
        return checkpoint(super().forward, x, use_reentrant=reentrant)
model = Model(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(99):
    for reentrant in (False, True):
        x = torch.randn(n, 8, device="cuda", requires_grad=True)
        model(x, reentrant).sum().backward()
    checkpoint(model, x, False, use_reentrant=False).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("program, option, samples", [(GAN, "--batchSize", 16), (CHECKPOINTED, "--batch-size", 48)])
def test_samples_count_once(tmp_path, program, option, samples, warm):
    path = tmp_path / "train.py"
    path.write_text(program)
    (trial,) = fit.run([str(path), option, "16"])
    assert trial.samples == samples, trial


def test_processes_without_a_rank_of_which_one_ran_out_of_memory(tmp_path):
    """As torch.multiprocessing starts them."""
    for pid, asked in enumerate([None, 512, None]):
        (tmp_path / f"{pid}.{steps.LEFT}").write_text(json.dumps([-1, [], asked, [], 0]))
    assert {process.asked for process in steps.collect(str(tmp_path))} == {None, 512}


def test_a_rank_that_fails_is_named_and_not_torchrun_nor_who_waited(script, warm):
    command = ["torchrun", "--standalone", "--nproc-per-node={gpus}", script, "--fault", "key"]
    (trial,) = fit.run(command, gpus=[2])
    assert trial.status == "failed" and trial.words == "KeyError: 'missing' (train it.py:24)", trial
    assert trial.words in fit_table.lines([trial], {})[-1]


def test_gpus_that_stay_idle_and_a_program_that_decides_by_a_value_are_said(script, warm):
    one, two = trials = fit.run([script, "--fault", "value"], gpus=[1, 2])
    assert (one.used, two.used) == (1, 1) and fit_table.efficiency(two, trials) == pytest.approx(0.5)
    assert one.status == "fits" and one.reads == "train it.py:25"
    told = "\n".join(fit_table.lines(trials, {}))
    assert "1 of 2 GPUs stayed idle: the program uses 1" in told
    assert "\ntrain it.py:25 reads a value of the GPU: a dry run has nan there" in told


def test_what_the_engine_does_otherwise_is_said(tmp_path, warm):
    path = tmp_path / "compiled.py"
    path.write_text(
        "import torch\nmodel = torch.compile(torch.nn.Linear(8, 8).cuda())\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(9):\n    model(torch.ones(2, 8, device='cuda')).sum().backward()\n    optimizer.step()\n"
    )
    (trial,) = fit.run([str(path)])
    assert trial.notes == ("torch.compile: on virtual GPUs it runs eagerly, with eager's memory and time",)
    assert trial.notes[0] in fit_table.lines([trial], {})


def test_a_program_that_looks_for_gpus_and_goes(tmp_path, warm):
    path = tmp_path / "two.py"
    path.write_text("import torch\nif torch.cuda.device_count() < 2:\n    print('I need two.')\n    exit()\n")
    (trial,) = fit.run([str(path)])
    assert trial.status == "failed" and trial.words == "the program used no GPU, and said at its end: I need two."


def test_a_program_that_makes_no_step_and_no_end(tmp_path, warm):
    path = tmp_path / "serve.py"
    path.write_text("import time, torch\ntorch.ones(2, device='cuda')\ntime.sleep(1000)\n")
    (trial,) = fit.run([str(path)], limit=0.5)
    assert trial.words == "it had not ended after 0.5 s: does it step an optimizer?" and trial.status == "failed"


def test_a_program_that_a_signal_ends(tmp_path, warm):
    path = tmp_path / "killed.py"
    path.write_text("import os\nprint('well')\nos.kill(os.getpid(), 9)\n")
    (trial,) = fit.run([str(path)])
    assert trial.words.startswith("ended by SIGKILL (this machine's memory may have been too small")


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
        (["--samples", "8x2", "a.py"], "--samples: '8x2' is no product of numbers"),
        (["--world-size", "8", "--gpus", "2", "a.py"], "one rank plays alone, on one GPU"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(capsys, arguments, words):
    assert fit_cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m virtualgpu fit: ") and words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "ended, status", [(["fits", "failed"], 0), (["out of memory"], 1), (["out of memory", "failed"], 2)]
)
def test_json_and_the_exit_status(monkeypatch, capsys, ended, status):
    trials = [fit.Trial("T4", 1, {"batch-size": "8"}, how, 2**29, 2**30) for how in ended]
    monkeypatch.setattr(fit, "run", lambda command, **options: trials)
    assert fit_cli.main(["--json", "--memory", "1GB", "--vary", "batch-size=8", "train.py"]) == status
    told = json.loads(capsys.readouterr().out)
    assert [trial["status"] for trial in told] == ended and told[0]["capacity"] == 2**30
    assert (told[0]["usd_per_1000_steps"], told[0]["usd_per_hour"], told[0]["price_as_of"]) == (None, 0.35, "2026")


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_leaves_no_process(script, monkeypatch, tmp_path, number, status):
    monkeypatch.setenv("MARK", str(tmp_path))
    words = [sys.executable, "-m", "virtualgpu", "fit", "--gpus", "1,2", "--steps", "0", script]
    search = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: runs(script, "MARK", str(tmp_path)), 60)
    search.send_signal(number)
    told, errors = search.communicate(timeout=60)
    assert search.returncode == status, errors
    assert ("Interrupted: no program is left." in errors) == (number == signal.SIGINT), errors
    assert told == ""  # no trial had ended
    wait_until(lambda: not family("MARK", str(tmp_path)), 10)
    assert os.path.exists(script)


def test_an_interrupt_tells_what_there_is(script, tmp_path, monkeypatch, capsys):
    def stop(arguments, **options):
        options["on_trial"](fit.Trial("T4", 1, {}, "fits", 1 << 30, 16 << 30, 0.5, 1, used=1))
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "run", stop)
    assert fit_cli.main([script]) == 130
    told, errors = capsys.readouterr()
    assert "1.00 GiB" in told and errors == "\nInterrupted: no program is left.\n"
