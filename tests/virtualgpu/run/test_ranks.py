"""Programs of several ranks under the runner: torchrun, one table and one trace for all; one rank of many; a notebook's own GPUs. A rank that dies: test_train_script."""

import json
import re

PROGRAM = """
import os, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group()
model = DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda(), device_ids=[rank], bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(4096, 512, device="cuda")).sum().backward()
    optimizer.step()
os.write(1, f"rank {rank} of {dist.get_world_size()}: {dist.get_backend_config()}\\n".encode())  # in one piece
dist.destroy_process_group()
"""
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")


def test_torchrun(run, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    trace = tmp_path / "trace.json"
    found = run("--gpus", 2, "--trace", trace, *TORCHRUN, tmp_path / "program.py", environ={"OMP_NUM_THREADS": "1"})
    assert found.returncode == 0, found.stderr
    for rank in range(2):
        assert re.search(rf"rank {rank} of 2: .*cuda:nccl", found.stdout)
    row = r"^ *{} +(\d+) +[\d.]+ MiB +[\d.e-]+ s +(\d+) % +[\d.e-]+ s$"
    rows = [re.search(row.format(rank), found.stderr, re.M) for rank in range(2)]
    assert all(rows), found.stderr
    assert rows[0].groups() == rows[1].groups() and 10 < int(rows[0][2]) < 100  # some of it beside kernels

    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(name.split(" (")[0] for name in names.values()) == ["rank 0", "rank 1"]
    communication = [
        [(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "communication" and e["pid"] == pid]
        for pid in names
    ]
    assert communication[0] == communication[1] and len(communication[0]) > 6


def test_one_rank_of_many(run, tmp_path):
    from tests.virtualgpu.distributed.test_single_rank import PROGRAM as ALONE

    (tmp_path / "program.py").write_text(ALONE)
    found = run("--dry", "--like", "H100", "--world-size", 512, "--rank", 3, tmp_path / "program.py")
    assert found.returncode == 0, found.stderr
    assert found.stdout == "3 512 1 nccl\n"
    assert "dry run" in found.stderr and re.search(r"^ +3 +\d+ +[\d.]+ MiB", found.stderr, re.M)


OTHERS = """
import torch, virtualgpu
import torch.distributed as dist
from virtualgpu.run.ranks import launch


def summed():
    torch.cuda.set_device(dist.get_rank())
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    return x.tolist(), torch.cuda.device_count()


if __name__ == "__main__":
    virtualgpu.gpus(3)
    print(launch(summed, nprocs=3))
"""


def test_ranks_of_a_notebook_that_has_other_gpus_than_the_runners_have_those(run, tmp_path):
    (tmp_path / "program.py").write_text(OTHERS)
    done = run("--gpus", 2, "--quiet", tmp_path / "program.py", environ={"OMP_NUM_THREADS": "1"})
    assert done.stdout.splitlines()[-1:] == [str([([3.0, 3.0], 3)] * 3)], done.stderr


ALIKE = """
import torch, virtualgpu
from virtualgpu.run.ranks import launch


def free():
    return torch.cuda.mem_get_info(0)[0] >> 20


if __name__ == "__main__":
    held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")  # as another notebook under the same runner may
    print(launch(free, nprocs=1)[0] < 2 << 10)
    with virtualgpu.dry_run(2, memory="3 GiB"):
        print(launch(free, nprocs=1)[0] > 2 << 10)
"""


def test_ranks_of_a_dry_run_have_its_gpus_and_not_the_runners_of_the_same_cards(run, tmp_path):
    """Beside GPUs that pass for real ones a dry run has its own: what other processes hold of the runner's is not in the way."""
    (tmp_path / "program.py").write_text(ALIKE)
    environ = {"OMP_NUM_THREADS": "1", "HELPERS_GPUS": "real"}
    options = ("--gpus", 2, "--memory", "3 GiB", "--quiet")
    done = run(*options, tmp_path / "program.py", environ=environ)
    assert done.stdout.split() == ["True", "True"], done.stderr
