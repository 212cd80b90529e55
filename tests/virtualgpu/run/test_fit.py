"""`python -m virtualgpu fit` and `virtualgpu.fit`: the command of a trial, what trials of programs come to, and how far they are."""

import json
import multiprocessing
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import virtualgpu
from virtualgpu import environment
from virtualgpu.run import launcher, results, steps, trials
from virtualgpu.run.fit import cli as fit_cli
from virtualgpu.run.fit import search, table
from virtualgpu.run.fit.search import Range, Trial
from virtualgpu.run.fit.table import Price

GIB = 2**30
fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")

# -- The command of a trial, and how many samples a step of it has


@pytest.mark.parametrize(
    "command, values, filled",
    [
        ("a.py", {"batch-size": "8"}, "a.py --batch-size=8"),
        ("a.py --batch_size 4 x", {"batch-size": "8"}, "a.py --batch_size 8 x"),
        ("a.py --lr=1", {"lr": "2"}, "a.py --lr=2"),
        ("a.py train.lr=1", {"train.lr": "2"}, "a.py train.lr=2"),
        ("a.py train.batch={b}", {"b": "8"}, "a.py train.batch=8"),
        ("torchrun --nproc-per-node={gpus}", {"gpus": "2"}, "torchrun --nproc-per-node=2"),
    ],
)
def test_values_reach_the_program(command, values, filled):
    assert search.filled(command.split(), values) == filled.split()


@pytest.mark.parametrize(
    "command, values, batch",
    [
        ("a.py --batch-size 8", {}, 8),
        ("a.py --per_device_train_batch_size=8 --per_device_eval_batch_size=64", {}, 8),
        ("a.py data.batch=8", {}, 8),
        ("a.py --micro-batch-size 2 --global-batch-size 8", {}, None),
        ("a.py --micro-batch-size 2 --global-batch-size 8", {"micro-batch-size": "2"}, 2),
        ("a.py 8", {"batch": "8"}, 8),
        ("a.py --batch-first --lr 8", {"lr": "8"}, None),
    ],
)
def test_the_batch_that_a_command_asks_for(command, values, batch):
    assert search.batch(command.split(), values) == batch


@pytest.mark.parametrize(
    "shapes, passes, ranks, gpus, rows",
    [
        ([([8, 512], 1)], 1, 1, 1, 8),
        ([([8, 512], 40)], 40, 2, 2, 320),  # micro-batches
        ([([8, 512], 2)], 1, 1, 1, 8),  # two views of a batch
        ([([512, 8], 1)], 1, 1, 1, 8),  # the sequence first
        ([([4, 3], 1)], 1, 2, 2, 4),  # the batch is of all ranks
        ([([16, 3], 1)], 1, 1, 2, 16),  # DataParallel, and the batch is of each GPU
        ([([8, 3], 1), ([5, 3], 1)], 2, 1, 1, None),
        ([([8, 3], 1)], 0, 1, 1, 8),
        ([], 0, 1, 1, None),
    ],
)
def test_rows_of_a_step(shapes, passes, ranks, gpus, rows):
    assert search.rows(shapes, passes, 8, ranks, gpus) == rows


def test_a_product():
    assert search.product("8*4 * 2") == 64 and search.product("64/8*0.5") == 4
    for wrong in ("8x2", "{batch}*2", "8**2", "8/0", ""):
        with pytest.raises(ValueError, match="--samples: "):
            search.product(wrong)


TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 8, in <module>
[rank0]:   File "/home/me/train.py", line 7, in <module>
[rank1]: KeyError: 'missing'
[rank0]: torch.distributed.DistBackendError: rank 1 will not come
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
ARGPARSE = "usage: a.py\na.py: error: unrecognized arguments: --n=4\n" + TORCHRUN[-160:]


@pytest.mark.parametrize(
    "printed, error",
    [
        (TORCHRUN, "KeyError: 'missing' (train.py:8)"),
        (ARGPARSE, "unrecognized arguments: --n=4"),
        ("all is well\nSegmentation fault\n", "Segmentation fault"),
        ("", ""),
    ],
)
def test_the_error_that_ended_a_program(printed, error):
    found = trials.error(printed)
    assert found.endswith(error) and bool(found) == bool(error)


