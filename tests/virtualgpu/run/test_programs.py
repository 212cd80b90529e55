"""GPUs are on before a program's first line, and in whatever it starts."""

import json
import re

PROGRAM = """
import json, os, sys
import torch
import torch.multiprocessing as mp

def rank(index, path):
    x = torch.ones(1 << 20, device=f"cuda:{index}")
    with open(f"{path}.{index}", "w") as file:
        json.dump([torch.cuda.device_count(), torch.cuda.memory_allocated(index), torch.cuda.memory_allocated(1 - index)], file)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return torch.cuda.device_count()

if __name__ == "__main__":
    facts = {"name": __name__, "argv": sys.argv[1:], "path": sys.path[0], "count": torch.cuda.device_count()}
    folder = sys.argv[1]
    os.chdir("/")
    for method, ranks in (("spawn", 1), ("fork", 2)):
        mp.start_processes(rank, (f"{folder}/{method}",), nprocs=ranks, start_method=method)
        facts[method] = [json.load(open(f"{folder}/{method}.{index}")) for index in range(ranks)]
    facts["loader"] = [batch.item() for batch in torch.utils.data.DataLoader(Data(), num_workers=1)]
    facts["names"] = [torch.cuda.get_device_name(index) for index in range(2)]
    facts["total"] = torch.cuda.get_device_properties(1).total_memory
    x = torch.ones(1000, 1000, device="cuda:1")
    x @ x
    print(json.dumps(facts))
"""


def test_gpus_everywhere(run, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    trace = tmp_path / "trace.json"
    options = ("--like", "T4,A100", "--memory", "1GB", "--trace", trace)
    found = run(*options, tmp_path / "program.py", tmp_path, "--gpus", anew=True)
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout)
    assert facts.pop("argv") == [str(tmp_path), "--gpus"] and facts.pop("path") == str(tmp_path)
    rank = [2, 4 << 20, 0]
    assert facts == {
        "name": "__main__",
        "count": 2,
        "spawn": [rank],
        "fork": [rank, rank],
        "loader": [2],
        "names": ["Tesla T4", "NVIDIA A100-SXM4-40GB"],
        "total": 1 << 30,
    }
    title, _, first, second, told = found.stderr.splitlines()[-5:]
    assert title == "virtualgpu: 1 x Tesla T4, 1 x NVIDIA A100-SXM4-40GB, 4 processes"
    assert re.fullmatch(r" *0 +4.00 MiB +20.00 MiB +2 % of 1.00 GiB +\d+ % +\d+ % +\S+ s", first)
    assert re.fullmatch(r" *1 +15.75 MiB +20.00 MiB +2 % of 1.00 GiB +\d+ % +\d+ % +\S+ s", second)
    assert told == f"Trace of 4 processes in {trace}: ui.perfetto.dev opens it."
    events = json.loads(trace.read_text())["traceEvents"]
    assert sorted(event["name"] for event in events if event["ph"] == "X") == ["mm"] + ["ones"] * 4


DRY = """
import torch, torch.multiprocessing as mp
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return torch.ones(50, 50)

def rank():
    print(torch.rand(3, device="cuda").sum().item(), flush=True)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        process = mp.get_context(method).Process(target=rank)
        process.start()
        process.join()
        print([batch.sum().item() for batch in DataLoader(Data(), num_workers=1, multiprocessing_context=method)], flush=True)
"""


def test_all_processes_are_in_a_dry_run_but_those_that_load(run, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(DRY)
    found = run("--dry", "--gpus", "1", path)
    assert found.stdout == "nan\n[2500.0]\n" * 2, found.stderr


def test_visible_devices_are_the_programs(run, tmp_path):
    code = "import torch; print(torch.cuda.device_count(), torch.ones(3, device='cuda').device)"
    found = run("--gpus", "3", "-c", code, environ={"CUDA_VISIBLE_DEVICES": "2"})
    assert found.stdout == "1 cuda:0\n"
    assert [line.split()[:2] for line in found.stderr.splitlines()[-3:]] == [["0", "not"], ["1", "not"], ["2", "512"]]


NO_GPU = """
import io, torch
file = io.BytesIO()
torch.save(torch.ones(2), file)
file.seek(0)
for line in (
    lambda: torch.ones(1, device="cuda"),
    lambda: torch.ones(1).pin_memory(),
    torch.cuda.Stream,
    lambda: torch.Generator("cuda"),
    lambda: torch.load(file, map_location="cuda"),
):
    try:
        line()
    except RuntimeError as error:
        print(str(error).splitlines()[0][:99], getattr(error, "error_code", ""))
print(torch.cuda.is_bf16_supported())
"""


def test_where_no_gpu_is_visible_each_call_says_so_as_on_a_machine_with_an_h100(run):
    found = run("-c", NO_GPU, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert found.stdout.splitlines() == [
        "No CUDA GPUs are available ",
        "No CUDA GPUs are available ",
        "CUDA error: no CUDA-capable device is detected 100",
        "CUDA error: no CUDA-capable device is detected 100",
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you ar ",
        "False",
    ], found.stderr


def test_programs_without_torch_are_left_alone(run, tmp_path):
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text("import sys; sys.hidden = True")
    code = "import sys, sitecustomize as s; print(s.__file__, sys.hidden, 'torch' in sys.modules, 'virtualgpu' in sys.modules, [p for p in sys.path if 'virtualgpu' in p.rpartition('/run')[0]])"
    found = run("-c", code, environ={"PYTHONPATH": str(tmp_path)}, anew=True)
    assert found.stdout == f"{hidden} True False False []\n"
    assert found.stderr == "virtualgpu: 2 x Tesla T4: no process used a GPU\n"


def test_a_missing_script_is_pythons_to_report(run):
    found = run("--quiet", "nowhere.py", anew=True)
    assert found.returncode == 2 and "can't open file" in found.stderr and found.stderr.count("\n") == 1


def test_collections_leave_pytorchs_objects_alone(run):
    """And with an optimizer, which imports Triton, nothing is printed at the end: Triton's bindings are taken apart."""
    code = (
        "import gc, weakref\n"
        "class Thing: pass\n"
        "thing = Thing(); thing.itself = thing; gone = weakref.ref(thing); del thing\n"
        "import torch\n"
        "print(gone() is None, gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "weight = torch.nn.Parameter(torch.ones(2, device='cuda'))\n"
        "weight.sum().backward()\n"
        "torch.optim.SGD([weight], 0.1).step()\n"
    )
    found = run("--quiet", "-c", code, anew=True)
    assert (found.stdout, found.stderr) == ("True True True\n", "")


RESETS = """
import torch

def step():
    return torch.empty(20 << 20, dtype=torch.uint8, device="cuda"), torch.empty(3 << 20, dtype=torch.uint8, device="cuda")

first = torch.empty(24 << 20, dtype=torch.uint8, device="cuda")
del first
step(); step()
torch.cuda.reset_peak_memory_stats()
print(torch.cuda.max_memory_allocated())
"""


def test_the_table_has_the_peak_of_the_whole_run(run, tmp_path):
    """Many programs look at the peak of each step, and reset it; no segment is taken meanwhile."""
    (tmp_path / "resets.py").write_text(RESETS)
    found = run("--gpus", 1, tmp_path / "resets.py")
    assert found.stdout == "0\n" and " 24.00 MiB      24.00 MiB " in found.stderr
