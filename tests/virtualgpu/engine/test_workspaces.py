"""cuBLAS's workspaces: their sizes, who asks for one, who keeps it, and where it shows. Sources: see engine/scratch_memory.py."""

import threading

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu import _compat
from virtualgpu.run.peaks import Peaks

KIB, MIB = 1 << 10, 1 << 20
SMALL, LARGE = (2 * 4096 + 8 * 16) * KIB, 32 * MIB
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE TORCH_CUBLAS_WORKSPACE_CACHE TORCH_CUBLASLT_UNIFIED_WORKSPACE"
)


@pytest.fixture(autouse=True)
def as_by_default(monkeypatch):
    for name in (*VARIABLES.split(), "DISABLE_ADDMM_CUDA_LT"):
        monkeypatch.delenv(name, raising=False)
    as_in(monkeypatch, "2.15")


def as_in(monkeypatch, version):
    """What PyTorch's C++ does in this version, whichever is installed."""
    monkeypatch.setattr(_compat, "KEEPS_WORKSPACES", version < "2.15")
    monkeypatch.setattr(_compat, "LT_HAS_ITS_OWN", version < "2.12")
    monkeypatch.setattr(_compat, "LARGE_WORKSPACES", (9,) if version < "2.12" else (9, 10, 11, 12))


def on(like="T4", **options):
    return virtualgpu.gpus(1, like=like, **options)


def size():
    gpu = virtualgpu.machine().gpus[0]
    return gpu.machine.workspaces.size(gpu)


