"""What lesson 06 shows of memory: an error's numbers, a climb to it, the allocator's blocks side by side, and who holds a storage."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

import virtualgpu
from helpers import plots
from helpers.plots import figures
from helpers.plots.figures import COLORS, Origin

STATES = ("in use", COLORS[5]), ("free", "#cfe6f5")
UNITS = {"bytes": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 2**10}
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
# Today's words, or those before PyTorch 2.1; 2.1 wrote "capacty"
WORDS = {
    "tried": rf"allocate {SIZE}",
    "capacity": rf"capac\w+ of {SIZE}|{SIZE} total capacity",
    "free": rf"of which {SIZE} is free|{SIZE} free;",
    "Process N": rf"Process \d+ has {SIZE}",
    "this process": rf"this process has {SIZE}",
    "tensors": rf"{SIZE} is allocated by|{SIZE} already allocated",
    "reserved": rf"{SIZE} reserved in total",
    "unused": rf"{SIZE} is reserved by",
}
# As people reported them
QUOTED = {
    # github.com/FoundationVision/GenerateU/issues/10 (PyTorch 2.1, in a container)
    "GenerateU#10": "CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of 14.75 GiB of which 235.06 MiB is free. "
    "Process 20398 has 14.52 GiB memory in use. Of the allocated memory 14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.",
    # github.com/pp00704831/Stripformer-ECCV-2022-/issues/21 (before PyTorch 2.1)
    "Stripformer#21": "CUDA out of memory. Tried to allocate 1.65 GiB (GPU 1; 7.79 GiB total capacity; 3.53 GiB already allocated; "
    "1.40 GiB free; 5.28 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to "
    "avoid fragmentation.",
    # github.com/Kunhao-Liu/StyleGaussian/issues/11
    "StyleGaussian#11": "CUDA out of memory. Tried to allocate 130674.91 GiB (GPU 0; 79.15 GiB total capacity; 27.53 GiB already "
    "allocated; 37.61 GiB free; 28.21 GiB reserved in total by PyTorch)",
}


def sizes(message: str) -> dict[str, float]:
    """The numbers of an out-of-memory message in MiB, by the names of `WORDS`; what it does not say is left out, and what it says of
    several other processes is added up."""
    found = {}
    for name, words in WORDS.items():
        hits = [[part for part in hit if part] for hit in re.findall(words, message)]
        if hits:
            found[name] = sum(float(number) * UNITS[unit] for number, unit in hits)
    return found


def table(messages: Mapping[str, str]) -> None:
    """Print a row a message, each number in MiB, a point for what it does not say."""
    print(f"{'MiB':<18}", *(f"{name:>12}" for name in WORDS))
    for name, message in messages.items():
        said = sizes(message)
        print(f"{name:<18}", *(f"{f'{said[word]:,.0f}' if word in said else '.':>12}" for word in WORDS))


class Recorder:
    """What comes and goes on the GPU from now on, phase by phase: `with record("forward"):`; see virtualgpu.kinds for their names."""

    def __init__(self, gpu: torch.device):
        self.gpu, self.phases = gpu, []
        torch.cuda.memory._record_memory_history(context=None)  # without the lines that asked: faster

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """A phase begins; the next one ends it."""
        self.phases.append((len(self._trace()), phase))
        yield

    def _trace(self) -> list[dict]:
        return torch.cuda.memory._snapshot()["device_traces"][self.gpu.index or 0]

    def end(self) -> "Recorder":
        """Recording is over."""
        self.kinds = virtualgpu.kinds(self._trace(), self.phases)
        torch.cuda.memory._record_memory_history(None)
        return self

    def peaks(self) -> list[tuple[str, float]]:
        """Of each step: the phase of its peak, and the MiB."""
        total = [sum(column) for column in zip(*self.kinds.values(), strict=True)]
        steps = [start for start, phase in self.phases if phase == "forward"]
        found = []
        for start, end in zip(steps, [*steps[1:], len(total)], strict=True):
            at = max(range(start, end), key=total.__getitem__)
            found.append(([phase for begin, phase in self.phases if begin <= at][-1], total[at]))
        return found

    def draw(self, title: str, top: float) -> None:
        """All kinds on top of each other; `top` ends the axis, in MiB."""
        where = "allocations and frees, in order", "in tensors (MiB)"
        plots.stacked(self.kinds, title, *where, "simulated", self.phases, top)


def climbs(runs: Mapping[str, Sequence[float]], ceiling: float, title: str, origin: Origin) -> None:
    """MiB held after each allocation and free, a panel a run, below the `ceiling`; where it ends, the error."""
    figure, panels = figures.new(3.2, ncols=len(runs), sharey=True)
    for axes, (name, held) in zip(panels, runs.items(), strict=True):
        axes.plot(held, linewidth=1.2, drawstyle="steps-post")
        axes.axhline(ceiling, color="#666666", linestyle="--", linewidth=1)
        axes.plot(len(held) - 1, held[-1], "X", color=COLORS[5], markersize=10)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set(xlabel="allocations and frees, in order", ylim=(0, 1.08 * ceiling))
    panels[0].set_ylabel("in tensors (MiB)")
    panels[0].annotate("the GPU", (0, ceiling), (3, 3), textcoords="offset points", fontsize=8, color="#444")
    figures.show(figure, title, origin)


def blocks(rows: Mapping[str, Sequence[Mapping]], title: str, origin: Origin) -> None:
    """Segments of a GPU's memory, as torch.cuda.memory_snapshot() tells them, those of {name: segments} in one row: blocks
    in use are dark, free ones pale, each with its MiB where there is room for it."""
    whole = max(sum(segment["total_size"] for segment in segments) for segments in rows.values()) / 2**20
    settings = {"xlabel": "place in the reserved memory (MiB)", "xlim": (0, whole)}
    with figures.drawn(title, origin, 1.2 + 0.6 * len(rows), **settings) as axes:
        for row, segments in enumerate(rows.values()):
            start = 0.0
            for block in (block for segment in segments for block in segment["blocks"]):
                size, (kind, color) = block["size"] / 2**20, STATES[block["state"] == "inactive"]
                style = {"facecolor": color, "edgecolor": "white", "linewidth": 0.8}
                axes.broken_barh([(start, size)], (row - 0.32, 0.64), label=kind, **style)
                if size > whole / 30:
                    axes.text(start + size / 2, row, f"{size:.0f}", ha="center", va="center", fontsize=9)
                start += size
        figures.rows(axes, rows)
        axes.grid(visible=False)
        figures.legend_above(axes, 2)


def holders(names: Sequence[str], storage: str, title: str) -> None:
    """Who points to one storage: a box for each, an arrow to it."""
    with figures.drawn(title, "data", 0.7 + 0.5 * len(names), xlim=(0, 10), ylim=(len(names) - 0.4, -0.6)) as axes:
        box = {"boxstyle": "round,pad=0.4", "edgecolor": "#666666"}
        middle = (len(names) - 1) / 2
        axes.text(8.2, middle, storage, ha="center", va="center", fontsize=10, bbox={**box, "facecolor": "#cfe6f5"})
        for row, name in enumerate(names):
            axes.annotate(
                name, (7.15, middle + 0.15 * (row - middle)), (0.2, row), va="center", fontsize=9,
                bbox={**box, "facecolor": "white"}, arrowprops={"arrowstyle": "->", "color": "#666666", "shrinkB": 0},
            )  # fmt: skip
        axes.set_axis_off()
