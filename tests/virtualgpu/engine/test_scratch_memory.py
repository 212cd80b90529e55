# ruff: noqa: F403, F405
"""What kernels take for themselves: bytes as one H100 had them (PyTorch 2.11, 2026-11-26), and cuBLAS's workspaces.

Of these: their sizes, who asks for one, who keeps it, and where it shows. Sources: see engine/scratch_memory.py.
"""

import threading

import pytest

from tests.virtualgpu.engine.tools import *
from virtualgpu import _compat
from virtualgpu.run.peaks import Peaks

KIB = 1 << 10
SMALL, LARGE = (2 * 4096 + 8 * 16) * KIB, 32 * MIB
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE TORCH_CUBLAS_WORKSPACE_CACHE TORCH_CUBLASLT_UNIFIED_WORKSPACE"
)

# A call; bytes allocated after it and at its peak; of its backward pass. ? where it was not measured, ± where not to the byte, = as much
MEASURED = {
    "x = rand(4096, 4096, learns=False)": """
        x.sum() | 512 | 3584
        x.sum(1) | 16384 | 16384
        x.sum(0) | 16384 | 134234624
        x.mean(0) | 16384 | 134234624
        x.norm(dim=1) | 16384 | 16384
        x.norm(dim=0) | 16384 | 134234624
        x.max(0) | 49152 | 536920576
        x.argmax() | 512 | 9728
        x.std(0) | 16384 | 536887808
        x.std() | 512 | 9728
        x.aminmax() | 1024 | 6144
        x.any(0) | 4096 | 134222336
        x.isnan().any() | ? | 16779264 ± 1024
        x.count_nonzero() | 512 | 151000576
        x.count_nonzero(0) | 32768 | 419463680
    """,
    "x, y = rand(4096, 4096), rand(4096, 4096, learns=False)": """
        F.huber_loss(x, y) | ? | 67112448
        F.huber_loss(x, y, reduction="sum") | ? | 67112448
        F.huber_loss(x, y, reduction="none") | ? | 67108864
        F.binary_cross_entropy_with_logits(x, y) | ? | 134221312
        F.binary_cross_entropy_with_logits(x, y, reduction="none") | ? | 134217728
        x.softmax(0) | 67108864 | 67108864 | 67108864 | 134217728
        x.T.softmax(-1) | 67108864 | 134217728
        F.logsigmoid(x) | 67108864 | 67108864 | 67108864 | 67108864
    """,
    "x, w = rand(4096, 1024), rand(1024)": "F.rms_norm(x, (1024,), w) | 16793600 | 16793600 | 16764928 | 16781312",
    "x, w = rand(4096, 1024, dtype=HALF), rand(1024, dtype=HALF)": "F.rms_norm(x, (1024,), w) | 8404992 | 8404992 | 8374272 | 8390656",
    "x, w = rand(4096, 1024, dtype=BRAIN), rand(1024, dtype=BRAIN)": "F.rms_norm(x, (1024,), w) | 8404992 | 8404992 | 8374272 | 8390656",
    "x, w, b = rand(2048, 1024), rand(4096, 1024), rand(4096)": "F.linear(x, w, b) | ? | ? | 25182208 | 92291584",
    "i, w = whole(64, 512), rand(32000, 512, dtype=BRAIN)": "F.embedding(i, w) | ? | ? | ? | 107381604 ± 107381",
    "i, w = whole(4, 64), rand(32000, 512, dtype=BRAIN)": "F.embedding(i, w) | ? | ? | ? | 32768000 ± 786432",
    "x = rand(1024, 1024, learns=False)": "x.sort(-1) | 12582912 | 12591104",
    "x = rand(1 << 20, learns=False)": "x.sort() | ? | 33763840 ± 1024",
    "x, w, b = rand(16, 64, 56, 56), rand(64, 64, 3, 3), rand(64)": "F.conv2d(x, w, b, padding=1) | ? | 25838080 | ? | 40895488 ± 408954",
    "x, w, b = (rand(*s, dtype=HALF) for s in ((16, 64, 56, 56), (64, 64, 3, 3), (64,)))": "F.conv2d(x, w, b, padding=1) | ? | 19341824 | ? | 21332992 ± 213329",
    "x, w, b = (rand(*s, dtype=BRAIN) for s in ((16, 64, 56, 56), (64, 64, 3, 3), (64,)))": "F.conv2d(x, w, b, padding=1) | ? | 19341824 | ? | 21332992 ± 213329",
    # one place, one filter for each channel, none that overlap: nothing is laid out anew
    "x, w = rand(16, 64, 56, 56), rand(256, 64, 1, 1)": "F.conv2d(x, w) | ? | =",
    "x, w = rand(16, 64, 56, 56), rand(64, 1, 3, 3)": "F.conv2d(x, w, groups=64) | ? | =",
    "x, w = rand(16, 64, 56, 56), rand(64, 64, 4, 4)": "F.conv2d(x, w, stride=4) | ? | =",
    # cuDNN's: 6 MiB of gradients; of each row, 64 numbers and their sum
    "q, k, v = (rand(4, 8, 512, 64, dtype=HALF) for _ in range(3))": "by_cudnn(q, k, v) | ? | ? | ? | 10551296",
}  # fmt: skip
ROWS = [(setup, *row) for setup, text in MEASURED.items() for row in table(text)]


