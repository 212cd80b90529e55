"""For the tests of autocast: on with this autocast, PyTorch's own for CUDA on fake tensors to compare with, and models."""

import contextlib
import re

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import virtualgpu
from tests.virtualgpu.torch_api.autocast_samples import SAMPLES
from virtualgpu.torch_api import autocast as face
from virtualgpu.torch_api.autocast import registered
from virtualgpu.torch_api.patches import Patches

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PYTORCHS_OWN = torch.amp.autocast_mode.autocast.__init__


def turn_on(like: str = "A100"):
    """Virtual GPUs with this autocast, whichever the session installs by itself; returns how to turn them off."""
    virtualgpu.gpus(2, like=like)
    torch.amp.autocast_mode.autocast.__init__ = PYTORCHS_OWN
    patches = Patches()
    if face._on.machine is None:
        face.install(virtualgpu.machine(), patches)

    def off():
        patches.restore()
        virtualgpu.reset()

    return off


@contextlib.contextmanager
def autocast_gpus(monkeypatch):
    """For a fixture: `turn_on`, and off again at the end, with autocast as it was; gives how to turn them off before."""
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    torch.manual_seed(0)
    off = turn_on()
    yield off
    off()
    assert not torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is F16


def as_pytorch_does(program, dtype=F16):
    """None where PyTorch asks the driver, which is not there."""
    try:
        with FakeTensorMode():
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", dtype)
            return program()
    except (RuntimeError, AssertionError) as error:
        if not re.search("driver|not linked|not compiled|from the 'CUDA' backend", str(error)):
            raise
        return None
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", F16)


def fake(value):
    def empty(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    return tree_map_only(torch.Tensor, empty, value)


def on(value, device="cuda"):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def cast(value, dtype):
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, value
    )


def arguments(name, dtype):
    torch.manual_seed(0)
    return SAMPLES[name](lambda *shape: torch.rand(shape).to(dtype))


def kinds(value):
    return [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def equal(left, right):
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    return all(a.dtype is b.dtype and torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


class Seen(TorchDispatchMode):
    """The operations that pass, by name, and the dtype of each cast among them."""

    def __init__(self):
        super().__init__()
        self.names, self.casts = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name.removeprefix("aten::"))
        if self.names[-1] == "_to_copy":
            self.casts.append(out.dtype)
        return out


def casts_in(program) -> list:
    with Seen() as seen:
        program()
    return seen.casts


# -- what the tests run


def cases():
    """(name, dtype of what goes in), for what this PyTorch has."""
    return [(name, dtype) for name in SAMPLES if name in registered("AutocastCUDA") for dtype in (F32, F16)]


def convolutions():
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 4),
        nn.GELU(),
    )
    return nn.Sequential(*layers, nn.LogSoftmax(1)), [torch.rand(2, 3, 8, 8)]


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), [torch.rand(2, 5, 8)]


def normalized():
    layers = nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.ConvTranspose1d(4, 4, 3), nn.PReLU(), nn.LayerNorm(8)
    return nn.Sequential(*layers, nn.Softplus(), nn.Linear(8, 2), nn.Dropout()), [torch.rand(2, 4, 8)]


class Functions(nn.Module):
    def forward(self, x):
        logits = torch.einsum("bij,bkj->bik", x, x)
        attended = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
        target = torch.zeros(2, 4, dtype=torch.int64, device=x.device)
        losses = F.cross_entropy(logits, target), F.mse_loss(logits, logits), F.smooth_l1_loss(logits, logits)
        stacked = torch.stack([logits, logits.softmax(-1)])
        return (
            logits,
            attended,
            losses,
            stacked,
            logits + 1,
            logits * x.sum(),
            logits.norm(),
            x.var(),
            logits.sum(),
            x @ x.mT,
        )


def functions():
    return Functions(), [torch.rand(2, 4, 4)]


def cells():
    return nn.ModuleList([nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4)]), [torch.rand(2, 3)]


MODELS = [convolutions, encoder, normalized, functions, cells]


def on_cuda(build):
    with torch.device("cuda"):
        return build()


def dtypes_in(model, inputs):
    """The dtypes that each module gives, in order."""
    found = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, _, out, name=name: found.append((name, kinds(out))))
    for called in model if isinstance(model, nn.ModuleList) else [model]:
        called(*inputs)
    return found
