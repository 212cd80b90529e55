"""Memory: judged by the CPU allocator's own events, which know nothing of virtual GPUs."""

import pytest
import torch
from torch import _VF, nn
from torch.profiler import ProfilerActivity, profile, record_function

import virtualgpu
from tests.virtualgpu.programs import Translator
from virtualgpu.engine import dispatch

torchvision = pytest.importorskip("torchvision")


def vision(name, **options):
    return lambda: (
        getattr(torchvision.models, name)(num_classes=10, **options),
        torch.randn(4, 3, 64, 64),
        torch.arange(4),
    )


def mlp():
    return (
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10)),
        torch.randn(32, 64),
        torch.arange(32) % 10,
    )


def vgg():
    model, x, y = vision("vgg11_bn")()
    model.classifier = nn.Linear(512 * 49, 10)  # its own has 120 million weights
    return model, x, y


def tokens(model):
    return lambda: (model(), torch.arange(96).view(8, 12) % 20, torch.arange(96).view(8, 12) % 5)


MODELS = {
    "mlp": mlp,
    **{name: vision(name) for name in ("resnet18", "resnet50", "densenet121", "shufflenet_v2_x0_5", "efficientnet_b0")},
    **{name: vision(name, dropout=0.0) for name in ("mobilenet_v2", "squeezenet1_1", "mnasnet0_5")},
    "vgg11": vgg,
    "vit": lambda: (
        torchvision.models.VisionTransformer(64, 16, 2, 2, 64, 128, num_classes=10),
        torch.randn(4, 3, 64, 64),
        torch.arange(4),
    ),
    "transformer": tokens(Translator),
}


def steps(model, x, y):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return optimizer, loss


def dropout_of_cuda(x, p, train):
    """One kernel, with a mask of one byte an element."""
    return torch.native_dropout(x, p, train)[0]


class AttentionOfCuda(torch.autograd.Function):
    """One kernel each way, which keeps what went in, its result and a sum for each row, rounded up to 32; its result lies by tokens."""

    @staticmethod
    def forward(ctx, query, key, value, bias, p, causal):
        with record_function("aten::_scaled_dot_product_efficient_attention"):
            batch, heads, length, size = query.shape
            out = (
                torch.empty(batch, length, heads, size).transpose(1, 2).copy_(SDPA(query, key, value, bias, p, causal))
            )
            sums = torch.empty(batch, heads, -(-length // 32) * 32)
            ctx.save_for_backward(query, key, value, bias, out, sums)
            ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, grad):
        with record_function("aten::_scaled_dot_product_efficient_attention_backward"), torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors[:3]]
            return *torch.autograd.grad(SDPA(*leaves, ctx.saved_tensors[3], 0.0, ctx.causal), leaves, grad), *[None] * 3


SDPA = nn.functional.scaled_dot_product_attention


def attention_of_cuda(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    """As a T4 takes it; rows of a mask begin at multiples of 16 numbers."""
    length = key.shape[2]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], length)
        attn_mask = nn.functional.pad(attn_mask, (0, -length % 16))[..., :length]
    return AttentionOfCuda.apply(query, key, value, attn_mask, dropout_p, is_causal)


def judged(operations: set[str], model, x, y) -> tuple[int, int]:
    """Bytes more at the end, and at the largest end of an operation, by the profiler's account of the CPU allocator.

    What a CPU kernel allocates for itself and frees before it returns is no concern of a GPU: only the ends of the outermost
    `operations` count.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = steps(model, x, y)
    events = profiler.profiler.kineto_results.events()
    moments = [(e.start_ns(), 0, e.nbytes()) for e in events if e.name() == "[memory]"]
    until = 0
    for e in sorted((e for e in events if e.name() in operations), key=lambda e: (e.start_ns(), -e.duration_ns())):
        if e.start_ns() >= until:  # not inside another one
            until = e.start_ns() + e.duration_ns()
            moments.append((until, 1, 0))
    live = peak = 0
    for _, ends, nbytes in sorted(moments):
        live += nbytes
        peak = max(peak, live) if ends else peak
    del kept
    return live, peak


QUICK = ("mlp", "resnet18", "transformer")  # the others only with the judges


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.judge) for n in MODELS])
def test_live_bytes_are_those_of_the_profiler(name, monkeypatch, without_workspaces):
    monkeypatch.setattr(dispatch, "_operations", {})  # those of this model alone
    with virtualgpu.gpus(1):
        torch.manual_seed(0)
        model, x, y = MODELS[name]()
        model, x, y = model.to("cuda"), x.to("cuda"), y.to("cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        kept = steps(model, x, y)
        stats = torch.cuda.memory_stats()
        end, peak = (stats[f"requested_bytes.all.{what}"] - before for what in ("current", "peak"))
        del kept
    torch.manual_seed(0)
    operations = {f"aten::{operation.name}" for operation in dispatch._operations.values() if not operation.is_view}
    monkeypatch.setattr(_VF, "dropout", dropout_of_cuda, raising=False)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention_of_cuda)
    judged_end, judged_peak = judged(operations, *MODELS[name]())
    counters = 4 * len(list(model.parameters()))  # AdamW keeps its step counts on the CPU
    assert end == judged_end - counters
    assert peak == pytest.approx(judged_peak - counters, rel=0.001)
