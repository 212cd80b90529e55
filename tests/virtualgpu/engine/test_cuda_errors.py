# ruff: noqa: F403, F405
"""CUDA's own errors on virtual GPUs: an assert inside a kernel, and cuDNN without room. And where a traceback ends."""

import traceback

import pytest

from tests.virtualgpu.engine.tools import *

ASSERTS = r"^CUDA error: device-side assert triggered\n"
LOST = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
LOST += "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
# A call whose kernel asserts; the file and the words that CUDA prints
KERNELS = table("""
    F.cross_entropy(gpu(torch.zeros(2, 3)), gpu([0, 3])) | Loss.cu | thread: [1,0,0] Assertion `t >= 0 && t < n_classes` failed.
    F.cross_entropy(gpu(torch.zeros(2, 3)), gpu([0, -1])) | Loss.cu | thread: [1,0,0] Assertion `t >= 0 && t < n_classes` failed.
    F.embedding(gpu([9]), gpu(torch.zeros(4, 3))) | Indexing.cu | thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.
    gpu(torch.zeros(4, 3))[gpu([4])] | IndexKernel.cu | `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.
    gpu(torch.zeros(4)).index_put_((gpu([4]),), gpu(torch.ones(1))) | IndexKernel.cu | Assertion
    gpu(torch.zeros(4, 3)).index_select(0, gpu([4])) | Indexing.cu | Assertion
    gpu(torch.zeros(4, 3)).gather(1, gpu([[3]])) | ScatterGatherKernel.cu | `idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.
    gpu(torch.zeros(4, 3)).scatter_(1, gpu([[3]]), 1.0) | ScatterGatherKernel.cu | Assertion
    gpu(torch.zeros(4, 3)).take(gpu([12])) | IndexKernel.cu | Assertion
    torch.bernoulli(gpu([2.0])) | Distr | Assertion
    asserted(gpu(0)) | TensorCompare.cu | `input[0] != 0` failed.
    F.binary_cross_entropy(gpu([1.5]), gpu([1.0])) | Loss.cu | `input_val >= zero && input_val <= one` failed.
""")
IDS = [call for call, *_ in KERNELS]
EMBEDDING = IDS[2]


def gpu(values):
    return torch.as_tensor(values).to("cuda:0")


def asserted(x):
    torch._assert_async(x)
    return x


@pytest.mark.parametrize("call", IDS)
def test_an_assert_does_not_show_at_once_but_at_the_next_synchronization_and_stays(call, monkeypatch):
    virtualgpu.gpus(2)
    healthy = torch.ones(3, device="cuda:1")
    result = eval(call)  # does not raise: the host is ahead
    for later in (
        lambda: result.sum().item(),
        lambda: torch.ones(1, device="cuda:0"),
        lambda: torch.ones(1).to("cuda:0"),
        result.cpu,
        lambda: result + result,
        torch.cuda.synchronize,
        torch.cuda.empty_cache,
        torch.cuda.mem_get_info,
    ):
        with pytest.raises(RuntimeError, match=ASSERTS):
            later()
    assert healthy.sum().item() == 3 and torch.cuda.memory_allocated(0) > 0  # PyTorch's own books need no CUDA
    virtualgpu.reset()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # the guilty line fails
    virtualgpu.gpus(1)
    assert torch.ones(2, device="cuda:0").sum().item() == 2
    with pytest.raises(RuntimeError, match=ASSERTS):
        eval(call)


@pytest.mark.parametrize("row", KERNELS, ids=IDS)
def test_cuda_prints_the_assertion_once_before_the_error(row, capfd):
    call, file, message = row
    virtualgpu.gpus(1)
    eval(call)
    assert "Assertion" not in capfd.readouterr().err
    for lines in (1, 0):
        with pytest.raises(RuntimeError, match=ASSERTS):
            torch.cuda.synchronize()
        printed = capfd.readouterr().err
        assert printed.count("Assertion") == lines
        if lines:
            assert printed.startswith(f"/pytorch/aten/src/ATen/native/cuda/{file}") and message in printed


