"""Ranks under the runner: one of many; those of a notebook's own GPUs. torchrun, with one table and one trace for all: test_readme; a rank
that dies: test_train_script."""

import re

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
print(dist.get_rank(), dist.get_world_size(), torch.cuda.device_count(), dist.get_backend())
dist.destroy_process_group()
"""


def test_one_rank_of_many(run, tmp_path):
    (tmp_path / "program.py").write_text(ALONE)
    found = run("--dry", "--like", "H100", "--world-size", 512, "--rank", 3, tmp_path / "program.py")
    assert found.returncode == 0, found.stderr
    assert found.stdout == "3 512 1 nccl\n"
    assert "dry run" in found.stderr and re.search(r"^ +3 +\d+ +[\d.]+ MiB", found.stderr, re.M)


TIMES = """
import os, torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
found = []
for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM, dist.ReduceOp.AVG):
    elapsed = torch.tensor([0.25 + rank], device="cuda")
    dist.all_reduce(elapsed, op=op)
    found.append(elapsed.item())
rates, rate = [torch.zeros(1, device="cuda") for _ in range(2)], torch.tensor([rank + 1.5]).cuda()
dist.all_gather(rates, rate)
dist.broadcast(rate, src=1)
loss = torch.rand(1000, device="cuda").mean()
dist.all_reduce(loss)
if rank == 0:
    print(found, torch.stack(rates).mean().item(), rate.tolist(), loss.item() - loss.item())
dist.destroy_process_group()
"""


def test_measured_times_are_known_in_a_dry_run(run, tmp_path):
    (tmp_path / "program.py").write_text(TIMES)
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", 2, tmp_path / "program.py")
    for options, nothing in ((["--dry"], "nan"), ([], "0.0")):
        done = run(*options, "--gpus", 2, "--quiet", *torchrun)
        assert done.stdout == f"[1.25, 1.5, 0.75] 2.0 [2.5] {nothing}\n", done.stderr


DDP = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
for _ in range(3):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
dist.destroy_process_group()
"""


def test_ddp_does_not_warn_of_its_timers(run, tmp_path):
    """C++ does, once a process: they know the times of no shapes."""
    (tmp_path / "program.py").write_text(DDP)
    done = run("--dry", "--world-size", 2, tmp_path / "program.py")
    assert done.returncode == 0 and "Time stats" not in done.stderr, done.stderr


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
    options = ("--gpus", 2, "--memory", "3 GiB", "--quiet")
    done = run(*options, tmp_path / "program.py", environ=environ)
    said = done.stdout.splitlines()
    assert [*said[:2], said[-1]] == ["True", "True", str([([3.0, 3.0], 3)] * 3)], done.stderr
