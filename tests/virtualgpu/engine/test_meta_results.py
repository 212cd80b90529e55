"""A dry run's results lie as those of a run with numbers: storages, types, layouts, bytes and times, forward and backward."""

import pytest
import torch
from torch.nn import functional as F

import virtualgpu
from virtualgpu import _compat

HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
LOSSES = [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy, F.huber_loss, F.l1_loss, F.kl_div]


def described(tensor):
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()


def same(step):
    """The same with numbers and dry; returns it."""
    found = []
    for run in (virtualgpu.gpus, virtualgpu.dry_run):
        with run(1, like="A100"):
            results = [described(tensor) for tensor in step()]
            torch.cuda.synchronize()
            memory = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            found.append((results, memory, virtualgpu.machine().clock.latest()))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("types", [(SINGLE, SINGLE), (HALF, HALF), (SINGLE, HALF), (HALF, SINGLE)])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses(loss, types, reduction):
    def step():
        x, target = (torch.rand(40, 50, device="cuda").to(dtype) for dtype in types)
        value = loss(x.requires_grad_(), target, reduction=reduction)
        if value.requires_grad:
            value.sum().backward()
        return value, x.grad

    refusing = [F.binary_cross_entropy, F.huber_loss]  # huber's backward pass
    if _compat.KEEPS_WORKSPACES:  # before PyTorch 2.15
        refusing.append(F.mse_loss)
    if loss in refusing and types[0] is not types[1]:
        for run in (virtualgpu.gpus, virtualgpu.dry_run):
            with run(1), pytest.raises(RuntimeError, match="Found dtype"):
                step()
        return
    results, _, _ = same(step)
    if loss in LOSSES[:4] and reduction != "none":  # the loss of each number was worked out in its memory
        assert results[0][3] == 2000 * results[0][0].itemsize


NORMS = {
    "frozen": (F.batch_norm, False),
    "training": (F.batch_norm, True),
    "groups": (F.group_norm, None),
}


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("types", [(SINGLE, SINGLE), (HALF, SINGLE), (HALF, HALF), (BRAIN, SINGLE)])
@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind, types, last):
    norm, training = NORMS[kind]
    if training is None and last and _compat.KEEPS_WORKSPACES:
        return  # before PyTorch 2.15 CUDA made such inputs contiguous, as a dry run does; with numbers they stay as on the CPU

    if training is None and types[0] is not types[1]:
        return  # refused: see test_unsupported

    def step():
        x = torch.rand(8, 6, 10, 10, device="cuda").to(types[0])
        x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()
        weight, bias = (torch.ones(6, device="cuda", dtype=types[1], requires_grad=True) for _ in range(2))
        if training is None:
            out = norm(x, 2, weight, bias)
        else:
            running = [torch.ones(6, device="cuda") for _ in range(2)]
            out = norm(x, *running, weight, bias, training)
        out.float().sum().backward()
        return out, x.grad, weight.grad, bias.grad

    if norm is F.batch_norm and types == (HALF, HALF) and not last:  # mixed with running figures: see test_kernels
        return
    same(step)


CONTIGUOUS = {
    "shuffled pixels": lambda x: F.pixel_shuffle(x, 2),
    "pixels shuffled back": lambda x: F.pixel_unshuffle(x, 2),
    "shuffled channels": lambda x: F.channel_shuffle(x, 2),
    "reflected": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicated": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "rolled": lambda x: x.roll(1, 1),
}
AS_THE_INPUT = {
    "padded": lambda x: F.pad(x, (1, 1, 1, 1)),
    "gated": lambda x: F.glu(x, 1),
    "larger": lambda x: F.interpolate(x, scale_factor=2),
    "pooled": lambda x: F.max_pool2d(x, 2),
}


@pytest.mark.parametrize("how", [*CONTIGUOUS, *AS_THE_INPUT])
def test_layouts_are_cudas(how):
    """With numbers, too, whose kernels are the CPU's; the numbers are right."""
    function = (CONTIGUOUS | AS_THE_INPUT)[how]
    picture = torch.arange(2 * 8 * 4 * 4.0).view(2, 8, 4, 4).to(memory_format=torch.channels_last)

    def step():
        x = torch.rand(2, 8, 4, 4, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        out = function(x)
        out.square().sum().backward()
        return out, x.grad

    results = same(step)[0]
    assert (results[0][2][1] == 1) is (how in AS_THE_INPUT)  # the step from channel to channel
    with virtualgpu.gpus(1):
        assert torch.equal(function(picture.cuda()).cpu(), function(picture))
