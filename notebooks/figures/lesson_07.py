"""Lesson 07's models, what a training step with a cure costs them on a T4, and the pictures of it."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.lines import Line2D
from torch import nn
from torch.nn import functional as F

import virtualgpu
from helpers import plots
from helpers.plots import figures
from helpers.plots.figures import COLORS
from notebooks.figures.lesson_06 import Recorder

GiB = 2**30
STEPS, TEXTS, LENGTH, WORDS = 30, 8, 16, 200  # of the tiny model's training run
ROUNDED, APPROXIMATE = 0.001, 0.03  # apart: from where on a training run is no longer the same, or only rounded
OTHER = "a different training run"
SMALL = {"layers": 12, "dim": 768, "heads": 12, "hidden": 2048}
SIZES = {  # roughly those of published models: TinyLlama, OpenLLaMA 3B and Llama 2 7B are the last three
    "0.54 billion": {"layers": 8, "dim": 2048, "heads": 32, "hidden": 5632},
    "1.26 billion": {"layers": 22, "dim": 2048, "heads": 32, "hidden": 5632},
    "3.4 billion": {"layers": 26, "dim": 3200, "heads": 32, "hidden": 8640},
    "6.7 billion": {"layers": 32, "dim": 4096, "heads": 32, "hidden": 11008},
}


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to its input: as Llama has it, without its rotation."""

    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(texts, length, dim) to the same shape."""
        y = self.norm1(x)
        heads = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """A language model."""

    def __init__(self, layers: int, dim: int, heads: int, hidden: int, words: int = 32000):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, words, bias=False)

    def features(self, text: torch.Tensor) -> torch.Tensor:
        """(texts, length) to a row for each token: (texts * length, dim)."""
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).flatten(0, 1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(texts, length) to a row of logits for each token: (texts * length, words)."""
        return self.output(self.features(text))


@dataclass(frozen=True)
class Patient:
    """A model, and the shape of what it is trained on."""

    sizes: Mapping[str, int]
    texts: int
    length: int

    def model(self) -> Model:
        """On the device of the block around it."""
        return Model(**self.sizes)

    def parameters(self) -> int:
        """How many numbers its model has."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.model().parameters())


PATIENTS = {"many tokens": Patient(SMALL, 16, 512), "many parameters": Patient(SIZES["0.54 billion"], 2, 64)}
LONG_TEXT = Patient(SMALL, 1, 16 * 512)


def nothing(net: nn.Module) -> None:
    """What a cure does to the model where it does nothing to it."""


def trained(net: nn.Module) -> list[nn.Parameter]:
    """The parameters that train."""
    return [p for p in net.parameters() if p.requires_grad]


def price(
    patient: Patient,
    step: Callable,
    prepare: Callable = nothing,
    optimizer: Callable = torch.optim.Adam,
    memory: str | None = None,
) -> tuple[float, float, float]:
    """(GiB of tensors at the peak, GiB reserved, milliseconds) of the second step on a T4, without numbers; the first makes the
    optimizer's state. memory: another than a T4's, to make the model in. Raises torch.OutOfMemoryError where it does not fit."""
    with virtualgpu.dry_run(1, like="T4", memory=memory):
        with torch.device("cuda"):
            net = patient.model()
            text = torch.zeros(patient.texts, patient.length, dtype=torch.long)
        prepare(net)
        updates = optimizer(trained(net))
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step(net, updates, text, text)
            end.record()
            torch.cuda.synchronize()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return peaks[0] / GiB, peaks[1] / GiB, start.elapsed_time(end)


def tiny() -> Model:
    """A model that is really trained, on the CPU."""
    torch.manual_seed(0)
    return Model(layers=2, dim=64, heads=2, hidden=192, words=WORDS)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight texts for `tiny`, and what to predict: the next word at each place."""
    text = torch.randint(WORDS, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(0))
    return text, text.roll(-1, 1)


