"""What a GPU holds at each stage of ZeRO, a sharded step with its gathers numbered, and simulated figures beside published ones."""

import json
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import virtualgpu
from helpers.plots import figures
from helpers.plots.figures import COLORS
from notebooks.scripts.llama import Llama
from virtualgpu.timeline import Timeline, drawn_as, passes

GiB = 2**30
T4 = 14.74  # GiB that a program can have
ONE_BILLION = {"layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "words": 32000, "length": 512}
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


class Held(NamedTuple):
    """GiB on one GPU at the peak of a step. others: activations, and what is gathered or not yet sent away at that moment."""

    parameters: float
    gradients: float
    optimizer: float
    others: float


def stages(world_size: int = 8) -> None:
    """Draws what one of `world_size` GPUs holds at the peak of a step of a billion parameters (Adam, float32, a text of 512 tokens),
    from DDP to ZeRO-3: bars of GiB, from dry runs."""
    held = {stage: at_the_peak(stage, world_size) for stage in STAGES}
    fits = [stage for stage, parts in held.items() if sum(parts) < T4]
    title = f"Whole copies of a billion parameters do not fit on T4s; in {world_size} shards they do"
    with figures.drawn(
        title, "simulated", 2.9, xlabel=f"GiB on each of {world_size} GPUs, at the peak of a step"
    ) as axes:
        ends = dict.fromkeys(STAGES, 0.0)
        for part, color in zip(Held._fields, (COLORS[0], COLORS[1], COLORS[2], "#bbbbbb"), strict=True):
            label = "activations, gathered weights" if part == "others" else part
            sizes = [getattr(held[stage], part) for stage in STAGES]
            axes.barh(STAGES, sizes, left=list(ends.values()), color=color, label=label, height=0.62)
            ends = {stage: ends[stage] + size for stage, size in zip(STAGES, sizes, strict=True)}
        for row, (stage, end) in enumerate(ends.items()):
            axes.text(
                end + 0.15, row, f"{end:.1f}{'' if stage in fits else ': out of memory'}", va="center", fontsize=9
            )
        axes.axvline(T4, color=COLORS[5], linestyle="--", linewidth=1.2)
        axes.text(T4 - 0.12, 3.45, "a T4 has 14.7", color=COLORS[5], ha="right", va="bottom", fontsize=9)
        axes.set(ylim=(3.5, -0.5), xlim=(0, max(ends.values()) * 1.16))
        axes.grid(visible=False, axis="y")
        figures.legend_above(axes, 4)


def at_the_peak(stage: str, world_size: int, sizes: Mapping = ONE_BILLION, text: int = 512) -> Held:
    """One rank's second step, in a dry run on an imaginary T4 that all stages fit on."""
    with virtualgpu.dry_run(like="T4", memory="40 GB", world_size=world_size):
        dist.init_process_group("nccl")
        model, optimizer = _built(stage, sizes)
        words = torch.zeros(1, text + 1, dtype=torch.long, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[0, 1:]).backward()
            parameters = list(model.parameters())
            parts = [_bytes(parameters), _bytes(p.grad for p in parameters)]
            optimizer.step()
            optimizer.zero_grad()
        inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer: this rank's own
        parts.append(_bytes(value for state in inner.state.values() for value in state.values()))
        peak = torch.cuda.max_memory_allocated()
    return Held(*(size / GiB for size in (*parts, peak - sum(parts))))


def _built(stage: str, sizes: Mapping) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = Llama(**sizes)
    if stage in ("ZeRO-2", "ZeRO-3"):
        for part in (*model.blocks, model):
            fully_shard(part, reshard_after_forward=stage == "ZeRO-3")
        model.to_empty(device="cuda")
        return model, torch.optim.Adam(model.parameters(), fused=True)
    model = DistributedDataParallel(model.to_empty(device="cuda"), gradient_as_bucket_view=True)
    if stage == "ZeRO-1":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, fused=True)
    return model, torch.optim.Adam(model.parameters(), fused=True)


def _bytes(tensors) -> int:
    """Of this rank's parts, on the GPU."""
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum(tensor.nbytes for tensor in local if tensor.is_cuda)