def test_launch_blocking_is_read_when_cuda_begins(monkeypatch):
    virtualgpu.gpus(1)
    torch.ones(1, device="cuda:0")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # too late
    eval(EMBEDDING)
    with pytest.raises(RuntimeError, match=ASSERTS):
        torch.cuda.synchronize()


def test_the_host_runs_ahead_only_as_far_as_the_gpu_lags(gpus):
    """A busy GPU comes late to the bad kernel, which can surface in backward."""
    table, tokens = torch.zeros(4, 3, device="cuda:0", requires_grad=True), gpu([9])
    torch.cuda._sleep(170_000)
    loss = F.embedding(tokens, table).sum()
    with pytest.raises(RuntimeError, match=ASSERTS):
        loss.backward()


def test_in_the_words_and_at_the_call_of_an_h100():
    virtualgpu.gpus(1, like="H100")
    F.cross_entropy(gpu(torch.zeros(4, 10)), gpu([3, 9, 10, 0]))
    scores = torch.zeros(4, 10)
    where = "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
    for call, error, code in (
        (lambda: 2 * gpu(scores), f"CUDA error: device-side assert triggered\n{where}", 710),
        (lambda: torch.ones(1, device="cuda:5"), "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?", 101),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as found:
            call()
        assert str(found.value) == error + LOST and found.value.error_code == code


@pytest.mark.parametrize("call", ["x.sum(5)", "x[7]", "x @ x", "F.embedding(x, x)"])
def test_what_the_host_can_see_is_raised_at_once(gpus, call):
    x = torch.zeros(4, 3, device="cuda:0")
    with pytest.raises((IndexError, RuntimeError)) as found:
        eval(call)
    assert "device-side" not in str(found.value) and x.sum().item() == 0  # and poisons nothing


def test_on_the_cpu_the_kernel_itself_says_what_it_met(gpus):
    with pytest.raises(IndexError, match="Target 3 is out of bounds"):
        F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3]))
    with pytest.raises(NotImplementedError, match="aten::_cslt_compress runs on GPUs alone"):
        torch._cslt_compress(halves(32, 32))


def test_cudnn_needs_room_beside_the_cache_for_its_first_convolution():
    virtualgpu.gpus(1, memory="64 MB")
    conv, x = nn.Conv2d(1, 2, 3).cuda(), ones(1, 1, 8, 8)

    def fill():
        return torch.empty(torch.cuda.mem_get_info()[0] - (4 << 20), dtype=torch.uint8, device="cuda")

    fill()
    with pytest.raises(RuntimeError, match=r"^cuDNN error: CUDNN_STATUS_NOT_INITIALIZED$"):
        conv(x)
    with torch.backends.cudnn.flags(enabled=False):
        assert conv(x).shape == (1, 2, 6, 6)
    torch.cuda.empty_cache()
    assert conv(x).shape == (1, 2, 6, 6)
    _full = fill()
    assert conv(x).shape == (1, 2, 6, 6)  # it has its handle now


@pytest.mark.parametrize(
    ("line", "below"),
    [
        # a wheel without CUDA has a function of ours where a tensor is made
        (lambda: torch.zeros(1 << 30, device="cuda"), "__torch_dispatch__" if torch.version.cuda else "function"),
        (lambda: torch.zeros(1 << 24).to("cuda"), "method"),
        (lambda: ones(1 << 22) * ones(1 << 22) + 1, "__torch_dispatch__"),
        (lambda: ones(2) + torch.ones(2), "__torch_dispatch__"),
    ],
)
def test_a_traceback_ends_one_frame_below_the_readers_line(line, below):
    virtualgpu.gpus(1, memory="40 MB")
    with pytest.raises(RuntimeError) as found:
        line()
    frames = [frame for frame in traceback.extract_tb(found.value.__traceback__) if "tools.py" not in frame.filename]
    assert [frame.filename == __file__ for frame in frames] == [True, True, False]
    assert frames[-1].name == below
