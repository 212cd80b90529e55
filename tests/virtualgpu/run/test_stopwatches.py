"""What a program's own stopwatch prints under the runner: the simulated time of its rank; --timers real gives it this machine's."""

import json

import pytest

TRAINS = """\
import datetime, json, os, subprocess, sys, time
from time import perf_counter as now
begun = time.time()
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.benchmark import Timer
from tqdm import tqdm

def real():
    return os.times().elapsed

rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.cuda.set_device(rank)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
if ranks > 1:
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 512, device="cuda")

def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

for _ in range(3):
    step()
torch.cuda.synchronize()
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
real_before, before = real(), now()
start.record()
for _ in tqdm(range(5), file=open(os.devnull, "w")) if rank == 0 else range(5):
    step()
end.record()
torch.cuda.synchronize()
said = {"tokens": 5 * 64 * ranks / (now() - before), "by events": 5 * 64 * ranks / (start.elapsed_time(end) / 1e3), "real": real() - real_before}
if ranks == 1:
    multiply = Timer("x.T @ x", globals={"x": x}).timeit(20)
    said["benchmark"] = min(multiply.raw_times) / 20
    start.record()
    for _ in range(20):
        x.T @ x
    end.record()
    torch.cuda.synchronize()
    said["product"] = start.elapsed_time(end) / 1e3 / 20
    before = real()
    try:
        subprocess.run([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, timeout=0.5)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9)"]).wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        said["limit"] = real() - before
    said["hours off"] = abs(time.time() - datetime.datetime.now().timestamp()) / 3600
    said["since import"] = time.time() - begun
os.write(1, (json.dumps(said) + "\\n").encode())  # in one piece
if ranks > 1:
    dist.destroy_process_group()
"""


def said_by(run, tmp_path, *options) -> list[dict]:
    (tmp_path / "train.py").write_text(TRAINS)
    ranks = ["torchrun", "--standalone", "--nproc-per-node=4"] if "4" in options else []
    found = run("--quiet", "--gpus", *options, *ranks, tmp_path / "train.py")
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("options", [("1",), ("1", "--dry"), ("4", "--dry")], ids=["1", "1, dry", "4, dry"])
def test_tokens_per_second_are_those_of_events(run, tmp_path, options):
    for said in said_by(run, tmp_path, *options):
        assert said["tokens"] == pytest.approx(said["by events"], rel=0.01)
        assert said["real"] > 2 * 5 * 64 / said["tokens"] or "--dry" in options
        if "limit" in said:
            assert said["benchmark"] == pytest.approx(said["product"], rel=0.2)
            assert 0.4 < said["limit"] < 60
            assert said["hours off"] < 0.1
            assert 0 < said["since import"] < 600


def test_timers_real_are_this_machines(run, tmp_path):
    (said,) = said_by(run, tmp_path, "1", "--timers", "real")
    assert said["tokens"] == pytest.approx(
        5 * 64 / said["real"], rel=0.5
    )  # a busy machine; simulated, it is twice as many and more
    assert said["benchmark"] > 2 * said["product"]


LOADS = """\
import os, time
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        before, begin = os.times().elapsed, time.perf_counter()
        torch.ones(1).sum()
        time.sleep(0.2)
        return time.perf_counter() - begin, os.times().elapsed - before

def work(rank):
    torch.ones(1, device=f"cuda:{rank}")
    begin = time.perf_counter()
    for told, real in DataLoader(Slow(), num_workers=1):
        assert 0.15 < told.item() < 5 and 0.15 < real.item() < 5, (told, real)
    assert time.perf_counter() - begin < 0.5, "loading is not the host's work"
    torch.cuda._sleep(10**12)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin > 300
    print("rank", rank, "ends", flush=True)

if __name__ == "__main__":
    before, begin = os.times().elapsed, time.time()
    mp.spawn(work, nprocs=2)
    assert abs((time.time() - begin) - (os.times().elapsed - before)) < 0.5, "no GPU of its own: real"
"""


def test_workers_and_a_process_without_a_gpu_read_real_time(run, tmp_path):
    (tmp_path / "loads.py").write_text(LOADS)
    found = run("--quiet", tmp_path / "loads.py")
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"]


def test_an_unknown_kind_is_refused(run):
    found = run("--timers", "cpu", "-c", "pass")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "python -m virtualgpu: --timers 'cpu': choose simulated or real\n"