@pytest.mark.parametrize(
    "command, gpus, several",
    [
        ("train.py", [1], True),
        ("train.py", [1, 2], False),  # it may start ranks, at the port that it names
        ("torchrun --nproc-per-node=1 train.py", [1], False),  # at 29500
        ("-m torch.distributed.run train.py", [1], False),
        ("accelerate launch train.py", [1], False),
        ("torchrun --standalone --nproc-per-node={gpus} train.py", [1, 2], True),
    ],
)
def test_programs_that_might_meet_at_a_port_run_one_after_the_other(monkeypatch, command, gpus, several):
    monkeypatch.setattr(trials.os, "sched_getaffinity", lambda pid: range(4), raising=False)
    monkeypatch.setattr(trials, "ROOM", 1)
    assert trials.side_by_side(command.split(), gpus) == (4 if several else 1)


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
        return Trial("T4", 1, {}, "fits" if value <= limit else "out of memory", reserved=value)

    assert [result.reserved for result in search._search(low, high, trial)] == tried


# -- Trials of programs

TRAIN = """
import argparse, os, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--fault", default="")
parser.add_argument("--micro-steps", type=int, default=1)
parser.add_argument("--total", action="store_true")
parser.add_argument("--steps", type=int, default=10**6)
options = parser.parse_args()
rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
batch_size = options.batch_size // (ranks if options.total else 1)
torch.cuda.set_device(rank)
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(options.steps):
    optimizer.zero_grad()
    for micro in range(options.micro_steps):
        loss = model(torch.randn(batch_size, 1024, device="cuda")).square().mean()
        loss.backward()
    if options.fault == "key" and rank == ranks - 1:
        {}["missing"]
    if options.fault == "value" and loss.item() > 1:
        print("large")
    if options.fault == "half" and torch.is_autocast_enabled("cuda"):
        torch.empty(10**12, device="cuda")
    optimizer.step()
"""
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
COMPILED = """
import torch
model = torch.compile(torch.nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters())
for _ in range(9):
    model(torch.ones(2, 8, device='cuda')).sum().backward()
    optimizer.step()
"""
GOES = "import torch\nif torch.cuda.device_count() < 2:\n    print('I need two.')\n    exit()\n"
SERVES = "import time, torch\ntorch.ones(2, device='cuda')\ntime.sleep(1000)\n"
KILLED = "import os\nprint('well')\nos.kill(os.getpid(), 9)\n"
RANKS = "torchrun --standalone --nproc-per-node={gpus} "
EAGER = "torch.compile: on virtual GPUs it runs eagerly, with eager's memory and time"
NOT_ENDED = "it had not ended after 0.5 s: does it step an optimizer?"
LONELY = {"world_size": 16}
# Program, command ("@" for its path), options of the search, and of each trial what it came to; and what the table says
TRIALS = {
    "too large for one card": (
        TRAIN, "@", {"like": ["T4", "A100"], "vary": {"batch-size": ["300000"]}, "samples": "{batch-size}*{gpus}*3"},
        [{"status": "out of memory", "samples": 900_000, "words": "more were asked for"},
         {"status": "fits", "samples": 900_000, "ranks": 1}], "samples/s",
    ),
    "more GPUs by torchrun": (
        TRAIN, RANKS + "@ --batch-size 8", {"gpus": [1, 2], "vary": {"batch-size": ["4096"]}},
        [{"status": "fits", "ranks": 1, "samples": 4096}, {"status": "fits", "ranks": 2, "samples": 8192}], "against 1 GPU",
    ),
    "a rank plays alone": (TRAIN, "@ --batch-size 64 --micro-steps 2", LONELY, [{"samples": 64 * 2 * 16}], ""),
    "... and the batch is of all": (TRAIN, "@ --batch-size 64 --micro-steps 3 --total", LONELY, [{"samples": 64 * 3}], ""),
    "two optimizers": (GAN, "@ --batchSize 16", {}, [{"samples": 16}], ""),
    "checkpoints": (CHECKPOINTED, "@ --batch-size 16", {}, [{"samples": 48}], ""),
    "a rank that fails": (
        TRAIN, RANKS + "@ --fault key", {"gpus": [2]}, [{"status": "failed", "words": "KeyError: 'missing' (train it.py:25)"}],
        "failed: KeyError: 'missing' (train it.py:25)",
    ),
    "an idle GPU": (
        TRAIN, "@ --fault value", {"gpus": [1, 2]},
        [{"status": "fits", "used": 1, "reads": "train it.py:26"}, {"used": 1}], "1 of 2 GPUs stayed idle: the program uses 1",
    ),
    "compiled": (COMPILED, "@", {}, [{"notes": (EAGER,)}], EAGER),
    "no GPU": (GOES, "@", {}, [{"status": "failed", "words": "the program used no GPU, and said at its end: I need two."}], ""),
    "no step": (SERVES, "@", {"limit": 0.5}, [{"status": "failed", "words": NOT_ENDED}], NOT_ENDED),
    "a signal": (KILLED, "@", {}, [{"status": "failed", "words": "ended by SIGKILL (this machine's memory may have been"}], ""),
}  # fmt: skip


