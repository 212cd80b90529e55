"""Programs of any kind under the runner: GPUs are on before their first line and in whatever they start; Triton; names in any letters."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from virtualgpu.run import launcher

ROOT = Path(__file__).resolve().parents[3]
EVERYWHERE = """
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
    (tmp_path / "program.py").write_text(EVERYWHERE)
    trace = tmp_path / "trace.json"
    options = ("--like", "T4,A100", "--memory", "1GB", "--trace", trace)
    ended = run(*options, tmp_path / "program.py", tmp_path, "--gpus", anew=True)
    assert ended.returncode == 0, ended.stderr
    rank = [2, 4 << 20, 0]
    assert json.loads(ended.stdout) == {
        "argv": [str(tmp_path), "--gpus"],
        "path": str(tmp_path),
        "name": "__main__",
        "count": 2,
        "spawn": [rank],
        "fork": [rank, rank],
        "loader": [2],
        "names": ["Tesla T4", "NVIDIA A100-SXM4-40GB"],
        "total": 1 << 30,
    }
    title, _, first, second, sentence = ended.stderr.splitlines()[-5:]
    assert title == "virtualgpu: 1 x Tesla T4, 1 x NVIDIA A100-SXM4-40GB, 4 processes"
    assert re.fullmatch(r" *0 +4.00 MiB +20.00 MiB +2 % of 1.00 GiB +\d+ % +\d+ % +\S+ s", first)
    assert re.fullmatch(r" *1 +15.75 MiB +20.00 MiB +2 % of 1.00 GiB +\d+ % +\d+ % +\S+ s", second)
    assert sentence == f"Trace of 4 processes in {trace}: ui.perfetto.dev opens it."
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
    (tmp_path / "program.py").write_text(DRY)
    ended = run("--dry", "--gpus", "1", tmp_path / "program.py")
    assert ended.stdout == "nan\n[2500.0]\n" * 2, ended.stderr


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
SEES = "import torch; print(torch.cuda.device_count(), torch.ones(3, device='cuda').device)"
ENVIRON = (
    "import os; print(*(os.environ.get(name) for name in ('OMP_WAIT_POLICY', 'OMP_NUM_THREADS', 'TRITON_INTERPRET')))"
)
THREADS = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "3", "TRITON_INTERPRET": "0"}
AS_WITH_AN_H100 = """\
No CUDA GPUs are available\x20
No CUDA GPUs are available\x20
CUDA error: no CUDA-capable device is detected 100
CUDA error: no CUDA-capable device is detected 100
Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you ar\x20
False
"""
COLLECTS = """
import gc, weakref
class Thing: pass
thing = Thing(); thing.itself = thing; gone = weakref.ref(thing); del thing
import torch
print(gone() is None, gc.isenabled(), gc.get_freeze_count() > 100_000)
weight = torch.nn.Parameter(torch.ones(2, device='cuda'))
weight.sum().backward()
torch.optim.SGD([weight], 0.1).step()
"""
OTHERS = """import sys, sitecustomize
ours = [path for path in sys.path if 'virtualgpu' in path.rpartition('/run')[0]]
print(sys.hidden, 'torch' in sys.modules, 'virtualgpu' in sys.modules, ours)"""
TABLE = r"(.*\n)* *0 +not used\n *1 +not used\n *2 +512 bytes.*\n"
NO_FILE = r".*can't open file.*\n"
UNUSED = "virtualgpu: 2 x Tesla T4: no process used a GPU\n"
ONCE = [  # options and program, variables, whether it starts anew; status, output, and a pattern of the rest
    (["--gpus", "3", "-c", SEES], {"CUDA_VISIBLE_DEVICES": "2"}, False, 0, "1 cuda:0\n", TABLE),
    (["--quiet", "-c", NO_GPU], {"CUDA_VISIBLE_DEVICES": ""}, False, 0, AS_WITH_AN_H100, ""),
    (["--quiet", "-c", ENVIRON], {"OMP_NUM_THREADS": "2"}, False, 0, "passive 2 1\n", ""),  # threads that wait sleep
    (["--quiet", "-c", ENVIRON], THREADS, False, 0, "active 3 0\n", ""),  # the user's word goes first
    (["-c", OTHERS], {"PYTHONPATH": "here"}, True, 0, "True False False []\n", UNUSED),  # a sitecustomize of their own
    (["--quiet", "nowhere.py"], {}, True, 2, "", NO_FILE),
    # the collector leaves PyTorch's objects alone; an optimizer imports Triton, whose bindings would print at the end
    (["--quiet", "-c", COLLECTS], {}, True, 0, "True True True\n", ""),
    (["--gpus", "3", "--quiet", "bash", "run.sh", "--dry"], {}, False, 5, "3 cuda:0\n--dry\n", ""),
]


@pytest.mark.parametrize(("words", "environ", "anew", "status", "printed", "errors"), ONCE)
def test_small_programs(run, tmp_path, words, environ, anew, status, printed, errors):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden = True")
    (tmp_path / "run.sh").write_text(f'"{sys.executable}" -c "{SEES}"\necho "$@"\nexit 5\n')
    words = [str(tmp_path / word) if word == "run.sh" else word for word in words]
    environ = {name: str(tmp_path) if value == "here" else value for name, value in environ.items()}
    ended = run(*words, environ=environ, anew=anew)
    assert (ended.returncode, ended.stdout) == (status, printed), ended.stderr
    assert re.fullmatch(errors, ended.stderr), ended.stderr


def test_how_threads_wait_is_left_to_who_has_said_so():
    for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert "OMP_WAIT_POLICY" not in launcher.defaults({name: "1"})


