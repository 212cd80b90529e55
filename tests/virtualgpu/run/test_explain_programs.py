"""`--explain` on programs: a planted cause is named first, and the mended program's step is what was told; what fails says how."""

import json
import socket

import pytest

from tests.virtualgpu.run.test_fit import TRAIN
from virtualgpu import environment
from virtualgpu.run import cli, launcher
from virtualgpu.run.explain import cli as explain

# Fat layers, whose gradients are large beside their work
DDP = """
import os, sys, torch, torch.distributed.algorithms.ddp_comm_hooks.default_hooks
from torch import nn
from torch.distributed import init_process_group
rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(rank)
init_process_group("nccl")
how, layers, width, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [int(n) for n in sys.argv[4:]]
model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).cuda()
model = nn.parallel.DistributedDataParallel(model, device_ids=[rank], **eval(how.removeprefix("half ")))
if how.startswith("half"):
    model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    x = torch.randn(rows[rank % len(rows)], width, device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
# Ranks of a program's own, which know who they are from their group alone; its port is taken where two of its runs are there at a time.
OWN_RANKS = """
import sys, torch
from torch import nn
from torch.distributed import init_process_group
def main(rank, port, width, rows):
    torch.cuda.set_device(rank)
    init_process_group("nccl", f"tcp://localhost:{port}", rank=rank, world_size=2)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).cuda()
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(rows[rank % len(rows)], width, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if __name__ == "__main__":
    port, width, *rows = map(int, sys.argv[1:])
    method = "fork" if sys.platform == "linux" else "spawn"
    torch.multiprocessing.start_processes(main, (port, width, rows), nprocs=2, start_method=method)
"""
ALONE = """
import contextlib, sys, time, torch
from torch import nn
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.zeros(64)
if __name__ == "__main__":
    half, layers, width, rows, *workers = map(int, sys.argv[1:])
    loader = [torch.ones(1)] * 100
    if workers:
        loader = torch.utils.data.DataLoader(Images(), batch_size=4, num_workers=workers[0])
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        x = torch.randn(rows, width, device="cuda")
        with torch.autocast("cuda", torch.float16) if half else contextlib.nullcontext():
            loss = model(x).square().mean() + batch.cuda(non_blocking=True).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

SLOW = "dict(bucket_cap_mb=0.01)"


def settings_of(like, gpus=1, **more):
    return environment.Settings(launcher.find_cards(gpus, like, None), **more)


@pytest.fixture
def explained(tmp_path, warm):
    """explained(DDP, "{}", 4, like="T4"): what explain finds out."""

    def start(program, *arguments, like, gpus=1, jobs=2, **more):
        (tmp_path / "train.py").write_text(program)
        command = [str(tmp_path / "train.py"), *map(str, arguments)]
        found = explain.run(command, settings_of(like, gpus, **more), jobs=jobs)
        assert not found.failed, found.failed
        for row in found.rows:
            whole = sum(row.parts.computing.values()) + sum(row.parts.idle.values())
            assert whole == pytest.approx(row.parts.step, rel=1e-6), "the parts add up to the step"
        return found

    return start


@pytest.fixture
def ranks_of(tmp_path, warm):
    """ranks_of(DDP, "{}", 4, like="T4"): what the ranks of a program that was mended tell, without reruns."""

    def start(program, *arguments, like, gpus=1, **more):
        (tmp_path / "mended.py").write_text(program)
        settings = settings_of(like, gpus, dry=True, steps=explain.STEPS, explain={}, **more)
        with explain.Programs() as programs:
            result = explain.once(programs, settings, [str(tmp_path / "mended.py"), *map(str, arguments)])
        assert not result.failed, result.failed
        return result.explained

    return start


def first(found):
    """The change that is named first, and what the step is with it."""
    change, step, _ = next(one for one in found.tried if not one.change.bound)
    sentence = explain.sentences(found)[0]
    assert change.words in sentence and explain.milliseconds(step) in sentence, sentence
    return change.name, step


CAUSES = {  # change that is named first: program, its arguments, those of the program mended so, where, and how near its step comes
    "half precision": (ALONE, (0, 4, 2048, 8192), (1, 4, 2048, 8192), {"like": "V100"}, 0.03),
    # one program at a time, as unless asked otherwise: ranks of two at one port meet each other
    "equal ranks": (OWN_RANKS, ("port", 2048, 65536, 131072), ("port", 2048, 98304), {"like": "A100", "gpus": 2, "jobs": None}, 0.03),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_planted_cause(explained, ranks_of, name):
    program, planted, mended, where, rel = CAUSES[name]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    planted, mended = ([port if word == "port" else word for word in words] for words in (planted, mended))
    change, step = first(explained(program, *planted, **where))
    assert change == name
    where = {option: value for option, value in where.items() if option != "jobs"}
    assert step == pytest.approx(explain.slowest(ranks_of(program, *mended, **where)), rel=rel)


def test_gradients_that_take_long_on_their_way(explained, ranks_of):
    """Without NVLink, in tiny buckets, in full precision: each change alone is what the program mended so takes."""
    where = {"like": "T4", "single_rank": (2, 0, 8)}
    found = explained(DDP, SLOW, 4, 2048, 512, **where)
    assert first(found)[0] == "NVLink"
    steps = {one.change.name: one.step for one in found.tried}
    for change, how in (("larger buckets", "{}"), ("half gradients", f"half {SLOW}")):
        mended = ranks_of(DDP, how, 4, 2048, 512, **where)
        assert steps[change] == pytest.approx(explain.slowest(mended), rel=1e-6)
    assert not any(one.compressible for one in mended), "the program has a hook of its own by now"


@pytest.mark.parametrize("workers, layers, width, rows", [(0, 100, 64, 8), (2, 4, 1024, 512)])
def test_a_slow_loader(explained, workers, layers, width, rows):
    """And, of many small layers, launches."""
    found = explained(ALONE, 1, layers, width, rows, workers, like="T4")
    name, step = first(found)
    (row,) = found.rows
    waited = row.parts.idle["loader"]
    assert name == "no loader" and found.has_loader and waited > 0.06 / max(1, workers)
    assert step == pytest.approx(found.step - waited, rel=0.05, abs=0.005 * found.step)
    if not workers:
        (launched,) = (one.step for one in found.tried if one.change.name == "no launches")
        assert launched == pytest.approx(found.step - row.parts.idle["launches"], rel=0.02)


# -- Programs that fail, and those that make too few steps

PROGRAM = TRAIN
ON_CPU = TRAIN.replace("torch.cuda.set_device(rank)", "").replace(".cuda()", "").replace(', device="cuda"', "")


@pytest.mark.parametrize(
    "program, options, message",
    [
        (TRAIN, "--fault key", "KeyError: 'missing' (train it.py:25)"),
        (TRAIN, "--batch-size 10000000", "out of memory: 38.15 GiB more were asked for"),
        (ON_CPU, "", "the program used no GPU"),
        ("import time\ntime.sleep(1000)\n", "", explain.NOT_ENDED),
    ],
)
def test_a_program_that_fails_says_how(tmp_path, warm, program, options, message):
    path = tmp_path / "train it.py"
    path.write_text(program)
    limit = 0.5 if "sleep" in program else None
    assert explain.run([str(path), *options.split()], settings_of("T4"), limit=limit).failed == message


@pytest.mark.parametrize("options, status", [("--fault half --steps 2 --batch-size 512", 0), ("--steps 1", 2)])
def test_two_steps_are_enough_and_a_run_that_fails_is_told(script, capsys, warm, options, status):
    assert cli.main(["--explain", "--gpus", "1", "--like", "P100", "--json", script, *options.split()]) == status
    record = json.loads(capsys.readouterr().out)
    too_few = "the program ended after 1 step of an optimizer of torch.optim: two at least can be told of"
    assert record["failed"] == (too_few if status else "")
    if not status:
        (row,), (half,) = record["rows"], record["tried"]
        assert row["step"] == record["step"] == pytest.approx(sum((*row["computing"].values(), *row["idle"].values())))
        assert (half["change"], half["step"]) == ("half precision", None)
        assert half["failed"].startswith("out of memory")