def moved(step: Callable, x, y, steps: int = STEPS, prepare=nothing, optimizer=torch.optim.Adam) -> torch.Tensor:
    """How far so many steps move the parameters of `tiny`."""
    net = tiny()
    prepare(net)
    start = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    updates = optimizer(trained(net))
    for _ in range(steps):
        step(net, updates, x, y)
    return nn.utils.parameters_to_vector(net.parameters()).detach() - start


def apart(plain: Callable, step: Callable, x=None, y=None, steps: int = STEPS, **cure) -> float:
    """How far the steps with a cure end from where the plain ones do; 1 is as far as the plain ones moved. x, y: texts and
    what to predict, those of `texts` unless given."""
    wanted = _by_plain_steps(plain, steps) if x is None else moved(plain, x, y, steps)
    x, y = texts() if x is None else (x, y)
    return ((moved(step, x, y, steps, **cure) - wanted).norm() / wanted.norm()).item()


@functools.lru_cache
def _by_plain_steps(plain: Callable, steps: int) -> torch.Tensor:
    return moved(plain, *texts(), steps)


def kind(off: float) -> str:
    """What a cure does to the training run, by `apart`."""
    return "exact" if off < ROUNDED else "rounded" if off < APPROXIMATE else "approximate"


class PriceList:
    """What each cure costs each patient, beside the plain step: GiB at the peak, and the time of a step."""

    def __init__(self, plain: Callable):
        self.plain = plain
        self.usual = {name: price(patient, plain) for name, patient in PATIENTS.items()}
        self.kinds = {"as it is": "exact"}
        self.rows = {"as it is": {name: (1.0, gib) for name, (gib, _, _) in self.usual.items()}}  # (x the time, GiB)
        for name, (gib, _, milliseconds) in self.usual.items():
            print(f"{name:<16}{gib:5.1f} GiB, {milliseconds:5.0f} ms a step (simulated)")

    def add(self, name: str, step: Callable | None = None, keeps: str = "", **cure: Any) -> None:
        """Print the cure's line and keep it. step: plain unless given. keeps: what it does to the training run, where that
        need not be measured. cure: prepare= and optimizer= of `price`."""
        step = step or self.plain
        off = None if keeps else apart(self.plain, step, **cure)
        self.kinds[name] = keeps or kind(off)
        prices = {patient: price(PATIENTS[patient], step, **cure) for patient in PATIENTS}
        self.rows[name] = {patient: (ms / self.usual[patient][2], gib) for patient, (gib, _, ms) in prices.items()}
        print(f"{name}: {self.kinds[name]}" + ("" if off is None else f" ({off:.1%} apart)") + "; simulated:")
        for patient, (time, gib) in self.rows[name].items():
            print(f"  {patient:<16}{gib:5.1f} GiB ({gib / self.usual[patient][0] - 1:+.0%}), {time:4.2f} x the time")


def held(patient: Patient) -> tuple[dict[str, list[float]], list[tuple[int, str]]]:
    """GiB of each kind after every allocation and free of a plain second step, and where its phases begin."""
    with virtualgpu.dry_run(1, like="T4"):
        record = Recorder(torch.device("cuda"))
        with record("model"), torch.device("cuda"):
            net, text = patient.model(), torch.zeros(patient.texts, patient.length, dtype=torch.long)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(2):  # the first one makes the optimizer's state
            optimizer.zero_grad()
            step = len(record.phases)
            with record("forward"):
                loss = F.cross_entropy(net(text), text.flatten())
            with record("backward"):
                loss.backward()
            with record("optimizer"):
                optimizer.step()
        record.end()
    start, phases = record.phases[step][0], record.phases[step:]
    gib = {kind: [mib / 1024 for mib in values[start:]] for kind, values in record.kinds.items()}
    return gib, [(event - start, phase) for event, phase in phases]


