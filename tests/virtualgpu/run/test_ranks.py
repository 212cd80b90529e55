"""Ranks under the runner: one of many, those of a notebook's own GPUs, nodes; two processes at the last memory of a GPU; recorded steps.
torchrun, with one table and one trace for all: test_readme."""

import contextlib
import json
import multiprocessing
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import virtualgpu
from tests.processes import free_port
from virtualgpu.hardware.machine import Fabric, find_network
from virtualgpu.hardware.specs import SPECS
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.config import parse
from virtualgpu.memory.ledger import Ledger
from virtualgpu.run.ranks import launch
from virtualgpu.run.ranks.recorded import record
from virtualgpu.timing import nccl

GIB = 1 << 30
ALONE = """
import os, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
model(torch.randn(8, 4096, device="cuda")).sum().backward()
ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
for _ in range(3):
    ddp(torch.randn(4, 8, device="cuda")).sum().backward()
print(dist.get_rank(), dist.get_world_size(), torch.cuda.device_count(), dist.get_backend())
dist.destroy_process_group()
"""


def test_one_rank_of_many(run):
    """DDP's C++ would warn of its timers, once a process: they know the times of no shapes."""
    ended = run("--dry", "--like", "H100", "--world-size", 512, "--rank", 3, "-c", ALONE)
    assert (ended.returncode, ended.stdout) == (0, "3 512 1 nccl\n"), ended.stderr
    assert "dry run" in ended.stderr and re.search(r"^ +3 +\d+ +[\d.]+ MiB", ended.stderr, re.M)
    assert "Time stats" not in ended.stderr


ALIKE = """
import os, torch, virtualgpu
import torch.distributed as dist
from virtualgpu.run.ranks import launch


def free():
    return torch.cuda.mem_get_info(0)[0] >> 20


def summed():
    torch.cuda.set_device(dist.get_rank())
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    return x.tolist(), torch.cuda.device_count()


if __name__ == "__main__":
    held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")  # as another notebook under the same runner may
    print(launch(free, nprocs=1)[0] < 2 << 10)
    with virtualgpu.dry_run(2, memory="3 GiB"):
        print(launch(free, nprocs=1)[0] > 2 << 10)
    del held, os.environ["HELPERS_GPUS"]
    virtualgpu.gpus(3)
    print(launch(summed, nprocs=3))
"""


def test_ranks_have_the_gpus_of_their_notebook_and_not_the_runners(run, tmp_path):
    """Beside GPUs that pass for real ones a dry run has its own, also of the same cards: what other processes hold of the runner's is not
    in the way. And a notebook has those that it asks for."""
    (tmp_path / "program.py").write_text(ALIKE)
    environ = {"OMP_NUM_THREADS": "1", "HELPERS_GPUS": "real"}
    ended = run("--gpus", 2, "--memory", "3 GiB", "--quiet", tmp_path / "program.py", environ=environ)
    lines = ended.stdout.splitlines()
    assert [*lines[:2], lines[-1]] == ["True", "True", str([([3.0, 3.0], 3)] * 3)], ended.stderr


def test_ranks_draw_numbers_of_their_own():
    """As processes that are started anew do; forked from one that has PyTorch loaded, they would have its seed."""

    def draws():
        import numpy

        return torch.rand(1).item(), numpy.random.rand(), torch.initial_seed()

    ranks = [numbers for _ in range(2) for numbers in launch(draws, nprocs=2)]
    assert [len(set(numbers)) for numbers in zip(*ranks, strict=True)] == [4, 4, 4]


# -- Nodes: two agents of torchrun, under one runner whose GPUs are divided, or one each

# Each rank prints where it is, and how long an all_reduce of 4 MB lasts
RANK = """
import json, os, torch
import torch.distributed as dist
import virtualgpu

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group()
assert "cuda:nccl" in str(dist.get_backend_config())
x = torch.full((1000, 1000), 1.0 + dist.get_rank(), device="cuda")
with virtualgpu.recording() as spans:
    dist.all_reduce(x)
    torch.cuda.synchronize()
lasted = [span.end - span.start for span in spans if span.kind == "communication"]
gpu = virtualgpu.session.current().gpus[local].physical
said = json.dumps([dist.get_rank(), gpu, torch.cuda.device_count(), x[0, 0].item(), lasted[0]])
os.write(1, f"{said}\\n".encode())  # in one piece: torchrun's workers write without a buffer, and print in two
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def agent(tmp_path):
    """agent(0, port): the command of a node's torchrun."""
    (tmp_path / "rank.py").write_text(RANK)

    def command(node: int, port: int) -> list[str]:
        where = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
        meet = ["--rdzv-backend", "static", "--master-addr", "localhost", "--master-port", str(port)]
        return ["-m", "torch.distributed.run", *where, *meet, str(tmp_path / "rank.py")]

    return command


def check(printed: str, seconds: float, gpus: list[tuple[int, int]]) -> None:
    """Two ranks that agree, with an all_reduce that lasts so long, on these of the machine's GPUs and so many to be seen."""
    ranks = sorted(json.loads(line) for line in printed.splitlines() if line.startswith("["))
    for number, (rank, (_, *found)) in enumerate(zip(gpus, ranks, strict=True)):
        assert ranks[number][0] == number and found == [*rank, 1 + 2, pytest.approx(seconds, rel=1e-9)]


