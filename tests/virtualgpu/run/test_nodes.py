"""Nodes on one machine: two agents of torchrun, under one runner whose GPUs are divided, or one each; networks."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import free_port
from virtualgpu.hardware.network import Fabric, find_network
from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing import nccl

# Each rank prints where it is, how long an all_reduce of 4 MB lasts, and with "ddp" the sum of its gradients
RANK = """
import json, os, sys, torch
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
gradient = None
if sys.argv[1:] == ["ddp"]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[local])
    model(torch.full((4, 8), 1.0 + dist.get_rank(), device="cuda")).sum().backward()
    gradient = model.module.weight.grad.sum().item()
gpu = virtualgpu.session.current().gpus[local].physical
said = json.dumps([dist.get_rank(), gpu, torch.cuda.device_count(), x[0, 0].item(), lasted[0], gradient])
os.write(1, f"{said}\\n".encode())  # in one piece: torchrun's workers write without a buffer, and print in two
dist.barrier()
dist.destroy_process_group()
"""
ALONE = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def program(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    return tmp_path / "rank.py"


def agent(node: int, port: int, program, *arguments: str) -> list[str]:
    where = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
    meet = ["--rdzv-backend", "static", "--master-addr", "localhost", "--master-port", str(port)]
    return ["-m", "torch.distributed.run", *where, *meet, str(program), *arguments]


def ranks(*printed: str) -> list[list]:
    return sorted(json.loads(line) for text in printed for line in text.splitlines() if line.startswith("["))


def check(found: list[list], seconds: float, gpus: list[tuple[int, int]]) -> None:
    """Two ranks that agree, with an all_reduce that lasts so long, on these of the machine's GPUs and so many to be seen."""
    assert [(rank, gpu, count) for rank, gpu, count, *_ in found] == [(rank, *gpu) for rank, gpu in enumerate(gpus)]
    for _, _, _, total, lasted, _ in found:
        assert total == 1 + 2 and lasted == pytest.approx(seconds, rel=1e-9)


def expected(network: str | None = None) -> float:
    fabric = Fabric.of(SPECS["T4"], network and find_network(network)).shared_by(1, 1)
    return nccl.seconds("all_reduce", 4_000_000, 2, fabric, 2)


def test_two_runners_are_two_nodes(run, program):
    port = free_port()
    with ThreadPoolExecutor(2) as both:
        done = list(both.map(lambda i: run("--gpus", 1, *agent(i, port, program, "ddp"), environ=ALONE), range(2)))
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    found = ranks(*(one.stdout for one in done))
    check(found, expected(), [(0, 1), (0, 1)])
    assert [rank[-1] for rank in found] == [64 * 4 * 1.5] * 2
    for node, one in enumerate(done):  # each runner tells of its own rank
        assert re.findall(r"^ +(\d) +\d+ +[\d.]+ MiB +\S+ s ", one.stderr, re.M) == [str(node)], one.stderr


def test_two_agents_under_one_runner(run, program, tmp_path):
    port = free_port()
    agents = [agent(node, port, program) for node in range(2)]
    (tmp_path / "both.py").write_text(
        f"import subprocess, sys\nagents = [subprocess.Popen([sys.executable, *agent]) for agent in {agents}]\n"
        "sys.exit(max(agent.wait() for agent in agents))\n"
    )
    done = run("--gpus", 2, "--gpus-per-node", 1, "--network", "Ethernet 10", tmp_path / "both.py", environ=ALONE)
    assert done.returncode == 0, done.stderr
    check(ranks(done.stdout), expected("Ethernet 10"), [(0, 1), (1, 1)])  # each node has its own
    assert expected("Ethernet 10") > 5 * expected()
