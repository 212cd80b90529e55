"""torch.use_deterministic_algorithms(True) on virtual GPUs: what CUDA has no deterministic kernel of is refused, and nothing else."""

import warnings

import pytest
import torch
from torch.nn import functional as F

import virtualgpu


def learn(function, *sizes):
    """A case: the function of tensors of these sizes, and its backward pass."""

    def run(device):
        leaves = [torch.rand(*size, device=device).requires_grad_() for size in sizes]
        function(*leaves).sum().backward()

    return run


def resized(mode):
    dims = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}[mode]
    kernel = getattr(torch.ops.aten, f"upsample_{mode}{dims}d").default
    return learn(lambda x: kernel(x, [4] * dims, False), (1, 1, *[2] * dims))


def grid(dims):
    return learn(
        lambda x, places: F.grid_sample(x, places, align_corners=False), (1, 1, *[3] * dims), (1, *[2] * dims, dims)
    )


def bags(mode):
    return learn(lambda table: F.embedding_bag(torch.tensor([[0, 1]], device=table.device), table, mode=mode), (3, 2))


def counted(weighted):
    return lambda device: torch.ones(3, dtype=torch.long, device=device).bincount(
        torch.rand(3, device=device) if weighted else None
    )


def put(device):
    torch.zeros(3, device=device).put_(
        torch.tensor([0, 1], device=device), torch.ones(2, device=device), accumulate=True
    )


def scattered(**options):
    """Into one place."""

    def run(device):
        zeros, source = torch.zeros(3, device=device), torch.ones(2, device=device)
        return zeros.scatter(0, torch.zeros(2, dtype=torch.long, device=device), source, **options)

    return run


REFUSED = {
    "avg_pool3d_backward_cuda": learn(lambda x: F.avg_pool3d(x, 2), (1, 1, 4, 4, 4)),
    "adaptive_avg_pool2d_backward_cuda": learn(lambda x: F.adaptive_avg_pool2d(x, 2), (1, 1, 4, 4)),
    "adaptive_avg_pool3d_backward_cuda": learn(lambda x: F.adaptive_avg_pool3d(x, 2), (1, 1, 4, 4, 4)),
    "adaptive_max_pool2d_backward_cuda": learn(lambda x: F.adaptive_max_pool2d(x, 2), (1, 1, 4, 4)),
    "fractional_max_pool2d_backward_cuda": learn(lambda x: F.fractional_max_pool2d(x, 2, output_size=2), (1, 1, 4, 4)),
    "fractional_max_pool3d_backward_cuda": learn(
        lambda x: F.fractional_max_pool3d(x, 2, output_size=2), (1, 1, 4, 4, 4)
    ),
    "reflection_pad1d_backward_out_cuda": learn(lambda x: F.pad(x, (1, 1), "reflect"), (1, 1, 4)),
    "reflection_pad3d_backward_out_cuda": learn(lambda x: F.pad(x, (1,) * 6, "reflect"), (1, 1, 4, 4, 4)),
    **{
        f"upsample_{mode}{dims}d_backward_out_cuda": resized(mode)
        for mode, dims in (("linear", 1), ("bilinear", 2), ("bicubic", 2))
    },
    "upsample_trilinear3d_backward_out_cuda": resized("trilinear"),
    "grid_sampler_2d_backward_cuda": grid(2),
    "grid_sampler_3d_backward_cuda": grid(3),
    "embedding_bag_backward_cuda_max": bags("max"),
    "nll_loss2d_forward_out_cuda_template": lambda device: F.nll_loss(
        torch.rand(1, 2, 3, 3, device=device), torch.zeros(1, 3, 3, dtype=torch.long, device=device)
    ),
    "ctc_loss_backward_gpu": learn(
        lambda x: F.ctc_loss(x.log_softmax(2), torch.ones(1, 1, dtype=torch.long), [4], [1]), (4, 1, 3)
    ),
    "_histc_cuda with floating point input": lambda device: torch.rand(3, device=device).histc(),
    "_bincount_cuda": counted(True),
    "put_": put,
    "scatter_reduce_cuda_kernel": scattered(reduce="add"),
    "median CUDA with indices output": lambda device: torch.rand(3, device=device).median(0),
}
ALLOWED = {
    "bilinear, as nn has it": learn(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (1, 1, 2, 2)),
    "replicate": learn(lambda x: F.pad(x, (1, 1), "replicate"), (1, 1, 4)),
    "means of bags": bags("mean"),
    "scatter": scattered(),
    "without weights": counted(False),
    "one median": lambda device: torch.rand(3, device=device).median(),
    "cross entropy": learn(lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.long, device=x.device)), (2, 3)),
    "max_pool2d": learn(lambda x: F.max_pool2d(x, 2), (1, 1, 4, 4)),
    "a mean of pictures": learn(lambda x: F.adaptive_avg_pool2d(x, 1), (1, 1, 4, 4)),
    "scatter_add": learn(
        lambda x: torch.zeros_like(x).scatter_add(0, torch.zeros(3, dtype=torch.long, device=x.device), x), (3,)
    ),
}


@pytest.fixture(autouse=True)
def no_mode_afterwards():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_a_gpu_alone(gpus, name):
    REFUSED[name]("cuda")
    torch.use_deterministic_algorithms(True)
    REFUSED[name]("cpu")
    with pytest.raises(RuntimeError, match=f"^{name} does not have a deterministic implementation, but you set"):
        REFUSED[name]("cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match=f"^{name} does not have .*warn_only=True"):
        REFUSED[name]("cuda")


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(gpus, name):
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ALLOWED[name]("cuda")


def test_in_a_dry_run():
    torch.use_deterministic_algorithms(True)
    with virtualgpu.dry_run(1), pytest.raises(RuntimeError, match="avg_pool3d_backward_cuda does not have"):
        REFUSED["avg_pool3d_backward_cuda"]("cuda")
