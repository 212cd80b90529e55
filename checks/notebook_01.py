"""The graders of notebook 01: saving, loading and freezing. Each runs the reader's code in processes of its own, so that an
endless loop ends with them."""

import copy
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from checks.grader import alone, grader
from checks.killing import killed_at, needs_fork


@grader
def resumes(pack: Callable, unpack: Callable, timeout: float = 60) -> str | None:
    """Does a training run cut in half by pack(model, optimizer, averaged) and unpack(saved, model, optimizer, averaged)
    end exactly where the uninterrupted one ends? Names the first part that was not brought back.

    It draws from PyTorch and from NumPy's global generator. As in life, the second half is another process, and has what a
    file brings to it."""
    with tempfile.TemporaryDirectory(prefix="graded-") as folder:
        file = Path(folder, "half.pt")
        whole = alone(_first_half, pack, file, timeout=timeout)
        return whole if isinstance(whole, str) else alone(_second_half, unpack, file, *whole, timeout=timeout)


def _first_half(pack: Callable, file: Path) -> tuple[list, torch.Tensor, np.ndarray, list] | str:
    """What pack's answer should bring back, and where the run ends that nobody cuts."""
    whole = _training(0)
    _five_steps(*whole)
    whole[1].param_groups[0]["lr"] = 0.05  # as a schedule does
    packed = pack(*whole)
    torch.save(packed, file)
    if code := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        names = ", ".join(sorted(code))
        if all(name.startswith("numpy") for name in code):
            cure = "an array of NumPy's, as np.random.get_state has one under `key`, goes in as a list (.tolist()), a number of NumPy's by .item()"
            return f"torch.load does not open your file (UnpicklingError, for {names}): {cure}"
        return f"what pack returns has to go through torch.load, which refuses it for {names}: hand over tensors and plain values"
    middle, draw, drawn = copy.deepcopy([_state(part) for part in whole]), torch.get_rng_state(), _numpy_draws()
    _five_steps(*whole)
    return middle, draw, drawn, [_state(part) for part in whole]


def _second_half(
    unpack: Callable, file: Path, middle: list, draw: torch.Tensor, drawn: np.ndarray, end: list
) -> str | None:
    resumed = _training(1)
    unpack(torch.load(file, map_location="cpu", weights_only=True), *resumed)
    for name, part, then in zip(("model", "optimizer", "average"), resumed, middle, strict=True):
        if not _equal(_state(part), then):
            return f"after unpack, the {name} is not what it was when pack was called"
    if not torch.equal(torch.get_rng_state(), draw):
        return "model, optimizer and average are back, but the next random number would be another one: dropout will drop other features"
    if not np.array_equal(_numpy_draws(), drawn):
        return "all of PyTorch's is back, but NumPy's next random number would be another one: the noise will differ"
    _five_steps(*resumed)
    if not _equal([_state(part) for part in resumed], end):
        return "all seemed to be back, yet five steps later the weights differ"
    return None


def _training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    averaged = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averaged


def _five_steps(model, optimizer, averaged) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        noise = torch.from_numpy(np.random.normal(0, 0.1, (16, 8))).float()
        model(torch.randn(16, 8) + noise).pow(2).mean().backward()
        optimizer.step()
        for name, tensor in model.state_dict().items():
            averaged[name].mul_(0.9).add_(tensor, alpha=0.1)


def _numpy_draws() -> np.ndarray:
    """What NumPy's global generator would draw next; it draws nothing."""
    ahead = np.random.RandomState()
    ahead.set_state(np.random.get_state())
    return ahead.normal(size=3)


@grader
def survives(save: Callable, timeout: float = 60) -> str | None:
    """save(state, path) over an earlier file: killed at any moment, it leaves a whole checkpoint under the name, the earlier or the new
    one; undisturbed, the new one and nothing beside it."""
    needs_fork()
    with tempfile.TemporaryDirectory(prefix="graded-") as folder:
        return alone(_survives, save, Path(folder) / "run" / "a.pt", timeout=timeout)


