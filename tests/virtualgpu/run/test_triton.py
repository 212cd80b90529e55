"""A kernel of Triton on virtual GPUs is interpreted: right numbers, on its GPU, one kernel of time, no memory."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("numpy") is None:
    pytest.skip("no Triton here, or no NumPy, which its interpreter needs", allow_module_level=True)

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


def test_interpreted(run, tmp_path):
    (tmp_path / "x.py").write_text(KERNELS + RUNS)
    found = run("--quiet", tmp_path / "x.py")
    assert found.returncode == 0, found.stderr
    assert found.stdout == "Pointer argument (at 1) cannot be accessed from Triton (cpu tensor?)\n"


def test_compiled_is_refused_in_a_sentence(run, tmp_path):
    (tmp_path / "x.py").write_text(KERNELS + "add[grid](x, y, x, 1000, BLOCK=256)\n")
    found = run("--quiet", tmp_path / "x.py", environ={"TRITON_INTERPRET": "0"})
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("NotImplementedError: Triton compiles a kernel for a GPU's driver")
    assert "set TRITON_INTERPRET=1 before triton is imported" in found.stderr