# -- A kernel of Triton is interpreted: right numbers, on its GPU, one kernel of time, no memory

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("numpy") is None,
    reason="no Triton here, or no NumPy, which its interpreter needs",
)
KERNELS = """
import warnings
import torch, triton
import triton.language as tl
import virtualgpu
from virtualgpu.timing.memory_bound import ORDINARY

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def below_largest(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, row - tl.max(row, 0), mask=at < n)

grid = (triton.cdiv(1000, 256),)
x, y = torch.arange(1000.0, device="cuda:1"), torch.ones(1000, device="cuda:1")
"""
RUNS = """
out = torch.empty_like(x)
torch.cuda.reset_peak_memory_stats(1)
before = torch.cuda.memory_allocated(1)
with virtualgpu.recording() as spans, warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    add[grid](x, y, out, 1000, BLOCK=256)
    add[grid](x[:500], y[500:], out, 500, BLOCK=256)
assert out.device == torch.device("cuda:1") and out.tolist() == [float(i + 1) for i in range(1000)]
assert torch.cuda.max_memory_allocated(1) == before and torch.cuda.memory_allocated(0) == 0
assert [(span.name, span.gpu, span.kind) for span in spans] == [("add", 1, "forward")] * 2
gpu = virtualgpu.machine().gpus[1]
assert abs(spans[0].end - spans[0].start - gpu.kernels.moving(12_000, ORDINARY)) < 1e-12
assert ["interpreted" in str(word.message) for word in warned] == [True]

below_largest[(1,)](x[:50], out, 50)
assert out[:50].tolist() == [float(i - 49) for i in range(50)]
on_cpu = torch.zeros(1000)
add[grid](x.cpu(), y.cpu(), on_cpu, 1000, BLOCK=256)
assert torch.equal(on_cpu, x.cpu() + 1)
try:
    add[grid](x, on_cpu, out, 1000, BLOCK=256)
except ValueError as error:
    print(error)
with virtualgpu.dry_run():
    counts = torch.arange(1000, device="cuda")
    begin = virtualgpu.machine().clock.latest()
    assert counts[5].item() == 5
    add[grid](counts, counts, counts, 1000, BLOCK=256)
    assert counts[5].item() == 0 and virtualgpu.machine().clock.latest() > begin  # not known any more
"""


@needs_triton
def test_triton_is_interpreted(run, tmp_path):
    (tmp_path / "x.py").write_text(KERNELS + RUNS)
    ended = run("--quiet", tmp_path / "x.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "Pointer argument (at 1) cannot be accessed from Triton (cpu tensor?)\n"


@needs_triton
def test_triton_that_compiles_is_refused_in_a_sentence(run, tmp_path):
    (tmp_path / "x.py").write_text(KERNELS + "add[grid](x, y, x, 1000, BLOCK=256)\n")
    ended = run("--quiet", tmp_path / "x.py", environ={"TRITON_INTERPRET": "0"})
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("NotImplementedError: Triton compiles a kernel for a GPU's driver")
    assert "set TRITON_INTERPRET=1 before triton is imported" in ended.stderr


# -- Names with spaces and Korean letters, also in a locale that knows ASCII alone

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LETTERS = """
import os, subprocess, torch, virtualgpu
import torch.distributed as dist
from virtualgpu.run.ranks import WorkerError, launch


def 일():
    x = torch.ones(1_000_000, device="cuda")
    dist.all_reduce(x)
    print("안녕", end="")
    return x[0].item(), os.path.dirname(virtualgpu.__file__)


def 기다림():
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), src=0)


if __name__ == "__main__":
    (zero, folder), (one, _) = launch(일)
    try:
        launch(기다림, timeout=1)
    except WorkerError as error:
        print(error.places[0])
    print(zero, one, folder == os.environ["PYTHONPATH"].split(os.pathsep)[-1] + "/virtualgpu")
    torch.ones(1_000_000, device="cuda:1")
    print(len(subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout.splitlines()))
"""


@pytest.mark.parametrize("locale", [{}, ASCII], ids=["utf-8", "ascii"])
def test_names_in_other_letters(clean_environ, tmp_path, locale):
    if locale and not torch.__file__.isascii():
        pytest.skip("PyTorch that is itself in a folder with such a name cannot be imported in that locale")
    folder = tmp_path / "여러 GPU 폴더"
    (folder / "임시 파일").mkdir(parents=True)
    (folder / "virtualgpu").symlink_to(ROOT / "virtualgpu")
    (folder / "내 프로그램.py").write_text(LETTERS, "utf-8")
    (folder / "내 카드.toml").write_text('base = "T4"\nname = "내 카드"\n', "utf-8")
    environ = {**clean_environ, **locale, "PYTHONPATH": str(folder), "TMPDIR": str(folder / "임시 파일")}
    options = ["--like", "내 카드.toml", "--gpus", "2", "--report", "--trace", "추적.json"]
    command = [sys.executable, "-m", "virtualgpu", *options, "내 프로그램.py"]
    ended = subprocess.run(command, env=environ | {"OMP_NUM_THREADS": "1"}, cwd=folder, capture_output=True)
    lines, errors = ended.stdout.decode("utf-8").splitlines(), ended.stderr.decode("utf-8")
    assert ended.returncode == 0, errors
    assert lines[2:] == ["rank 0 is done, and waits for the others", "2.0 2.0 True", "2"]
    assert all(sentence in errors for sentence in ("3 processes", "Trace of 3 processes in ", "of 14.74 GiB"))
    assert "without" not in errors and "Report" not in errors
    trace = json.loads((folder / "추적.json").read_text("utf-8"))
    assert any(event.get("cat") == "communication" for event in trace["traceEvents"])
    if not locale:
        assert lines[:2] == ["[rank 0] 안녕", "[rank 1] 안녕"] and "내 프로그램.py:" in errors