@pytest.fixture(scope="session")
def tried(tmp_path_factory, shared):
    """tried(name): the trials of that row, made once a session."""
    done: dict[str, list[Trial]] = {}

    def run(name) -> list[Trial]:
        if name not in done:
            program, command, options, *_ = TRIALS[name]
            path = tmp_path_factory.mktemp("fit") / "train it.py"
            path.write_text(program)
            words = [str(path) if word == "@" else word for word in command.split()]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trials, "ScriptServer", lambda: shared)
                done[name] = search.run(words, **options)
        return done[name]

    return run


@pytest.mark.parametrize("name", TRIALS)
def test_what_a_program_comes_to(tried, name):
    *_, expected, sentence = TRIALS[name]
    trials = tried(name)
    for trial, wanted in zip(trials, expected, strict=True):
        found = {field: getattr(trial, field) for field in wanted}
        if "words" in wanted:
            assert wanted["words"] in found["words"]
            found["words"] = wanted["words"]
        assert found == wanted, trial
    assert sentence in "\n".join(table.lines(trials, {}))


def test_bytes_and_seconds_of_trials(tried):
    _, large = trials = tried("too large for one card")
    assert GIB < large.reserved < 32 * GIB and large.step > 0
    lines = table.lines(trials, {"T4": Price(1.0), "A100": Price(1000.0)})
    assert lines[0].split()[:3] == ["card", "GPUs", "batch-size"]
    assert "0.244" in lines[2] and not any(line.endswith("<") for line in lines), "nothing to choose from"
    one, two = trials = tried("more GPUs by torchrun")
    assert two.step > one.step  # gradients pass the host
    assert table.efficiency(two, trials) == pytest.approx(one.step / two.step)
    assert f"{100 * one.step / two.step:.0f} %" in table.lines(trials, {})[2]
    _, two = trials = tried("an idle GPU")
    assert table.efficiency(two, trials) == pytest.approx(0.5)
    assert "\ntrain it.py:26 reads a value of the GPU: a dry run has nan there" in "\n".join(table.lines(trials, {}))


