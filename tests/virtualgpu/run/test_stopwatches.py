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
told = {"tokens": 5 * 64 * ranks / (now() - before), "by events": 5 * 64 * ranks / (start.elapsed_time(end) / 1e3), "real": real() - real_before}
if ranks == 1:
    multiply = Timer("x.T @ x", globals={"x": x}).timeit(20)
    told["benchmark"] = min(multiply.raw_times) / 20
    start.record()
    for _ in range(20):
        x.T @ x
    end.record()
    torch.cuda.synchronize()
    told["product"] = start.elapsed_time(end) / 1e3 / 20
    before = real()
    try:
        subprocess.run([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, timeout=0.5)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9)"]).wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        told["limit"] = real() - before
    told["hours off"] = abs(time.time() - datetime.datetime.now().timestamp()) / 3600
    told["since import"] = time.time() - begun
os.write(1, (json.dumps(told) + "\\n").encode())  # in one piece
if ranks > 1:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("options", ["1", "1 --dry", "4 --dry", "1 --timers real"])
def test_tokens_per_second_are_those_of_events(run, tmp_path, options):
    (tmp_path / "train.py").write_text(TRAINS)
    ranks = ["torchrun", "--standalone", "--nproc-per-node=4"] if "4" in options else []
    ended = run("--quiet", "--gpus", *options.split(), *ranks, tmp_path / "train.py")
    assert ended.returncode == 0, ended.stderr
    for told in [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]:
        if "real" in options:  # a busy machine; simulated, it is twice as many and more
            assert told["tokens"] == pytest.approx(5 * 64 / told["real"], rel=0.5)
            assert told["benchmark"] > 2 * told["product"]
            continue
        assert told["tokens"] == pytest.approx(told["by events"], rel=0.01)
        assert told["real"] > 2 * 5 * 64 / told["tokens"] or "--dry" in options
        if "limit" in told:
            assert told["benchmark"] == pytest.approx(told["product"], rel=0.2)
            assert 0.4 < told["limit"] < 60 and told["hours off"] < 0.1 and 0 < told["since import"] < 600


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
    ended = run("--quiet", tmp_path / "loads.py")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"]
