"""The graders of notebook 10: models that do not fit on one GPU. Each runs the reader's code in processes of its own, so that an
endless loop ends with them, and no GPU of the notebook is touched."""

import fnmatch
import functools
import logging
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import virtualgpu
from checks.grader import alone, grader, launched_on_gpus

SLOWER = 1.15  # than the best: the clock tells no smaller difference
TIMEOUT = 300.0  # seconds: an endless loop's only end; dry runs of a right answer take a tenth of it


@grader
def tensor_plan(plan: Mapping, make: Callable[[], nn.Module], timeout: float = 60) -> str | None:
    """The plan cuts make()'s layers (narrow, up, down) over two ranks: the same numbers, half of up and down, one all-reduce."""
    names = [name for name, _ in make().named_children()]
    if not isinstance(plan, Mapping):
        return f"the plan is {plan!r}; a dictionary is wanted: the name of a layer, and how it is cut"
    if unknown := [
        key for key in plan if not fnmatch.filter(names, str(key))
    ]:  # as parallelize_module takes them: `u*` is a name
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


@grader
def fits_two_t4s(
    shard: Callable[[nn.Module], nn.Module | None],
    block: type[nn.Module],
    make: Callable[..., nn.Module],
    sizes: Mapping,
    timeout: float = TIMEOUT,
) -> str | None:
    """shard(make(**sizes, block=block)) trains on two T4s, float32 and sharded, nearly as fast as the best way known."""
    return alone(_without_group, _on_two, (shard, block, make, dict(sizes)), timeout=timeout)


def _on_two(shard: Callable, block: type, make: Callable, sizes: dict) -> str | None:
    from notebooks.scripts.llama import Selective

    try:
        seconds = _timed(shard, functools.partial(make, **sizes, block=block), sizes["length"])
    except torch.OutOfMemoryError as error:
        return f"out of memory: {str(error).split(' Including')[0]}"
    if isinstance(seconds, str):
        return seconds
    best = _timed(_fast, functools.partial(make, **sizes, block=Selective), sizes["length"])
    if seconds > SLOWER * best:
        return f"it fits, and a step takes {seconds:.1f} s (simulated); {best:.1f} s are possible"
    return None


def _fast(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policies = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16), "offload_policy": CPUOffloadPolicy()}
    for part in (model.words, *model.blocks, model.output):
        fully_shard(part, **policies)
    return fully_shard(model, **policies)


def _timed(shard: Callable, make: Callable[[], nn.Module], length: int) -> float | str:
    """Seconds of a rank's second step, simulated; or what is wrong with its parameters."""
    with virtualgpu.dry_run(like="T4", world_size=2):
        dist.init_process_group("nccl")
        with torch.device("meta"):
            model = make()
        if wrong := _misplaced(model, shard, "two"):
            return wrong
        model.to_empty(device="cpu" if _offloads(model) else "cuda")
        for buffer in model.buffers():
            buffer.data = buffer.data.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        text = torch.zeros(1, length + 1, dtype=torch.long, device="cuda")
        clock = virtualgpu.machine().clock
        for _ in range(2):
            torch.cuda.synchronize()
            start = clock.host
            _step(model, optimizer, text)
            torch.cuda.synchronize()
        return clock.host - start


def _offloads(model: nn.Module) -> bool:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    return any(group is not None and isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten()).backward()
    optimizer.step()


def _misplaced(model: nn.Module, shard: Callable, ranks: str) -> str | None:
    """Shards the model; what is wrong with its parameters then."""
    from torch.distributed.tensor import DTensor, Shard

    before = {name: (p.numel(), p.dtype) for name, p in model.named_parameters()}
    shard(model)
    after = {name: (p.numel(), p.dtype) for name, p in model.named_parameters()}
    if after != before:
        wrong = sorted(before.keys() ^ after.keys()) or [name for name in before if before[name] != after[name]]
        return f"the parameters are not the model's any more: look at {wrong[0]}"
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or not any(isinstance(p, Shard) for p in parameter.placements):
            return f"{name} is not sharded: each of the {ranks} GPUs holds all of it"
    return None


@grader
def shards_below(
    shard: Callable[[nn.Module], nn.Module | None],
    make: Callable[..., nn.Module],
    sizes: Mapping,
    budget: float,
    timeout: float = TIMEOUT,
) -> str | None:
    """After shard(model), a step of one rank of four stays below `budget` GiB; parameters are all there, float32 and sharded."""
    return alone(_without_group, _sharded, (shard, make, dict(sizes), budget), timeout=timeout)


def _sharded(shard: Callable, make: Callable, sizes: dict, budget: float) -> str | None:
    with virtualgpu.dry_run(like="T4", world_size=4):
        dist.init_process_group("nccl")
        with torch.device("meta"):
            model = make(**sizes)
        if wrong := _misplaced(model, shard, "four"):
            return wrong
        model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        text = torch.zeros(1, sizes["length"] + 1, dtype=torch.long, device="cuda")
        for _ in range(2):
            _step(model, optimizer, text)
        peak = torch.cuda.max_memory_allocated() / 2**30
    if peak > budget:
        return f"all is sharded, and a step's peak is {peak:.2f} GiB; the budget is {budget:.2f}. Which group is the largest?"
    return None


def _without_group(worker: Callable, args: tuple) -> str | None:
    """What worker(*args) says where there are no GPUs and no process group yet."""
    dist.destroy_process_group()
    virtualgpu.reset()
    return worker(*args)
