"""CUDA's own errors on virtual GPUs: an assert inside a kernel, and cuDNN without room. And where a traceback ends."""

import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu

CUDA0 = "cuda:0"


def on_gpu(*values):
    return [value.to(CUDA0) for value in values]


KERNELS = {
    "cross_entropy": lambda: F.cross_entropy(*on_gpu(torch.zeros(2, 3), torch.tensor([0, 3]))),
    "negative label": lambda: F.cross_entropy(*on_gpu(torch.zeros(2, 3), torch.tensor([0, -1]))),
    "embedding": lambda: F.embedding(*on_gpu(torch.tensor([9]), torch.zeros(4, 3))),
    "index": lambda: (lambda x, i: x[i])(*on_gpu(torch.zeros(4, 3), torch.tensor([4]))),
    "index_put": lambda: (lambda x, i, v: x.index_put_((i,), v))(
        *on_gpu(torch.zeros(4), torch.tensor([4]), torch.ones(1))
    ),
    "index_select": lambda: (lambda x, i: x.index_select(0, i))(*on_gpu(torch.zeros(4, 3), torch.tensor([4]))),
    "gather": lambda: (lambda x, i: x.gather(1, i))(*on_gpu(torch.zeros(4, 3), torch.tensor([[3]]))),
    "scatter_": lambda: (lambda x, i: x.scatter_(1, i, 1.0))(*on_gpu(torch.zeros(4, 3), torch.tensor([[3]]))),
    "take": lambda: (lambda x, i: x.take(i))(*on_gpu(torch.zeros(4, 3), torch.tensor([12]))),
    "bernoulli": lambda: torch.bernoulli(*on_gpu(torch.tensor([2.0]))),
    "_assert_async": lambda: (lambda x: (torch._assert_async(x), x)[1])(*on_gpu(torch.tensor(0))),
    "bce": lambda: F.binary_cross_entropy(*on_gpu(torch.tensor([1.5]), torch.tensor([1.0]))),
}
HOST = {
    "a dimension": (lambda x: x.sum(5), IndexError),
    "a single index": (lambda x: x[7], IndexError),
    "shapes": (lambda x: x @ x, RuntimeError),
    "types": (lambda x: F.embedding(x, x), RuntimeError),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_an_assert_does_not_show_at_once_but_at_the_next_synchronization_and_stays(kernel):
    virtualgpu.gpus(2)
    healthy = torch.ones(3, device="cuda:1")
    result = kernel()  # does not raise: the host is ahead
    with pytest.raises(RuntimeError, match=r"^CUDA error: device-side assert triggered\n"):
        result.sum().item()
    for call in (
        lambda: torch.ones(1, device=CUDA0),
        lambda: torch.ones(1).to(CUDA0),
        lambda: result.cpu(),
        lambda: result + result,
        torch.cuda.synchronize,
        torch.cuda.empty_cache,
        torch.cuda.mem_get_info,
    ):
        with pytest.raises(RuntimeError, match="device-side assert"):
            call()
    assert healthy.sum().item() == 3  # the other GPU
    assert torch.cuda.memory_allocated(0) > 0  # PyTorch's own books need no CUDA
    virtualgpu.reset()
    virtualgpu.gpus(2)
    assert torch.ones(2, device=CUDA0).sum().item() == 2


SAID = {
    "cross_entropy": ("Loss.cu", "thread: [1,0,0] Assertion `t >= 0 && t < n_classes` failed."),
    "negative label": ("Loss.cu", "thread: [1,0,0] Assertion `t >= 0 && t < n_classes` failed."),
    "embedding": ("Indexing.cu", "thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed."),
    "index": ("IndexKernel.cu", '`-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.'),
    "gather": ("ScatterGatherKernel.cu", '`idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.'),
    "bce": ("Loss.cu", "`input_val >= zero && input_val <= one` failed."),
    "_assert_async": ("TensorCompare.cu", "`input[0] != 0` failed."),
}


@pytest.mark.parametrize("name", KERNELS)
def test_cuda_prints_the_assertion_once_before_the_error(name, capfd):
    virtualgpu.gpus(1)
    KERNELS[name]()
    assert "Assertion" not in capfd.readouterr().err
    for lines in (1, 0):
        with pytest.raises(RuntimeError, match="device-side assert"):
            torch.cuda.synchronize()
        said = capfd.readouterr().err
        assert said.count("Assertion") == lines
        if lines:
            file, words = SAID.get(name, ("", ""))
            assert said.startswith("/pytorch/aten/src/ATen/native/cuda/" + file) and words in said


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_with_launch_blocking_the_guilty_line_fails(kernel, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    virtualgpu.gpus(1)
    with pytest.raises(RuntimeError, match="device-side assert"):
        kernel()


def test_launch_blocking_is_read_when_cuda_begins(monkeypatch):
    virtualgpu.gpus(1)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(RuntimeError, match="device-side assert"):
        KERNELS["embedding"]()
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    virtualgpu.reset()
    virtualgpu.gpus(1)
    torch.ones(1, device=CUDA0)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # too late
    KERNELS["embedding"]()
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.cuda.synchronize()


def test_the_host_runs_ahead_only_as_far_as_the_gpu_lags():
    """A busy GPU comes late to the bad kernel."""
    virtualgpu.gpus(1)
    big, words, table = (
        torch.zeros(1 << 22, device=CUDA0),
        torch.tensor([9], device=CUDA0),
        torch.zeros(4, 3, device=CUDA0),
    )
    for _ in range(50):
        big.add_(1)
    x = F.embedding(words, table)
    for _ in range(20):
        x = x + 1
    with pytest.raises(RuntimeError, match="device-side assert"):
        x.cpu()


def test_an_assert_in_the_forward_pass_can_surface_in_backward():
    virtualgpu.gpus(1)
    table, words = torch.zeros(4, 3, device=CUDA0, requires_grad=True), torch.tensor([9], device=CUDA0)
    torch.cuda._sleep(170_000)  # keeps the GPU from the bad kernel
    loss = F.embedding(words, table).sum()
    with pytest.raises(RuntimeError, match="device-side assert"):
        loss.backward()


def test_what_is_launched_after_a_bad_kernel_has_ended_fails():
    """As on an H100 (PyTorch 2.11, 2026-11-26), and in the same words."""
    virtualgpu.gpus(1, like="H100")
    scores, labels = on_gpu(torch.zeros(4, 10), torch.tensor([3, 9, 10, 0]))
    F.cross_entropy(scores, labels)
    with pytest.raises(RuntimeError) as found:
        2 * scores
    assert str(found.value) == (
        "CUDA error: device-side assert triggered\n"
        "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    assert found.value.error_code == 710


def test_a_gpu_that_is_not_there_in_the_words_of_an_h100():
    virtualgpu.gpus(1, like="H100")
    with pytest.raises(RuntimeError) as found:
        torch.ones(1, device="cuda:5")
    assert str(found.value) == (
        "CUDA error: invalid device ordinal\n"
        "GPU device may be out of range, do you have enough GPUs?\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    assert found.value.error_code == 101


@pytest.mark.parametrize(("work", "kind"), HOST.values(), ids=HOST)
def test_what_the_host_can_see_is_raised_at_once(work, kind):
    virtualgpu.gpus(1)
    x = torch.zeros(4, 3, device=CUDA0)
    with pytest.raises(kind) as found:
        work(x)
    assert "device-side" not in str(found.value)
    assert x.sum().item() == 0  # and poisons nothing


def test_on_the_cpu_the_kernel_itself_says_what_it_met():
    virtualgpu.gpus(1)
    with pytest.raises(IndexError, match="Target 3 is out of bounds"):
        F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3]))


def test_cudnn_needs_room_beside_the_cache_for_its_first_convolution():
    virtualgpu.gpus(1, memory="64 MB")
    conv, x = nn.Conv2d(1, 2, 3).to(CUDA0), torch.ones(1, 1, 8, 8, device=CUDA0)
    full = torch.empty(torch.cuda.mem_get_info()[0] - (4 << 20), dtype=torch.uint8, device=CUDA0)
    del full
    with pytest.raises(RuntimeError, match=r"^cuDNN error: CUDNN_STATUS_NOT_INITIALIZED$"):
        conv(x)
    with torch.backends.cudnn.flags(enabled=False):
        assert conv(x).shape == (1, 2, 6, 6)
    torch.cuda.empty_cache()
    assert conv(x).shape == (1, 2, 6, 6)
    full = torch.empty(torch.cuda.mem_get_info()[0] - (4 << 20), dtype=torch.uint8, device=CUDA0)
    assert conv(x).shape == (1, 2, 6, 6)  # it has its handle now
    del full


@pytest.mark.parametrize(
    ("line", "below"),
    [
        # a wheel without CUDA has a function of ours where a tensor is made
        (lambda: torch.zeros(1 << 30, device=CUDA0), "__torch_dispatch__" if torch.version.cuda else "function"),
        (lambda: torch.zeros(1 << 24).to(CUDA0), "method"),
        (lambda: torch.ones(1 << 22, device=CUDA0) * torch.ones(1 << 22, device=CUDA0) + 1, "__torch_dispatch__"),
        (lambda: torch.ones(2, device=CUDA0) + torch.ones(2), "__torch_dispatch__"),
    ],
)
def test_a_traceback_ends_one_frame_below_the_readers_line(line, below):
    virtualgpu.gpus(1, memory="40 MB")
    with pytest.raises(RuntimeError) as found:
        line()
    frames = traceback.extract_tb(found.value.__traceback__)
    assert [frame.filename == __file__ for frame in frames] == [True, True, False]
    assert frames[-1].name == below


def test_torchsummary_runs_on_its_default_device(capsys):
    summary = pytest.importorskip("torchsummary").summary
    virtualgpu.gpus(1)
    summary(nn.Sequential(nn.Conv2d(3, 8, 3)).to(CUDA0), (3, 32, 32))
    assert "[-1, 8, 30, 30]" in capsys.readouterr().out


def test_what_the_cpu_has_no_kernel_of_says_so(gpus):
    with pytest.raises(NotImplementedError, match="aten::_cslt_compress runs on GPUs alone"):
        torch._cslt_compress(torch.ones(32, 32, dtype=torch.float16, device="cuda"))


def test_record_stream_of_the_cpus_tensor():
    virtualgpu.gpus(1)
    with pytest.raises(
        NotImplementedError, match=r"^Could not run 'aten::record_stream' with arguments from the 'CPU' backend"
    ):
        torch.ones(1).record_stream(torch.cuda.Stream())