def at_the_peak(layers: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """What `held` says of the moment at which most is held."""
    sums = [sum(values) for values in zip(*layers.values(), strict=True)]
    peak = sums.index(max(sums))
    return {kind: values[peak] for kind, values in layers.items()}


def peaks(rows: Mapping[str, Mapping[str, float]], title: str) -> None:
    """A bar a row, of what lies on the GPU at the peak, kind by kind."""
    with figures.drawn(title, "simulated", 1.3 + 0.5 * len(rows), xlabel="on the GPU at the peak (GiB)") as axes:
        for row, kinds in enumerate(rows.values()):
            left = 0.0
            for color, (name, gib) in zip(COLORS, kinds.items(), strict=False):
                axes.barh(row, gib, 0.6, left, color=color, label=name)
                if gib > 0.5:
                    axes.text(left + gib / 2, row, f"{gib:.1f}", ha="center", va="center", fontsize=9)
                left += gib
        figures.rows(axes, rows, grid=False)
        names = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        style = {
            "loc": "lower right",
            "bbox_to_anchor": (1, 1),
            "fontsize": 9,
            "handlelength": 1.2,
            "columnspacing": 1.2,
        }
        axes.legend(names.values(), names, ncols=len(names), frameon=False, **style)


def step_of(length: int, top: float) -> None:
    """The stacked picture of a plain step with one text of this length; `top` is the axis's end in GiB."""
    layers, phases = held(Patient(SMALL, 1, length))
    title = f"One text of {length:,} tokens: {sum(at_the_peak(layers).values()):.1f} GiB at the peak"
    axes = "allocations and frees, in order", "in tensors (GiB)", "simulated"
    plots.stacked(layers, title, *axes, phases, top=top)


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those than which no other is both faster and smaller, the fastest first."""
    best: list[tuple[float, float]] = []
    for time, gib in sorted(points):
        if not best or gib < best[-1][1]:
            best.append((time, gib))
    return best


MARKS = {"exact": "o", "rounded": "s", "approximate": "^", OTHER: "x"}
PLACES = (
    (5, 4),
    (5, -9),
    (-12, 4),
    (-12, -9),
    (17, 4),
    (17, -9),
    (-24, 4),
    (5, 15),
    (-12, 15),
)  # of a number beside its mark, in points


def scatter(prices: PriceList, title: str) -> None:
    """A panel a patient: a numbered mark for each cure at its time and GiB. The line joins the best of those that keep the training run."""
    names, panels = list(prices.rows), list(PATIENTS)
    figure, axes = figures.new(3.6 + 0.19 * -(-len(names) // 3), ncols=len(panels), sharey=True)
    styles = {
        kind: {"marker": mark, "color": color} for (kind, mark), color in zip(MARKS.items(), COLORS, strict=False)
    }
    for panel, axis in zip(panels, axes, strict=True):
        points = {name: prices.rows[name][panel] for name in names}
        best = frontier(point for name, point in points.items() if prices.kinds[name] != OTHER)
        axis.plot(*zip(*best, strict=True), color="#999999", linewidth=1.5, zorder=1)
        axis.set(xscale="log", xlabel="time of a step (x the plain one's)", ylim=(0, 11.9), title=panel)
        slowest = max(time for time, _ in points.values())
        figures.ticks(axis, [tick for tick in (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3) if tick < 1.1 * slowest])
        joined: dict[tuple[float, float], list[str]] = {}  # numbers of marks that lie on each other
        for number, name in enumerate(names, 1):
            time, gib = points[name]
            axis.plot(time, gib, linestyle="", markersize=6, **styles[prices.kinds[name]])
            x, y = 250 * math.log2(time) / math.log2(8), 200 * gib / 11.9  # points
            near = (place for place in joined if math.dist(place, (x, y)) < 5)
            joined.setdefault(next(near, (x, y)), []).append(str(number))
        taken: list[tuple[float, float, float]] = []
        for (x, y), numbers in joined.items():
            time, gib = points[names[int(numbers[0]) - 1]]
            text = ", ".join(numbers)
            axis.annotate(text, (time, gib), _free(x, y, text, taken), textcoords="offset points", fontsize=8)
    axes[0].set_ylabel("in tensors at the peak (GiB)")
    for kind, style in styles.items():
        axes[1].plot([], [], linestyle="", label=kind, **style)
    axes[1].legend(loc="lower right", fontsize=8)
    keys = [Line2D([], [], linestyle="", markersize=5, **styles[prices.kinds[name]]) for name in names]
    words = [f"{number}  {name}" for number, name in enumerate(names, 1)]
    figure.legend(keys, words, loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    figures.show(figure, title, "simulated")


def _free(x: float, y: float, text: str, taken: list[tuple[float, float, float]]) -> tuple[int, int]:
    """Where numbers find room beside their mark at (x, y) points, away from those that are `taken` (left, right, height), which they join."""
    wide = 5 * len(text)
    room = (
        (dx, dy)
        for dx, dy in PLACES
        if all(x + dx > right or x + dx + wide < left or abs(y + dy - height) > 9 for left, right, height in taken)
    )
    dx, dy = next(room, PLACES[0])
    taken.append((x + dx, x + dx + wide, y + dy))
    return dx, dy


class Adam8bit(torch.optim.Optimizer):
    """Adam whose two averages take a byte for each parameter, and a scale for each 64 of them. It stands in for
    `bitsandbytes.optim.Adam8bit`, whose kernels need a real GPU. (Sizes of parameters are multiples of 64.)"""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        """A few million entries at a time, so that little is ever unpacked."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                codes = torch.zeros(p.numel() // 64, 64, dtype=torch.int8, device=p.device)
                scale = torch.zeros(p.numel() // 64, 1, device=p.device)
                state.update(step=0, packed=(codes, scale, codes.clone(), scale.clone()))
            state["step"] += 1
            rows = (p.view(-1, 64), p.grad.view(-1, 64), *state["packed"])
            for part in zip(*(each.split(ROWS) for each in rows), strict=True):
                self._update(state["step"], *part)

    def _update(self, step, weight, gradient, mean_codes, mean_scale, root_codes, root_scale) -> None:
        mean, root = mean_codes * mean_scale, root_codes * root_scale  # root: of the mean square
        mean.lerp_(gradient, 0.1)
        root.square_().mul_(0.999).addcmul_(gradient, gradient, value=0.001).sqrt_()
        below = root / (1 - 0.999**step) ** 0.5 + 1e-8
        weight.addcdiv_(mean / (1 - 0.9**step), below, value=-self.defaults["lr"])
        for codes, scale, values in ((mean_codes, mean_scale, mean), (root_codes, root_scale, root)):
            packed, scales = pack(values)
            codes.copy_(packed)
            scale.copy_(scales)


ROWS = 2**17  # of 64 entries, unpacked at once


def pack(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of float32 as int8, and a scale for each row: their product is x, nearly."""
    scale = x.abs().amax(1, keepdim=True).clamp_min(1e-20) / 127
    return (x / scale).round().to(torch.int8), scale


class FourBit(nn.Module):
    """A frozen linear layer in 4 bits: two numbers in a byte, a scale for each 64. It stands in for bitsandbytes' `Linear4bit`,
    whose 16 values lie where weights are frequent (NF4), and whose kernel needs a real GPU."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach().float().reshape(-1, 64)
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = ((weight / scale).round() + 8).to(torch.uint8)  # 1 to 15
        self.register_buffer("packed", codes[:, ::2] * 16 + codes[:, 1::2])
        self.register_buffer("scale", scale.half())
        self.weight = torch.empty(0, device=scale.device)  # an adapter asks where it is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Unpack, multiply, forget."""
        codes = torch.stack([self.packed >> 4, self.packed & 15], -1).flatten(1)
        weight = (codes.half() - 8) * self.scale
        return F.linear(x, weight.view(self.out_features, self.in_features).to(x.dtype))
