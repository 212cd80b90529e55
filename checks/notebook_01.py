"""The graders of notebook 01: saving, loading and freezing."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from checks.grader import grader


@grader
def resumes(pack: Callable, unpack: Callable) -> str | None:
    """Does a training cut in half by pack(model, optimizer, averaged) and unpack(saved, model, optimizer, averaged)
    end exactly where the uninterrupted one ends? Names the first part that was not brought back."""

    def fresh(seed: int):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        averaged = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averaged

    def train(model, optimizer, averaged):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).pow(2).mean().backward()
            optimizer.step()
            for name, tensor in model.state_dict().items():
                averaged[name].mul_(0.9).add_(tensor, alpha=0.1)

    whole = fresh(0)
    train(*whole)
    saved = copy.deepcopy(pack(*whole))
    middle = copy.deepcopy([part if isinstance(part, dict) else part.state_dict() for part in whole])
    draw = torch.get_rng_state()
    train(*whole)

    resumed = fresh(1)
    unpack(saved, *resumed)
    for name, part, then in zip(("model", "optimizer", "average"), resumed, middle, strict=True):
        now = part if isinstance(part, dict) else part.state_dict()
        if not _equal(now, then):
            return f"after unpack, the {name} is not what it was when pack was called"
    if not torch.equal(torch.get_rng_state(), draw):
        return "model, optimizer and average are back, but the next random number would be another one: dropout will drop other features"
    train(*resumed)
    if not _equal(resumed[0].state_dict(), whole[0].state_dict()) or not _equal(resumed[2], whole[2]):
        return "all seemed to be back, yet five steps later the weights differ"
    return None


@grader
def loads_what_fits(load_what_fits: Callable, make: Callable[..., nn.Module]) -> str | None:
    """load_what_fits(model, weights) with weights of a wrapped model whose head has 52 classes; make(classes) builds one."""
    torch.manual_seed(0)
    # + 1: equal to no fresh model
    weights = {f"module.{name}": tensor + 1 for name, tensor in make(52).state_dict().items()}
    model = make(10)
    head = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("head.")}
    left_out = load_what_fits(model, dict(weights))
    own = model.state_dict()
    body = [name for name in own if name not in head]
    loaded = sum(torch.equal(own[name], weights[f"module.{name}"]) for name in body)
    if loaded < len(body):
        return f"{loaded} of the {len(body)} tensors that fit hold the file's values. Did the names lose their prefix?"
    if any(not torch.equal(own[name], tensor) for name, tensor in head.items()):
        return "the head was changed; its shape does not fit, so it should stay as it was"
    if sorted(str(name).removeprefix("module.") for name in left_out) != sorted(head):
        return f"all that fits is loaded; now return the names left out: {sorted(head)}, not {sorted(left_out)}"
    return None


@grader
def frozen(model: nn.Module, frozen: str) -> str | None:
    """One training step of `model`; `frozen` ("backbone[:8]") must not move, everything else must."""
    name, end = frozen.removesuffix("]").split("[:")
    still = [f"{name}.{i}." for i in range(int(end))]
    device = next(model.parameters()).device
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    nn.functional.cross_entropy(
        model(torch.rand(16, 1, 8, 8, device=device)), torch.arange(16, device=device) % 10
    ).backward()
    optimizer.step()
    moved = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    wrong = [key for key in before if key.startswith(tuple(still)) and key in moved]
    learned = {key for key, _ in model.named_parameters()}
    if any(key in learned for key in wrong):
        return f"{len([key for key in wrong if key in learned])} frozen parameters moved, {next(k for k in wrong if k in learned)} first"
    if wrong:
        return f"no frozen parameter moved, but {len(wrong)} BatchNorm buffers did, {wrong[0]} first: which mode is that layer in?"
    stuck = [key for key in before if not key.startswith(tuple(still)) and key not in moved]
    if stuck:
        return f"too much is frozen: {stuck[0]} should have moved and did not"
    return None


def _equal(a, b) -> bool:
    """Two nested states (dicts, lists, tensors, plain values), number by number."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b