def test_a_search_for_the_largest(tmp_path, monkeypatch, warm):
    """And the command as a function, whose trials show themselves as the table."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    trials = virtualgpu.fit(
        "train.py --micro-steps 1", ["T4"], memory="1GB", vary={"batch-size": "15000..30000"}, steps=2
    )
    assert repr(trials).splitlines()[0].split()[:3] == ["card", "GPUs", "batch-size"]
    assert "$ per GPU and hour: T4 0.35" in repr(trials) and 2**28 < trials[0].reserved < GIB
    found = [(trial.values["batch-size"], trial.status) for trial in trials]
    assert found == [("15000", "fits"), ("30000", "out of memory")]
    (best,) = trials.largest
    assert best.fits and best.values == {"batch-size": "15000"}
    assert "Largest that fits: T4: batch-size=15000." in repr(trials)
    assert fit_cli.Trials(trials, {}, None, "").largest == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"command": ""}, "name a program to try"),
        ({"gpus": 0}, "gpus=0: give whole numbers of GPUs"),
        ({"gpus": [1, True]}, "gpus=True: give whole numbers of GPUs"),
        ({"like": "T5"}, "T5"),
        ({"vary": {"n": []}}, "no value of n to try"),
        ({"vary": {"n": "9..3"}}, "n=9..3: the first number"),
        ({"samples": "n"}, "'n' is no product"),
        ({"prices": "nowhere.csv"}, "columns card and usd_per_hour"),
    ],
)
def test_what_is_wrong_is_a_sentence(monkeypatch, arguments, message):
    monkeypatch.setattr(search, "_trial", None)  # nothing runs
    with pytest.raises(ValueError, match=message) as raised:
        virtualgpu.fit(**{"command": "a.py", **arguments})
    assert "\n" not in str(raised.value) or "T5" in message


def test_what_a_full_disk_left_out_is_not_laid_at_the_programs_door(monkeypatch):
    """Python ends with 120 where what it printed cannot be kept."""

    def full(*args):
        raise OSError(28, "No space left on device")

    def trial(status, output_of=None):
        ended = SimpleNamespace(output_of=output_of or (lambda *args: (status, "")))
        cards = environment.Settings(launcher.find_cards(1, "T4", None))
        return search._trial(ended, cards, ["a.py"], Trial("T4", 1, {}, "fits"), None)

    def begun(command, environment, folder, limit):
        Path(folder, "77.ledger").touch()
        return 0, ""

    assert trial(0).words == "the program used no GPU"
    assert trial(0, begun).words.startswith("its figures could not be written: No space left on device in ")
    monkeypatch.setattr(results, "leave", full)
    for status in (0, 120):
        failed = trial(status)
        assert failed.status == "failed" and "TMPDIR" in failed.words
        assert failed.words.startswith("its figures could not be written: No space left")


def test_processes_without_a_rank_of_which_one_ran_out_of_memory(tmp_path):
    """As torch.multiprocessing starts them."""
    for pid, asked in enumerate([None, 512, None]):
        (tmp_path / f"{pid}.{trials.LEFT}").write_text(json.dumps([-1, [], asked, [], 0]))
    assert {process.asked for process in trials.collect(str(tmp_path))} == {None, 512}


@fork
def test_a_loaders_worker_is_no_rank(tmp_path):
    """A process that was forked does not tell its parent's steps again."""
    clock = types.SimpleNamespace(latest=lambda: 1.0, busy=[0.5])
    watch = steps.Watch(types.SimpleNamespace(gpus=[], clock=clock), 0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(2):
        optimizer.step()
    worker = multiprocessing.get_context("fork").Process(target=watch.leave, args=(str(tmp_path),))
    worker.start()
    worker.join()
    watch.leave(str(tmp_path))
    assert sorted(len(process.ends) for process in trials.collect(str(tmp_path))) == [0, 2]


@pytest.mark.parametrize(
    "ended, status", [(["fits", "failed"], 0), (["out of memory"], 1), (["out of memory", "failed"], 2)]
)
def test_json_and_the_exit_status(monkeypatch, capsys, ended, status):
    trials = [Trial("T4", 1, {"batch-size": "8"}, how, 2**29, GIB) for how in ended]
    monkeypatch.setattr(search, "run", lambda *arguments: trials)
    assert fit_cli.main(["--json", "--memory", "1GB", "--vary", "batch-size=8", "train.py"]) == status
    records = json.loads(capsys.readouterr().out)
    assert [record["status"] for record in records] == ended and records[0]["capacity"] == GIB
    costs = [records[0][name] for name in ("usd_per_1000_steps", "usd_per_hour", "price_as_of")]
    assert costs == [None, 0.35, "2026"]


def test_an_interrupt_tells_what_there_is(monkeypatch, capsys):
    def stop(*arguments):
        arguments[-1](Trial("T4", 1, {}, "fits", GIB, 16 * GIB, 0.5, 1, used=1))
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "run", stop)
    assert fit_cli.main(["train.py"]) == 130
    printed, errors = capsys.readouterr()
    assert "1.00 GiB" in printed and errors == "\nInterrupted: no program is left.\n"


# -- How far it is


def test_the_bar_of_a_terminal_goes_at_the_end(monkeypatch, capsys):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with fit_cli.progress(["T4", "L4"], [1], {"n": ["1", "2"]}) as note:
        note(Trial("T4", 1, {"n": "1"}, "fits"))
    shown = capsys.readouterr().err.split("\r\033[K")
    assert shown == ["", "0 of 4 tried", "1 of 4 tried: 1 x T4 n=1 fits", ""]


def test_the_bar_of_a_notebook_goes_at_the_end(monkeypatch):
    IPython = pytest.importorskip("IPython")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    shown = []
    handle = SimpleNamespace(update=lambda bundle, raw: shown.append(bundle["text/plain"]))
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr("IPython.display.display", lambda *args, **options: handle)
    with fit_cli.progress(["T4"], [1], {"n": Range(1, 9)}) as note:
        note(Trial("T4", 1, {"n": "1"}, "fits"))
    assert shown == ["1 tried: 1 x T4 n=1 fits", ""]
    shown.clear()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with fit_cli.progress(["T4"], [1], {}) as note:
        note(Trial("T4", 1, {}, "fits"))
    assert shown == []
