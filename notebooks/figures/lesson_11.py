"""Orders of a pipeline's work on paper, where stages are, and what recorded schedules cost in time and in memory."""

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch, Rectangle

from helpers import plots
from helpers.plots import figures
from helpers.plots.figures import COLORS
from virtualgpu import Timeline
from virtualgpu.run.ranks.recorded import Recorded
from virtualgpu.timing.trace import Span

Orders = Sequence[Sequence[str]]  # of each stage: "F2", "B2" and so on, in the order in which it does them
KINDS = {"F": "forward", "B": "backward", "W": "weight gradient"}
GIB = 2**30


def cover() -> None:
    """GPipe, 1F1B and a zero bubble, three stages and six micro-batches: backward takes two slots, or one for each of its two parts."""
    p, m = 3, 6
    gpipe = [[f"{kind}{i}" for kind in "FB" for i in range(m)] for _ in range(p)]
    several = {"GPipe": play(gpipe), "1F1B": play(_one_f_one_b(p, m)), "zero bubble": _zero_bubble(p, m)}
    idle = ", ".join(f"{name} {timeline.idle:.0f} %" for name, timeline in several.items())
    _draw(several, f"Three orders of the same work. Idle: {idle}")


def played(several: Mapping[str, Orders], title: str) -> None:
    """{name: orders}, drawn below each other as `play` plays them, each stage with the micro-batches that it holds at most."""
    _draw({name: play(orders) for name, orders in several.items()}, title)


def play(orders: Orders, backward: int = 2) -> Timeline:
    """Each stage does the next work of its order as soon as what it needs is there; a message takes no time. A forward lasts one slot (a
    millisecond), a backward `backward` slots. Raises ValueError where no stage can go on."""
    left, free, ends = [list(order) for order in orders], [0] * len(orders), {}
    rows: list[list[Span]] = [[] for _ in orders]
    while any(left):
        ready = [(s, todo[0]) for s, todo in enumerate(left) if todo and _needs(todo[0], s, len(orders)) <= ends.keys()]
        if not ready:
            raise ValueError("no stage can go on: they wait for each other")
        for s, work in ready:
            start = max([free[s], *(ends[need] for need in _needs(work, s, len(orders)))])
            free[s] = ends[s, work] = start + (backward if work[0] == "B" else 1)
            rows[s].append(_span(s, left[s].pop(0), start, free[s]))
    return _timeline(rows)


def _needs(work: str, s: int, p: int) -> set[tuple[int, str]]:
    """What must have ended before stage s of p can begin this work."""
    if work[0] == "F":
        return {(s - 1, work)} if s else set()
    return {(s, f"F{work[1:]}")} | ({(s + 1, work)} if s < p - 1 else set())


def _one_f_one_b(p: int, m: int) -> Orders:
    orders = []
    for s in range(p):
        ahead = min(p - 1 - s, m)
        turns = [work for i in range(ahead, m) for work in (f"F{i}", f"B{i - ahead}")]
        orders.append([f"F{i}" for i in range(ahead)] + turns + [f"B{i}" for i in range(m - ahead, m)])
    return orders


def _zero_bubble(p: int, m: int) -> Timeline:
    """Slot by slot each stage takes a gradient of inputs if it can, else a forward if it holds fewer than p, else a gradient of weights."""
    rows: list[list[Span]] = [[] for _ in range(p)]
    done: set[tuple[int, str]] = set()
    for slot in itertools.count():
        now = []
        for s in range(p):
            forward, backward, weight = (sum(kind == work[0] for stage, work in done if stage == s) for kind in "FBW")
            choices = {
                f"B{backward}": backward < m and _needs(f"B{backward}", s, p) <= done,
                f"F{forward}": forward < m and forward - weight < p and _needs(f"F{forward}", s, p) <= done,
                f"W{weight}": weight < backward,
            }
            if work := next((work for work, can in choices.items() if can), None):
                now.append((s, work))
                rows[s].append(_span(s, work, slot, slot + 1))
        done.update(now)
        if len(done) == 3 * p * m:
            return _timeline(rows)
    raise AssertionError


def _span(s: int, work: str, start: int, end: int) -> Span:
    return Span(s, start / 1e3, end / 1e3, KINDS[work[0]], work, annotation=f"PP:{s}{work}")