def by_cudnn(*inputs):
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*inputs)


@pytest.fixture
def h100():
    with virtualgpu.dry_run(1, like="H100"):
        yield


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


def check(found, cells):
    for value, cell in zip(found, cells, strict=False):
        if cell == "=":
            assert value == found[0]
        elif cell != "?":
            size, _, off = cell.partition(" ± ")
            assert value == pytest.approx(int(size), rel=0, abs=int(off or 0))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_bytes_that_an_h100_took(h100, row, monkeypatch):
    setup, call, *cells = row
    if "linear" in call:  # cuBLAS had its own already
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    names: dict = {}
    exec(setup, globals(), names)
    out, forward = used(lambda: eval(call, globals(), names))
    check(forward, cells[:2])
    if cells[2:]:
        check(used_backward(out, [leaf for leaf in names.values() if leaf.requires_grad]), cells[2:])


def test_a_card_with_fewer_processors_has_fewer_parts():
    with virtualgpu.dry_run(1, like="T4"):
        x = rand(4096, 4096, learns=False)
        assert used(x.sum)[1][1] == 512 * 3  # 40 processors with 2 blocks, 4 bytes each, and a counter


def test_an_embedding_bag_sorts_its_indices(h100):
    """As an embedding does, with the places before sorting beside (EmbeddingBag.cu); few of them, too."""
    weight = rand(32000, 512)
    for count in (64 * 512, 16):
        indices, bags = whole(count), torch.arange(0, count, 4, device="cuda")
        _, bag = used_backward(F.embedding_bag(indices, weight, bags, mode="sum"), [weight])
        _, single = used_backward(F.embedding(indices, weight), [weight])
        sums = (-(-count // 10) + count) * 512 * 4
        assert bag >= 32000 * 512 * 4 + sums and (count == 16 or bag - single == pytest.approx(8 * count, abs=1 << 20))


def test_a_full_gpu_convolves_without(h100):
    """cuDNN has kernels that need less memory; no error."""
    layer, x = nn.Conv2d(64, 64, 3, padding=1).cuda(), rand(16, 64, 56, 56)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + x.nbytes + (2 << 20)) / total)
    assert layer(x).shape == x.shape


def test_a_layer_norm_copies_what_does_not_lie_close(h100):
    """A ViT's residual lies as its attention's result does, transposed: five such copies a block in a profile of an H100."""
    x, weight, clock = rand(64, 128, 512), rand(512), virtualgpu.machine().clock
    apart = x.detach().mT.contiguous().mT.requires_grad_()
    seconds, results = [], []
    for tensor in (x, apart):
        before = clock.computing[0]
        out, [held, peak] = used(lambda tensor=tensor: F.layer_norm(tensor, (512,), weight))
        seconds.append(clock.computing[0] - before)
        results.append((peak - held, used_backward(out, [tensor])[1]))
    assert [after - before for before, after in zip(*results, strict=True)] == [x.nbytes] * 2
    assert seconds[1] > seconds[0] + 0.9 * 2 * x.nbytes / 3.35e12


def test_the_gradient_of_ctc_loss_is_copied_for_log_softmax(h100):
    """It lies by steps, as LossCTC.cu makes it, however the scores lie; so the derivative of a log_softmax by sequences copies it first
    (SoftMax.cu). A conformer on an H100, PyTorch 2.11, showed it."""
    x, targets, peaks = rand(16, 400, 1000), whole(16, 40) + 1, []
    for by_steps in (False, True):
        scores = x.transpose(0, 1).contiguous().log_softmax(-1) if by_steps else x.log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, targets, (400,) * 16, (40,) * 16)
        assert torch.autograd.grad(loss, scores, retain_graph=True)[0].is_contiguous()
        peaks.append(used_backward(loss, [scores if by_steps else x])[1])
    gradient, sums = x.nbytes, 16 * 400 * 81 * 4  # sums from the beginning go back after the first, or from the end
    assert peaks == [pytest.approx(size, rel=0.002) for size in (3 * gradient - sums, gradient + sums)]