def seconds_over(network: str | None = None) -> float:
    fabric = Fabric.of(SPECS["T4"], network and find_network(network)).shared_by(1, 1)
    return nccl.seconds("all_reduce", 4_000_000, 2, fabric, 2)


BETWEEN = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_two_runners_are_two_nodes(run, agent):
    port = free_port()
    with ThreadPoolExecutor(2) as both:
        ended = list(both.map(lambda i: run("--gpus", 1, *agent(i, port), environ=BETWEEN), range(2)))
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    check(ended[0].stdout + ended[1].stdout, seconds_over(), [(0, 1), (0, 1)])
    for node, one in enumerate(ended):  # each runner tells of its own rank
        assert re.findall(r"^ +(\d) +\d+ +[\d.]+ MiB +\S+ s ", one.stderr, re.M) == [str(node)], one.stderr


def test_two_agents_under_one_runner(run, agent, tmp_path):
    port = free_port()
    (tmp_path / "both.py").write_text(
        f"import subprocess, sys\nagents = [subprocess.Popen([sys.executable, *agent]) for agent in {[agent(0, port), agent(1, port)]}]\n"
        "sys.exit(max(agent.wait() for agent in agents))\n"
    )
    ended = run("--gpus", 2, "--gpus-per-node", 1, "--network", "Ethernet 10", tmp_path / "both.py", environ=BETWEEN)
    assert ended.returncode == 0, ended.stderr
    check(ended.stdout, seconds_over("Ethernet 10"), [(0, 1), (1, 1)])  # each node has its own
    assert seconds_over("Ethernet 10") > 5 * seconds_over()


# -- Two processes that ask for the last memory of one GPU in the same moment: one has it, the other is out of memory


def takes(folder: str, settings: str, barrier, found) -> None:
    """One of the two: in each round it asks for 6 of 10 GiB."""
    ledger = Ledger(folder, 1)

    def others() -> int:
        held = ledger.others(0)
        time.sleep(0.02)  # so long that the other one asks, too
        return held

    memory = CachingAllocator(10 * GIB, others=others, config=parse(settings))
    memory.exclusive = ledger.lock
    memory.on_reserved = lambda memory: ledger.note(0, memory.reserved + memory.context)
    got = []
    for _ in range(12):
        barrier.wait(30)
        block = None
        with contextlib.suppress(torch.OutOfMemoryError):
            block = memory.malloc(6 * GIB)
        got.append(block is not None)
        barrier.wait(30)
        memory.free(block)
        memory.empty_cache()
    found.put(got)


def one_of_two(found) -> bool:
    rounds = list(zip(*found, strict=True))
    return bool(rounds) and all(sum(both) == 1 for both in rounds)


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_one_of_two_allocators_gets_the_last_memory(tmp_path, settings):
    fork = multiprocessing.get_context("fork")
    barrier, found = fork.Barrier(2), fork.Queue()
    both = [fork.Process(target=takes, args=(str(tmp_path), settings, barrier, found)) for _ in range(2)]
    for process in both:
        process.start()
    assert one_of_two([found.get(timeout=60) for _ in both])
    for process in both:
        process.join()


def test_one_of_two_ranks_gets_the_last_memory(monkeypatch):
    def takes():
        got = []
        for _ in range(40):
            dist.barrier()
            try:
                held = torch.empty(6 << 30, dtype=torch.uint8, device="cuda:0")
            except torch.OutOfMemoryError:
                held = None
            got.append(held is not None)
            dist.barrier()
            del held
            torch.cuda.empty_cache()
        return got

    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    virtualgpu.gpus(1, memory="10 GB")
    try:
        assert one_of_two(launch(takes, nprocs=2, dry=True))
    finally:
        virtualgpu.reset()


# -- A step on several ranks, recorded in a dry run


def averaged(elements):
    """A step in which each rank computes, and the ranks add up what they have."""
    x = torch.ones(elements, elements, device="cuda")
    return lambda: dist.all_reduce(x @ x)


def unequal_first_steps():
    """Ranks that meet in no collective, and whose first steps take unequally long."""
    a = torch.empty(4096, 4096, device="cuda")
    return lambda: [a @ a for _ in range(3 if dist.get_rank() == 0 else 1)]


def test_each_job_has_its_step_and_its_peak(gpus):
    """And the GPUs that were on are back."""
    before = virtualgpu.machine()
    runs = record(averaged, [(512,), (2048,)], nprocs=2)
    small, large = runs[512,], runs[2048,]
    assert list(small.timeline.rows) == ["rank 0", "rank 1"] and small.timeline.origin == "simulated"
    assert {span.kind for span in small.timeline.rows["rank 0"]} >= {"forward", "communication"}
    assert 0 < small.seconds < large.seconds and 0 < large.idle < 100
    assert large.peaks == [peak + 2 * (2048**2 - 512**2) * 4 for peak in small.peaks]  # x, and what is added up
    assert virtualgpu.machine() is before is not None
    virtualgpu.reset()
    rows = record(unequal_first_steps, [()], nprocs=2)[()].timeline.rows
    assert [row[0].start for row in rows.values()] == pytest.approx([0, 0], abs=1e-4)  # they begin at one moment
    assert virtualgpu.machine() is None