def _timeline(rows: Sequence[Sequence[Span]]) -> Timeline:
    named = {f"stage {s}, holds {_held(row)}": list(row) for s, row in enumerate(rows)}
    return Timeline(named, max(row[-1].end for row in rows), "data")


def _held(row: Sequence[Span]) -> int:
    """Micro-batches of which a stage keeps what backward needs: from their forward to the end of their backward."""
    frees = "W" if any(span.name[0] == "W" for span in row) else "B"
    return max(itertools.accumulate({"F": 1, frees: -1}.get(span.name[0], 0) for span in row))


def _draw(several: Mapping[str, Timeline], title: str) -> None:
    if len(several) > 1:
        plots.timelines(several, title, xlabel="slots")
    else:
        plots.timeline(*several.values(), title, xlabel="slots")


def two_stages_a_rank() -> None:
    """Which of eight stages are on which of four ranks: in rounds, and in a V; and the way of a micro-batch's forward."""
    figure, both = figures.new(2.3, ncols=2)
    for axes, name, v in zip(both, ("in rounds", "in a V"), (False, True), strict=True):
        ranks = [(7 - stage if v else stage - 4) if stage > 3 else stage for stage in range(8)]
        places = [(rank, stage // 4) for stage, rank in enumerate(ranks)]
        for stage, (rank, row) in enumerate(places):
            axes.add_patch(Rectangle((rank - 0.36, row - 0.28), 0.72, 0.56, facecolor=("#8cc3e8", "#f3cf86")[row]))
            axes.text(rank, row, f"stage {stage}", ha="center", va="center", fontsize=9)
        for (rank, row), (after, below) in itertools.pairwise(places):
            way = {"arrowstyle": "->", "color": "#555555"}
            if row == below:
                side = 0.36 if after > rank else -0.36
                start, end = (rank + side, row), (after - side, below)
            else:
                start, end = (rank, row + 0.28), (after, below - 0.28)
            axes.annotate("", end, start, arrowprops=way)
        axes.set(title=name, xlim=(-0.6, 3.6), ylim=(1.5, -0.5))
        axes.set_xticks(range(4), [f"rank {rank}" for rank in range(4)])
        axes.set_yticks([])
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(visible=False)
    figures.show(figure, "Two thin stages a rank. In a V, rank 0 has the first stage and the last", "data")


def time_and_memory(runs: Mapping[str, Recorded], title: str, seconds: float, peak: float) -> None:
    """{schedule: its recorded step}: how long the GPUs compute and are idle, and beside it what each rank's GPU holds at its peak.

    seconds, peak (bytes): where the axes end, so that two pictures compare."""
    figure, (time, memory) = figures.new(1.1 + 0.42 * len(runs), ncols=2, sharey=True)
    for row, run in enumerate(runs.values()):
        computes = 1e3 * run.seconds * (1 - run.idle / 100)
        time.barh(row, computes, 0.6, color=COLORS[0])
        time.barh(row, 1e3 * run.seconds - computes, 0.6, left=computes, color="#bbbbbb")
        time.text(1e3 * run.seconds + 8, row, f"{run.idle:.0f} %", va="center", fontsize=9)
        memory.barh(row, max(run.peaks) / GIB, 0.6, color="#dddddd")
        for rank, held in enumerate(run.peaks):
            memory.plot(held / GIB, row - 0.18 + 0.12 * rank, "o", color=COLORS[rank], markersize=4.5)
        memory.text(max(run.peaks) / GIB + 0.04, row, f"{max(run.peaks) / GIB:.2f}", va="center", fontsize=9)
    figures.rows(time, runs, grid=False)
    memory.grid(visible=False, axis="y")
    time.set(xlabel="ms of a step: computing,\nand idle (grey, %)", xlim=(0, 1150 * seconds))
    memory.set(xlabel="GiB at the peak: each rank,\nand the fullest (grey)", xlim=(0, 1.2 * peak / GIB))
    legend = [Patch(color=COLORS[rank], label=f"rank {rank}") for rank in range(4)]
    memory.legend(handles=legend, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, columnspacing=0.8)
    figures.show(figure, title, "simulated")
