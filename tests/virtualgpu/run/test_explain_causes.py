"""`--explain` on programs with a planted cause: it is named first, and the mended program's step is what was told."""

import socket

import pytest

from virtualgpu import environment
from virtualgpu.hardware import specs
from virtualgpu.run import cli
from virtualgpu.run.explain import applied
from virtualgpu.run.explain import runs as explain
from virtualgpu.run.explain import table as explain_table

# Fat layers, whose gradients are large beside their work
DDP = """
import os, sys, torch, torch.distributed.algorithms.ddp_comm_hooks.default_hooks
from torch import nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group
rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(rank)
init_process_group("nccl")
how, layers, width, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [int(n) for n in sys.argv[4:]]
model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).cuda()
if how != "by hand" and how != "as one":
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
    gradients = [p.grad for p in model.parameters()]
    if how == "by hand":
        for gradient in gradients:
            all_reduce(gradient)
    if how == "as one":
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))
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


@pytest.fixture
def told(tmp_path, warm):
    """told("T4", 2, DDP, "{}", 4): what explain finds out; only=True: what its ranks tell, without reruns. of: one rank of so
    many plays alone."""

    def start(like, gpus, program, *arguments, only=False, of=None, host=None, jobs=2):
        path = tmp_path / "train.py"
        path.write_text(program)
        command = [str(path), *map(str, arguments)]
        settings = environment.Settings(cli.find_cards(gpus, like, None), host=host, single_rank=of and (of, 0, 8))
        if only:
            settings = settings._replace(dry=True, steps=explain.STEPS, explain={})
            with explain.Programs() as programs:
                result = explain.once(programs, settings, command)
            assert not result.failed, result.failed
            return result.explained
        found = explain.run(command, settings, jobs=jobs)
        assert not found.failed, found.failed
        for row in found.rows:
            parts = row.parts
            whole = sum(parts.computing.values()) + sum(parts.idle.values())
            assert whole == pytest.approx(parts.step, rel=1e-6), "the parts add up to the step"
        return found

    return start


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


OF_64 = {"of": 64, "host": "launch"}  # where a small collective takes longer than the host to launch what it is about


step_of = explain.slowest


def first(found):
    """The change that is named first, and what the step is with it."""
    change, step, _ = next(one for one in found.tried if not one.change.bound)
    sentence = explain_table.sentences(found)[0]
    assert change.words in sentence and explain_table.milliseconds(step) in sentence, sentence
    return change.name, step


def test_gradients_that_take_long_on_their_way(told):
    """Without NVLink, in tiny buckets, in full precision: each change alone is what the program mended so takes."""
    slow = "dict(bucket_cap_mb=0.01)"
    found = told("T4", 1, DDP, slow, 4, 2048, 512, of=2)
    name, _ = first(found)
    assert name == "NVLink"
    steps = {one.change.name: one.step for one in found.tried}
    for change, how in (("larger buckets", "{}"), ("half gradients", f"half {slow}")):
        mended = told("T4", 1, DDP, how, 4, 2048, 512, of=2, only=True)
        assert steps[change] == pytest.approx(step_of(mended), rel=1e-6)
    assert not any(one.compressible for one in mended), "the program has a hook of its own by now"


@pytest.mark.parametrize("here", [1, 2])
def test_a_bridge_is_the_card_with_the_bridge(here):
    """Also where one rank of the two plays alone."""
    bridged = applied.cards({"link": 2}, [specs.find_spec("TITAN RTX")] * here)
    assert [card.peer for card in bridged] == [specs.find_spec("TITAN RTX NVLink").peer] * here
    assert applied.cards({"link": 4}, [specs.find_spec("TITAN RTX")])[0].peer == specs.find_spec("V100").peer


def test_a_collective_for_each_parameter(told):
    found = told("H100", 1, DDP, "by hand", 48, 256, 512, **OF_64)
    name, step = first(found)
    assert name == "fewer collectives"
    assert step == pytest.approx(step_of(told("H100", 1, DDP, "as one", 48, 256, 512, only=True, **OF_64)), rel=0.1)


def test_unequal_ranks(told):
    port = free_port()
    # one program at a time, as unless asked otherwise: ranks of two at one port meet each other
    found = told("A100", 2, OWN_RANKS, port, 2048, 65536, 131072, jobs=None)
    ((change, step, _),) = found.tried
    assert change.name == first(found)[0] == "equal ranks"
    assert step == pytest.approx(step_of(told("A100", 2, OWN_RANKS, port, 2048, 98304, only=True)), rel=0.03)


@pytest.mark.parametrize("workers, layers, width, rows", [(0, 100, 64, 8), (2, 4, 1024, 512)])
def test_a_slow_loader(told, workers, layers, width, rows):
    """And, of many small layers, launches."""
    found = told("T4", 1, ALONE, 1, layers, width, rows, workers)
    name, step = first(found)
    assert name == "no loader" and found.has_loader
    (row,) = found.rows
    waited = row.parts.idle["loader"]
    assert waited > 0.06 / max(1, workers) and step == pytest.approx(
        found.step - waited, rel=0.05, abs=0.005 * found.step
    )
    if not workers:
        (launched,) = (one.step for one in found.tried if one.change.name == "no launches")
        assert launched == pytest.approx(found.step - row.parts.idle["launches"], rel=0.02)


def test_half_precision(told):
    found = told("V100", 1, ALONE, 0, 4, 2048, 8192)
    name, step = first(found)
    assert name == "half precision"
    assert step == pytest.approx(step_of(told("V100", 1, ALONE, 1, 4, 2048, 8192, only=True)), rel=0.03)