IN_PLACE = table("""
    x.sort(0)[0]
    x.topk(2)[0]
    x.max(0)[0]
    x.gather(0, torch.tensor([[0, 2, 2]], device=x.device))
    x.index_select(0, torch.tensor([0, 2, 2], device=x.device))
    x.take(torch.tensor([0, 2, 2], device=x.device))
    x.cummax(0)[0]
    x[torch.tensor([0, 2, 2], device=x.device)]
    F.binary_cross_entropy_with_logits(x, torch.ones_like(x))
""")


@pytest.mark.parametrize("call", IN_PLACE)
def test_derivatives_that_write_in_place_make_one_block(gpus, call):
    """As on an H100; with numbers they are the CPU's."""

    def function(x):
        return eval(call, globals(), {"x": x})

    x = torch.arange(16.0).cos().view(4, 4)
    assert all(map(torch.equal, gradients(function, x), gradients(function, x, device="cuda")))
    with virtualgpu.dry_run(1, like="H100"):
        x = rand(1024, 1024)
        out = function(x)
        gradient, before = torch.ones_like(out), torch.cuda.memory_stats()["allocation.large_pool.allocated"]
        _grads = torch.autograd.grad(out, x, gradient)
        assert torch.cuda.memory_stats()["allocation.large_pool.allocated"] - before == 1


# -- cuBLAS's workspaces


def on(like="T4", **options):
    return virtualgpu.gpus(1, like=like, **options)


def size():
    gpu = virtualgpu.machine().gpus[0]
    return gpu.machine.workspaces.size(gpu)


def peak_of(work, *args) -> int:
    """Bytes by which the highest of `work` is above its inputs and its result."""
    torch.cuda.empty_cache()
    _kept, [held, peak] = used(lambda: work(*args))
    return peak - held


@pytest.mark.parametrize("version, blackwell", [("2.11", SMALL), ("2.15", LARGE)])
def test_size_by_card(monkeypatch, version, blackwell):
    as_in(monkeypatch, version)
    sizes = []
    for like in ("P100", "V100", "T4", "A100", "H100", "H200", "B200", "RTX 5090"):
        on(like)
        sizes.append(size())
    assert sizes == [SMALL] * 4 + [LARGE] * 2 + [blackwell] * 2


@pytest.mark.parametrize(
    "text, nbytes",
    [(":4096:8", 32 * MIB), (":4096:2:16:8", SMALL), (":16:8", 128 * KIB), ("x:1:2,:3:4", 14 * KIB), (":0:0", 0)],
)
def test_size_by_variable(monkeypatch, text, nbytes):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", text)
    on("H100")
    a = ones(1000, 1000)
    assert peak_of(torch.mm, a, a) == (nbytes + 511) // 512 * 512 and size() == nbytes


def test_a_variable_that_cannot_be_read(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "4096")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "much")
    on()
    message = "Could not parse CUBLAS_WORKSPACE_CONFIG, using default workspace size of 8519680 bytes"
    with pytest.warns(UserWarning, match=message):
        assert size() == SMALL
    with pytest.warns(UserWarning, match="invalid CUBLASLT_WORKSPACE_SIZE, using default workspace size of 1024 KiB"):
        nn.Linear(8, 8, device="cuda")(ones(2, 8))


def inputs():
    a = ones(512, 512)
    return a, a[0].clone(), a[None].clone()


WHO_ASKS = table("""
    a @ a | SMALL
    torch.bmm(b, b) | SMALL
    torch.baddbmm(b, b, b) | SMALL
    a @ v | SMALL
    v @ v | SMALL
    torch.linalg.solve_triangular(a, a, upper=True) | SMALL
    F.linear(a, a, v) | MIB
    F.linear(a, a) | SMALL
    torch.addmm(a, a, a) | SMALL
    torch.addmm(v, a, a, beta=0.5) | SMALL
    F.linear(a[:1], a, v) | SMALL
    torch._int_mm(a.char(), a.char()) | 2 * 512 * 512
    F.conv1d(b, b.mT[:, :, :1]) | 0
    a + a | 0
""")


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("call, nbytes", WHO_ASKS)
def test_who_asks(call, nbytes, dry):
    on()
    virtualgpu.machine().be_dry(dry)
    names = dict(zip("avb", inputs(), strict=True))
    assert peak_of(lambda: eval(call, globals(), names)) == eval(nbytes)