def peak_of(work, *args) -> int:
    """Bytes by which the highest of `work` is above its inputs and its result."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kept = work(*args)
    assert kept is not None
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    "version, old, hopper, blackwell", [("2.11", *[SMALL, LARGE, SMALL]), ("2.15", SMALL, LARGE, LARGE)]
)
def test_size_by_card(monkeypatch, version, old, hopper, blackwell):
    as_in(monkeypatch, version)
    sizes = {}
    for like in ("P100", "V100", "T4", "A100", "H100", "H200", "B200", "RTX 5090"):
        on(like)
        sizes[like] = size()
    assert list(sizes.values()) == [old] * 4 + [hopper] * 2 + [blackwell] * 2


@pytest.mark.parametrize(
    "text, nbytes",
    [(":4096:8", 32 * MIB), (":4096:2:16:8", SMALL), (":16:8", 128 * KIB), ("x:1:2,:3:4", 14 * KIB), (":0:0", 0)],
)
def test_size_by_variable(monkeypatch, text, nbytes):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", text)
    on("H100")
    a = torch.ones(1000, 1000, device="cuda")
    assert peak_of(torch.mm, a, a) == (nbytes + 511) // 512 * 512 and size() == nbytes


def test_a_variable_that_cannot_be_read(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "4096")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "much")
    on()
    with pytest.warns(
        UserWarning, match="Could not parse CUBLAS_WORKSPACE_CONFIG, using default workspace size of 8519680 bytes"
    ):
        assert size() == SMALL
    with pytest.warns(UserWarning, match="invalid CUBLASLT_WORKSPACE_SIZE, using default workspace size of 1024 KiB"):
        nn.Linear(8, 8, device="cuda")(torch.ones(2, 8, device="cuda"))


def inputs(dtype=torch.float32):
    a = torch.ones(512, 512, device="cuda", dtype=dtype)
    return a, a[0].clone(), a[None].clone()


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(
    "name, work, nbytes",
    [
        ("mm", lambda a, v, b: a @ a, SMALL),
        ("bmm", lambda a, v, b: torch.bmm(b, b), SMALL),
        ("baddbmm", lambda a, v, b: torch.baddbmm(b, b, b), SMALL),
        ("mv", lambda a, v, b: a @ v, SMALL),
        ("dot", lambda a, v, b: v @ v, SMALL),
        ("a triangular solve", lambda a, v, b: torch.linalg.solve_triangular(a, a, upper=True), SMALL),
        ("linear with a bias", lambda a, v, b: nn.functional.linear(a, a, v), MIB),
        ("linear without", lambda a, v, b: nn.functional.linear(a, a), SMALL),
        ("addmm of a matrix", lambda a, v, b: torch.addmm(a, a, a), SMALL),
        ("addmm, half of the bias", lambda a, v, b: torch.addmm(v, a, a, beta=0.5), SMALL),
        ("linear of one row", lambda a, v, b: nn.functional.linear(a[:1], a, v), SMALL),
        ("an int8 product", lambda a, v, b: torch._int_mm(a.char(), a.char()), 2 * 512 * 512),  # its inputs
        ("a convolution", lambda a, v, b: nn.functional.conv1d(b, b.mT[:, :, :1]), 0),
        ("an addition", lambda a, v, b: a + a, 0),
    ],
)
def test_who_asks(name, work, nbytes, dry):
    on()
    virtualgpu.machine().be_dry(dry)
    assert peak_of(work, *inputs()) == nbytes


def test_no_product_no_workspace():
    on()
    sparse = torch.eye(64).to_sparse().cuda()
    assert peak_of(torch.mm, sparse, torch.ones(64, 64, device="cuda")) < MIB  # cuSPARSE's is not known
    assert peak_of(torch.mm, torch.ones(0, 64, device="cuda"), torch.ones(64, 64, device="cuda")) == 0


def test_the_other_library(monkeypatch):
    monkeypatch.setenv("DISABLE_ADDMM_CUDA_LT", "1")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    on()
    a, v, _ = inputs()
    assert peak_of(torch.addmm, v, a, a) == SMALL
    before = torch.backends.cuda.preferred_blas_library()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        assert peak_of(torch.mm, a, a) == 2 * MIB
    finally:
        torch.backends.cuda.preferred_blas_library(before)
    assert peak_of(torch.mm, a, a) == SMALL


def test_a_call_gives_its_own_back():
    on()
    a = torch.ones(64, 64, device="cuda")
    torch.cuda.memory._record_memory_history()
    b = a @ a
    assert torch.cuda.memory_allocated() == a.nbytes + b.nbytes
    assert torch.cuda.max_memory_allocated() == a.nbytes + b.nbytes + SMALL
    assert torch.cuda.memory_reserved() == (2 + 20) * MIB  # a block of that size comes from a segment of 20 MiB
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    mine = [event for event in trace if event["size"] == SMALL]
    assert [event["action"] for event in mine] == ["alloc", "free_requested", "free_completed"]
    assert mine[0]["frames"][0]["name"] == "at::_ops::mm::call"
    assert peak_of(torch.mm, a, a) == SMALL
    figures = torch.cuda.memory_stats()
    assert figures["allocation.large_pool.allocated"] == figures["allocation.large_pool.freed"] == 2


@pytest.mark.parametrize("version", ["2.12", "2.15 with the variable"])
@pytest.mark.parametrize("dry", [False, True])
def test_each_handle_keeps_one(monkeypatch, version, dry):
    as_in(monkeypatch, version[:4])
    if version > "2.15":
        as_in(monkeypatch, "2.15")
        monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    on()
    virtualgpu.machine().be_dry(dry)
    model, x = nn.Linear(64, 64, device="cuda"), torch.ones(64, 64, device="cuda")
    own = torch.cuda.memory_allocated()

    def kept():
        return (torch.cuda.memory_allocated() - own) // SMALL

    model(x), x @ x
    assert kept() == 1  # cuBLAS and cuBLASLt share it
    model(x).sum().backward()
    assert kept() == 2  # autograd's thread has a handle of its own
    model(x).sum().backward()
    torch.cuda.empty_cache()
    assert kept() == 2
    with torch.cuda.stream(torch.cuda.Stream()):
        x @ x
    assert kept() == 3
    for _ in range(3):  # one after the other: the next has the handle of the one before
        thread = threading.Thread(target=lambda: x @ x)
        thread.start()
        thread.join()
    assert kept() == 4
    blocks = [
        block for part in torch.cuda.memory_snapshot() for block in part["blocks"] if block["requested_size"] == SMALL
    ]
    assert [block["state"] for block in blocks] == ["active_allocated"] * 4
    torch._C._cuda_clearCublasWorkspaces()
    assert kept() == 0
    torch.cuda.current_blas_handle()
    assert kept() == 1


@pytest.mark.parametrize("shared", ["", "1"])
def test_before_2_12_cublaslt_has_one_beside_it(monkeypatch, shared):
    as_in(monkeypatch, "2.11")
    if shared:
        monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", shared)
    on()
    model, x = nn.Linear(64, 64, device="cuda"), torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    y = model(x)
    assert torch.cuda.memory_allocated() - before - y.nbytes == SMALL + (0 if shared else MIB)


def test_a_small_workspace_limits_the_one_that_is_shared(monkeypatch):
    as_in(monkeypatch, "2.12")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    on()
    with pytest.warns(UserWarning, match="Requested unified CUBLASLT workspace size of 1048576 bytes exceeds"):
        nn.Linear(64, 64, device="cuda")(torch.ones(64, 64, device="cuda"))
        gpu = virtualgpu.machine().gpus[0]
        assert gpu.machine.workspaces.lt_size(gpu) == 128 * KIB


def test_a_workspace_of_no_bytes_may_be_kept(monkeypatch):
    as_in(monkeypatch, "2.14")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    on()
    a = torch.ones(64, 64, device="cuda")
    a @ a
    assert torch.cuda.memory_allocated() == a.nbytes
    torch._C._cuda_clearCublasWorkspaces()


def test_what_was_freed_before_a_product_makes_room_for_it():
    on()
    a, big = torch.ones(64, 64, device="cuda"), torch.empty(3 * SMALL, dtype=torch.uint8, device="cuda")
    peak = torch.cuda.memory_allocated()
    del big
    a.addmm_(a, a)  # its result needs no memory
    assert torch.cuda.max_memory_allocated() == peak


def test_no_room_for_it():
    on(memory="1 GiB")
    a = torch.ones(64, 64, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    _rest = torch.empty(free - 4 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.equal(a + a, 2 * a)
    held = torch.cuda.memory_allocated()
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 20\.00 MiB"
    ):  # the segment that it would come from
        a @ a
    assert torch.cuda.memory_allocated() == held
    nn.functional.linear(a, a, a[0])  # 1 MiB is there


def test_a_very_small_gpu_has_none():
    on(memory="256 MiB")
    a = torch.ones(64, 64, device="cuda")
    assert peak_of(torch.mm, a, a) == 0


@pytest.mark.skipif(not _compat.SETS_WORKSPACES, reason="from PyTorch 2.13 on")
def test_sizes_that_a_program_sets(monkeypatch):
    on()
    a, v, _ = inputs()
    blas = torch.backends.cuda
    assert (blas.cublas_workspace_size(), blas.cublaslt_workspace_size()) == (SMALL, MIB)
    assert blas.cublas_workspace_size(MIB) == MIB and blas.cublaslt_workspace_size(0) == 0
    assert (peak_of(torch.mm, a, a), peak_of(torch.addmm, v, a, a)) == (MIB, 0)
    with pytest.raises(RuntimeError, match="cublas workspace size must be non-negative, got -1"):
        blas.cublas_workspace_size(-1)
    torch._C._cuda_resetCublasWorkspaceSize(), torch._C._cuda_resetCublasLtWorkspaceSize()
    assert (blas.cublas_workspace_size(), blas.cublaslt_workspace_size()) == (SMALL, MIB)
    virtualgpu.reset()
    as_in(monkeypatch, "2.14")
    on()
    a = inputs()[0]
    torch.mm(a, a)
    before = torch.cuda.memory_allocated()
    blas.cublas_workspace_size(2 * SMALL)
    torch.mm(a, a)
    assert torch.cuda.memory_allocated() - before == SMALL  # the larger one takes its place


def test_the_report_has_a_kind_of_its_own():
    on()
    peaks = Peaks(virtualgpu.machine())
    a = torch.ones(64, 64, device="cuda")
    a @ a
    (peak,) = peaks.peaks()
    peaks.close()
    assert [block.bytes for block in peak.blocks if block.kind == "cuBLAS workspaces"] == [SMALL]
