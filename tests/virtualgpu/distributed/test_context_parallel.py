"""PyTorch's context_parallel on virtual GPUs: each rank has a part of the sequence, and keys and values go around the ring."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F


def ring(dtype, causal):
    """The largest differences of output and gradients from attention over the whole sequence, and the shape of a rank's own output."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard

    torch.cuda.set_device(dist.get_rank())
    _cp_options.enable_load_balance = causal
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    *whole, weights = (torch.randn(2, 4, 256, 16, dtype=dtype).cuda() for _ in range(4))
    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    expected = [expected, *torch.autograd.grad(expected, leaves, weights)]
    with context_parallel(mesh, buffers=[*whole, weights], buffer_seq_dims=[2] * 4):
        parts = [tensor.detach().requires_grad_() for tensor in whole]
        out = F.scaled_dot_product_attention(*parts, is_causal=causal)
        results = context_parallel_unshard(mesh, [out.detach(), *torch.autograd.grad(out, parts, weights)], [2] * 4)
    return tuple(out.shape), [float((one - other).abs().max()) for one, other in zip(results, expected, strict=True)]


def both(dtype):
    return [ring(dtype, causal) for causal in (True, False)]


@pytest.mark.parametrize(("like", "dtype", "near"), [("T4", torch.float32, 2e-6), ("A100", torch.bfloat16, 0.04)])
def test_it_is_the_attention_over_the_whole_sequence(on_gpus, like, dtype, near):
    """By the memory-efficient kernel, and by flash: their sums join the parts."""
    for shape, differences in itertools.chain(*on_gpus(both, dtype, like=like)):
        assert shape == (2, 4, 128, 16)
        assert max(differences) < near


def test_where_no_fused_kernel_may_run_it_is_refused(on_gpus):
    """A T4 takes bfloat16 by plain operations, of which context_parallel knows nothing: a part would look at itself alone."""
    with pytest.raises(RuntimeError, match="context_parallel splits the fused kernels"):
        on_gpus(ring, torch.bfloat16, True)