def test_no_product_no_workspace():
    on()
    sparse = torch.eye(64).to_sparse().cuda()
    assert peak_of(torch.mm, sparse, ones(64, 64)) < MIB  # cuSPARSE's is not known
    assert peak_of(torch.mm, ones(0, 64), ones(64, 64)) == 0
    on(memory="256 MiB")  # a very small GPU
    assert peak_of(torch.mm, ones(64, 64), ones(64, 64)) == 0


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
    a = ones(64, 64)
    peaks = Peaks(virtualgpu.machine())
    torch.cuda.memory._record_memory_history()
    b = a @ a
    assert torch.cuda.memory_allocated() == a.nbytes + b.nbytes
    assert torch.cuda.max_memory_allocated() == a.nbytes + b.nbytes + SMALL
    assert torch.cuda.memory_reserved() == (2 + 20) * MIB  # a block of that size comes from a segment of 20 MiB
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    (peak,) = peaks.peaks()
    peaks.close()
    assert [block.bytes for block in peak.blocks if block.kind == "cuBLAS workspaces"] == [SMALL]
    mine = [event for event in trace if event["size"] == SMALL]
    assert [event["action"] for event in mine] == ["alloc", "free_requested", "free_completed"]
    assert mine[0]["frames"][0]["name"] == "at::_ops::mm::call"
    assert peak_of(torch.mm, a, a) == SMALL
    counts = torch.cuda.memory_stats()
    assert counts["allocation.large_pool.allocated"] == counts["allocation.large_pool.freed"] == 2


@pytest.mark.parametrize("version", ["2.12", "2.15 with the variable"])
@pytest.mark.parametrize("dry", [False, True])
def test_each_handle_keeps_one(monkeypatch, version, dry):
    as_in(monkeypatch, version[:4])
    if "variable" in version:
        monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    on()
    virtualgpu.machine().be_dry(dry)
    model, x = nn.Linear(64, 64, device="cuda"), ones(64, 64)
    before = torch.cuda.memory_allocated()

    def kept():
        return (torch.cuda.memory_allocated() - before) // SMALL

    model(x), x @ x
    assert kept() == 1  # cuBLAS and cuBLASLt share it
    for _ in range(2):
        model(x).sum().backward()
        torch.cuda.empty_cache()
        assert kept() == 2  # autograd's thread has a handle of its own
    with torch.cuda.stream(torch.cuda.Stream()):
        x @ x
    assert kept() == 3
    for _ in range(3):  # one after the other: the next has the handle of the one before
        thread = threading.Thread(target=lambda: x @ x)
        thread.start()
        thread.join()
    assert kept() == 4
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    assert [block["state"] for block in blocks if block["requested_size"] == SMALL] == ["active_allocated"] * 4
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
    model, x = nn.Linear(64, 64, device="cuda"), ones(64, 64)
    y, [held, _] = used(lambda: model(x))
    assert held - y.nbytes == SMALL + (0 if shared else MIB)


def test_a_small_workspace_limits_the_one_that_is_shared(monkeypatch):
    as_in(monkeypatch, "2.12")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    on()
    with pytest.warns(UserWarning, match="Requested unified CUBLASLT workspace size of 1048576 bytes exceeds"):
        nn.Linear(64, 64, device="cuda")(ones(64, 64))
        gpu = virtualgpu.machine().gpus[0]
        assert gpu.machine.workspaces.lt_size(gpu) == 128 * KIB


def test_a_workspace_of_no_bytes_may_be_kept(monkeypatch):
    as_in(monkeypatch, "2.14")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    on()
    a = ones(64, 64)
    a @ a
    assert torch.cuda.memory_allocated() == a.nbytes
    torch._C._cuda_clearCublasWorkspaces()


def test_what_was_freed_before_a_product_makes_room_for_it():
    on()
    a, big = ones(64, 64), torch.empty(3 * SMALL, dtype=BYTE, device="cuda")
    peak = torch.cuda.memory_allocated()
    del big
    a.addmm_(a, a)  # its result needs no memory
    assert torch.cuda.max_memory_allocated() == peak


def test_no_room_for_it():
    on(memory="1 GiB")
    a = ones(64, 64)
    _rest = torch.empty(torch.cuda.mem_get_info()[0] - 4 * MIB, dtype=BYTE, device="cuda")
    assert torch.equal(a + a, 2 * a)
    held = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 20\.00 MiB"):  # the segment that it would come from
        a @ a
    assert torch.cuda.memory_allocated() == held
    F.linear(a, a, a[0])  # 1 MiB is there


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
    a @ a
    before = torch.cuda.memory_allocated()
    blas.cublas_workspace_size(2 * SMALL)
    a @ a
    assert torch.cuda.memory_allocated() - before == SMALL  # the larger one takes its place
