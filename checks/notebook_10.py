"""The graders of notebook 10: models that fit on no GPU. Each runs the reader's code in processes of its own, so that an endless loop
ends with them, and no GPU of the notebook is touched."""

import copy
import fnmatch
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checks.grader import grader, launched_on_gpus
from checks.notebook_04 import draw, on_own_gpu

RANKS, STEPS, BATCH = 4, 3, 16
MOST_STATE = 3.0  # bytes of Adam's averages per parameter: 2 on four ranks, and room for uneven shards
MOST_SENT = 1.75  # numbers per parameter and step: 1.5, and room for padding; with an all-reduce it is 2.25


class Trained(NamedTuple):
    """What one rank found. apart: from one process's weights, relative to how far those moved. far: how far it moved, relative to them."""

    weights: torch.Tensor
    apart: float
    far: float
    made: int
    state: float
    sent: float


@grader
def shards_adam(make: Callable) -> str | None:
    """make(model, optimizer_class, **options).step(), on four ranks: the weights of one process's step, whatever the optimizer; a quarter
    of its state on each; and no more sent than by one all-reduce."""
    draws = random.Random(draw())
    seed, rate = draws.randrange(1000), draws.uniform(0.02, 0.06)
    ask = "does every rank call the same collectives, in the same order, with tensors of one size?"
    found: Any = []
    for kind, options in (
        (torch.optim.SGD, {"lr": rate, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": rate / 10}),
    ):
        found = launched_on_gpus(_trained_by, make, kind, options, seed, nprocs=RANKS, timeout=60, ask=ask)
        if isinstance(found, str):
            return found
        if complaint := _as_one_process(kind.__name__, found):
            return complaint
    state, sent = max(rank.state for rank in found), max(rank.sent for rank in found)
    if state > MOST_STATE:
        return f"the right weights, and a rank holds {state:.1f} bytes of Adam's averages per parameter; 2.0 are enough on four"
    if sent > MOST_SENT:
        return f"the right weights and state, but in a step a rank sends {sent:.2f} numbers per parameter; 1.50 are enough: which collective brings a rank the mean of its own shard alone?"
    return None


def _as_one_process(kind: str, found: list[Trained]) -> str | None:
    """Are the weights those of a single process?"""
    if not all(rank.made for rank in found):
        return f"a rank makes no optimizer of the class that it is given ({kind})"
    first = found[0]
    if max(rank.far for rank in found) == 0:
        return "after three steps no weight of the model has changed"
    if not all(torch.equal(first.weights, rank.weights) for rank in found[1:]):
        return f"with {kind} the ranks end with different weights: does each get what the others have updated?"
    if first.apart < 0.01:
        return None
    # in the same direction: a rank's own gradients alone, noisier than the mean, may lead as far
    if abs(first.far / RANKS - 1) < 0.3 and first.apart < first.far - 0.8:
        return f"with {kind} the weights move {first.far:.1f} times as far as in one process: sum, or mean?"
    return f"with {kind} the weights are not those of one process with the whole batch; they differ by {first.apart:.0%} of the way"


class _Odd(nn.Module):
    """Parameters of several shapes, 1,343 in all: four does not divide them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, 37), nn.Tanh(), nn.Linear(37, 23), nn.Tanh(), nn.Linear(23, 2, bias=False)
        )
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.layers(x) * self.scale.mean()


def _trained_by(make: Callable, kind: type, options: dict, seed: int) -> Trained:
    on_own_gpu()
    rank = dist.get_rank()
    torch.manual_seed(seed)
    alone = _Odd()
    model = copy.deepcopy(alone).cuda()
    start = _flat(model)
    batches = [(torch.randn(BATCH, 10), torch.randn(BATCH, 2)) for _ in range(STEPS)]
    made: list[torch.optim.Optimizer] = []

    def noted(*args, **more) -> torch.optim.Optimizer:
        made.append(kind(*args, **more))
        return made[-1]

    def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(net(x), y)

    optimizer, one = make(model, noted, **options), kind(alone.parameters(), **options)
    counted = Sent()
    for x, y in batches:
        one.zero_grad()
        loss(alone, x, y).backward()
        one.step()
        model.zero_grad()
        loss(model, x[rank::RANKS].cuda(), y[rank::RANKS].cuda()).backward()
        with counted:
            optimizer.step()
    weights, goal = _flat(model), _flat(alone)
    way = (goal - start).norm().item()
    held = sum(
        t.nbytes for own in made for s in own.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()
    )
    return Trained(
        weights,
        (weights - goal).norm().item() / way,
        (weights - start).norm().item() / way,
        len(made),
        held / len(start),
        counted.numbers / STEPS / len(start),
    )


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


class Sent(TorchDispatchMode):
    """Counts the numbers that a rank sends by collectives, each as a ring among all ranks would do it."""

    def __init__(self):
        super().__init__()
        self.numbers = 0.0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace in ("c10d", "_c10d_functional"):
            tensors = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)] for arg in args]
            largest = max((sum(t.numel() for t in group) for group in tensors), default=0)
            twice = 2 if "allreduce" in operation._opname.replace("_", "") else 1
            self.numbers += twice * largest * (1 - 1 / dist.get_world_size())
        return operation(*args, **(kwargs or {}))


@grader
def tensor_plan(plan: Mapping, make: Callable[[], nn.Module], timeout: float = 60) -> str | None:
    """The plan cuts make()'s layers (narrow, up, down) over two ranks: the same numbers, half of up and down, one all-reduce."""
    names = [name for name, _ in make().named_children()]
    if not isinstance(plan, Mapping):
        return f"the plan is {plan!r}; a dictionary is wanted: the name of a layer, and how it is cut"
    # as parallelize_module takes them: `u*` is a name
    if unknown := [key for key in plan if not fnmatch.filter(names, str(key))]:
        return f"the plan names {unknown}; the layers are {names}"
    found = launched_on_gpus(_by_plan, plan, make, timeout=timeout, ask="does forward come to an end?")
    if isinstance(found, str):
        return found
    if isinstance(found[0], str):
        return found[0]
    shares, sent, apart = found[0]
    for name, share in shares.items():
        if share > 0.5:
            return f"rank 0 holds {share:.0%} of {name}'s weight; half is wanted"
    if not apart < 1e-4:
        return f"the result differs from the whole layer's by up to {apart:.3f}"
    if sent != {"all_reduce": 1}:
        return f"right numbers, and forward needs {sent or 'no collective'}; one all-reduce is enough"
    return None


def _by_plan(plan: Mapping, make: Callable) -> tuple[dict[str, float], dict[str, int], float] | str:
    """Shares of up and down that this rank holds, collectives of a forward pass, and how far the result is from the whole's; or
    what was raised, which each rank says for itself: which of them is first differs from run to run."""
    logging.disable(logging.ERROR)  # DTensor logs two tracebacks of what is raised here and told
    try:
        return _compared(plan, make)
    except Exception as error:
        return f"with this plan, forward raised {type(error).__name__}: {str(error).splitlines()[0]}"


def _compared(plan: Mapping, make: Callable) -> tuple[dict[str, float], dict[str, int], float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    torch.cuda.set_device(dist.get_rank())
    torch.manual_seed(0)
    layer = make().cuda()
    x = torch.randn(32, layer.narrow.in_features).cuda()
    whole, sizes = layer(x).detach(), {name: getattr(layer, name).weight.numel() for name in ("up", "down")}
    parallelize_module(layer, init_device_mesh("cuda", (2,)), dict(plan))
    with CommDebugMode() as sent:
        result = layer(x)
    if result.shape != whole.shape:
        raise RuntimeError(f"the whole layer gives {tuple(whole.shape)}, the parts {tuple(result.shape)}")
    weights = {name: getattr(layer, name).weight for name in sizes}
    held = {name: getattr(w, "to_local", lambda w=w: w)().numel() / sizes[name] for name, w in weights.items()}
    names = {str(name).split(".")[-1].removesuffix("_"): count for name, count in sent.get_comm_counts().items()}
    return held, {name: count for name, count in names.items() if count}, float((result - whole).detach().abs().max())