def _survives(save: Callable, path: Path) -> str | None:
    moment, doing = 1, "begins"  # type: int, str | None
    while doing:
        shutil.rmtree(path.parent, ignore_errors=True)  # with what the one before left there, be it folders
        path.parent.mkdir()
        torch.save({"epoch": 1, "weight": torch.zeros(1000)}, path)
        doing, complaint = killed_at(moment, save, {"epoch": 2, "weight": torch.ones(1000)}, path)
        if complaint:
            return complaint
        when = f"killed {doing}" if doing else "after an undisturbed save"
        try:
            epoch = torch.load(path)["epoch"]
        except FileNotFoundError:
            return f"{when}, there is no file of that name any more"
        except Exception:
            return f"{when}, the earlier checkpoint is gone, and the new one is not whole"
        moment += 1
    if epoch != 2:
        return "after an undisturbed save, the file still holds the earlier state"
    left = sorted(other.name for other in path.parent.iterdir() if other != path)
    return f"after an undisturbed save, {', '.join(left)} is left behind" if left else None


def _state(part):
    return part if isinstance(part, dict) else part.state_dict()


@grader
def frozen(
    make: Callable[[], nn.Module],
    whole: Callable[[], nn.Module],
    part: str,
    shape: tuple = (1, 8, 8),
    timeout: float = 60,
) -> str | None:
    """Two epochs of training make()'s model on images of this shape, each begun by model.train(): `part` ("backbone[:8]") must stay
    as whole() has it, and everything else must move."""
    return alone(_frozen, make, whole, part, shape, timeout=timeout)


def _frozen(make: Callable, whole: Callable, part: str, shape: tuple) -> str | None:
    name, end = part.removesuffix("]").split("[:")
    still = tuple(f"{name}.{i}." for i in range(int(end)))
    torch.manual_seed(0)
    model, start = make(), copy.deepcopy(whole().state_dict())
    if not isinstance(model, nn.Module):
        return f"your answer returns {model!r}; a model is wanted"
    first = model.state_dict()
    changed = [key for key in start if key.startswith(still) and not torch.equal(first[key], start[key])]
    if changed:
        return f"{len(changed)} tensors of {part} are not the trained ones from the start, {changed[0]} first"
    before = copy.deepcopy(first)
    if complaint := _two_epochs(model, shape):
        return complaint
    moved = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    wrong = [key for key in before if key.startswith(still) and key in moved]
    learned = [key for key in wrong if key in dict(model.named_parameters())]
    if learned:
        return f"{len(learned)} frozen parameters moved, {learned[0]} first"
    if wrong:
        return (
            f"no frozen parameter moved, but {len(wrong)} BatchNorm buffers did, {wrong[0]} first: "
            "in which mode is that layer after model.train()?"
        )
    stuck = [key for key in before if not key.startswith(still) and key not in moved]
    if stuck:
        return f"too much is frozen: {stuck[0]} should have moved and did not"
    for name in ("train", "eval"):  # in that order: the mode after the last one is looked at
        if (got := getattr(model, name)()) is not model:
            what = "None" if got is None else f"a {type(got).__name__}"
            return f"model.{name}() returns {what}, and not the model, which model.{name}()(x) needs: end `train` with `return self`"
    awake = [name or "the model" for name, module in model.named_modules() if module.training]
    if awake:
        return f"after model.eval(), which is model.train(False), {awake[0]} is still in training mode: hand `mode` on"
    return None


def _two_epochs(model: nn.Module, shape: tuple) -> str | None:
    """Each as a training loop begins it: with model.train()."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return "no parameter is left to train: requires_grad is False everywhere"
    optimizer = torch.optim.SGD(trained, lr=0.1, weight_decay=0.01)  # moves what has a gradient, be it zero
    for _ in range(2):
        model.train()
        x = torch.rand(16, *shape).to(trained[0].device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(16, device=x.device) % 10).backward()
        optimizer.step()
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