def numbered(model: nn.Module, step: Callable[[], object]) -> Timeline:
    """What one rank does in `step()`, simulated: each block of `model.blocks` numbered from 1 in its forward and backward, and each
    gather and reduce-scatter with the number of its block; 0 for the group of all that is in no block.

    model: sharded by `fully_shard` for each block and for the rest. Raises ValueError where its gathers are not those of such a model."""
    hooks = []
    for number, block in enumerate(model.blocks, 1):
        hooks += [block.register_forward_pre_hook(_begins(f"PP:0F{number}"), prepend=False)]
        hooks += [block.register_forward_hook(_ends)]
        hooks += [block.register_full_backward_pre_hook(_begins(f"PP:0B{number}"))]
        hooks += [block.register_full_backward_hook(_ends)]
    try:
        with virtualgpu.recording() as spans:
            step()
            torch.cuda.synchronize()
    finally:
        for hook in hooks:
            hook.remove()
    count = len(model.blocks)
    there, back = range(1, count + 1), range(count, 0, -1)
    groups = {"all-gather": iter((0, *there, *back)), "reduce-scatter": iter((*back, 0))}
    try:
        spans = [replace(s, annotation=str(next(groups[drawn_as(s)]))) if drawn_as(s) in groups else s for s in spans]
    except StopIteration:
        raise ValueError("more messages than a group for each block and one for the rest have") from None
    return Timeline.of_ranks([spans], "simulated")


def sharded(timeline: Timeline, title: str) -> None:
    """Draws what `numbered` recorded: computing in the upper lane, with the copies that FSDP makes for messages; messages in the lower one."""
    (spans,) = timeline.rows.values()
    kinds = {"forward": (0, COLORS[0]), "backward": (0, COLORS[1]), "optimizer": (0, COLORS[2])}
    kinds |= {"copy": (0, "#aaaaaa"), "all-gather": (1, "#882255"), "reduce-scatter": (1, COLORS[4])}
    spans = [replace(s, kind="copy") if s.annotation.startswith("FSDP::") else s for s in spans]
    with figures.drawn(title, "simulated", 2.5, xlabel="time (ms)", xlim=(0, 1e3 * timeline.seconds)) as axes:
        for kind, (lane, color) in kinds.items():
            bars = [(1e3 * s.start, 1e3 * (s.end - s.start)) for s in spans if drawn_as(s) == kind]
            edges = {"edgecolor": "white", "linewidth": 0.8} if lane else {}
            axes.broken_barh(bars, (lane - 0.36, 0.72), color=color, label=kind, **edges)
        places = [(one.start, one.end, 0, one.number, "white" if one.way == "F" else "black") for one in passes(spans)]
        for s in spans:
            if s.kind == "communication":
                places.append((s.start, s.end, 1, s.annotation, "white" if drawn_as(s) == "all-gather" else "black"))
        for start, end, lane, number, ink in places:
            if end - start > timeline.seconds / 80:
                axes.text(500 * (start + end), lane, number, fontsize=8, ha="center", va="center", color=ink)
        figures.legend_above(axes, 3)
        figures.rows(axes, ["computing", "messages"], grid=False)


_open: list[record_function] = []


def _begins(name: str) -> Callable:
    def hook(*_):
        _open.append(record_function(name))
        _open[-1].__enter__()

    return hook


def _ends(*_) -> None:
    if _open:
        _open.pop().__exit__(None, None, None)


def of_block(timeline: Timeline, number: int) -> tuple[float, float]:
    """Milliseconds of a block's first gather, and of its forward, in what `numbered` recorded."""
    (spans,) = timeline.rows.values()
    gather = next(s for s in spans if drawn_as(s) == "all-gather" and s.annotation == str(number))
    forward = sum(s.end - s.start for s in spans if s.annotation == f"PP:0F{number}")
    return 1e3 * (gather.end - gather.start), 1e3 * forward


def idle_share(idle: Mapping[int, float], even: float) -> None:
    """The share of a step in which nothing is computed (%), over the tokens per GPU; a line at `even` tokens, where a block's forward
    takes as long as its gather."""
    title = f"From about {round(even, -2):,.0f} tokens per GPU on, most of the gathers is hidden"
    labels = {"xlabel": "tokens per GPU", "ylabel": "not computing (%)"}
    with figures.drawn(title, "simulated", 2.7, **labels) as axes:
        axes.plot(list(idle), list(idle.values()), "o-", color=COLORS[0])
        axes.axvline(even, color=COLORS[5], linestyle="--", linewidth=1.2)
        axes.text(even * 1.05, 84, "forward of a block = its gather", color=COLORS[5], fontsize=9)
        axes.set(xscale="log", ylim=(0, 100))
        figures.ticks(axes, list(idle))


def published(every_program: bool = False) -> list[dict]:
    """Of the published figures that this project compares with, those of FSDP, tensor parallel and ZeRO, or all; each row has what, kind,
    unit, published and simulated."""
    folder = pathlib.Path(__file__).resolve().parents[2] / "data"
    every = json.loads((folder / "published.json").read_text(encoding="utf-8"))
    sources = ("torchtitan", "lora", "zero_recipe", "megatron")
    judged = [row for row in every if "not judged" not in row["note"]]
    return [row for row in judged if every_program or row["source"].startswith(sources)]
