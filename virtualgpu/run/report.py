"""What lay on each GPU at its peak, by kind and by the line that made it; and whether it fits.

A process hands over, for each GPU, a `Peak`: the blocks that were there when its memory stood highest, or when it ran out.
`lines` tells it. Under the runner `leave` writes this process's peaks to the folder, and `collect` reads them all.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from virtualgpu.run.table import size

SUFFIX = ".report"
KINDS = ("parameters", "gradients", "optimizer", "activations", "cuBLAS workspaces", "other")
MAX_LINES = 10  # lines of a program that are told; the rest is one line
LIBRARIES = ("torch", "torchvision", "virtualgpu", "contextlib", "threading")  # a line in these is nobody's to change


@dataclass(frozen=True)
class LiveBlock:
    """One block of a GPU's memory. `bytes`: rounded, as the allocator counts it."""

    bytes: int
    kind: str  # one of KINDS
    frames: tuple[
        tuple[str, int, str], ...
    ] = ()  # file, line and function, the innermost first; PyTorch's may be among them


@dataclass(frozen=True)
class Peak:
    """One GPU of one process at its highest. Sizes in bytes."""

    gpu: int
    card: str
    capacity: int
    reserved: int  # by PyTorch's allocator, at its own peak
    other: int = 0  # the CUDA context, and other processes on this GPU
    blocks: tuple[LiveBlock, ...] = ()
    asked: int | None = None  # what could not be had, where the program ran out of memory
    rank: int = -1
    pid: int = field(default_factory=os.getpid)


_sources: list[Callable[[], Iterable[Peak]]] = []


def register(source: Callable[[], Iterable[Peak]]) -> None:
    """Let `source` be asked for this process's peaks when it ends."""
    _sources.append(source)


def leave(folder: str) -> None:
    """Write this process's peaks for the runner."""
    peaks = [asdict(peak) for source in _sources for peak in source()]
    for peak in peaks:
        for block in peak["blocks"]:
            block["frames"] = own_frames(block["frames"])
    if peaks:
        with open(os.path.join(folder, f"{os.getpid()}{SUFFIX}"), "w", encoding="utf-8") as file:
            json.dump(peaks, file)


def own_frames(frames: tuple) -> tuple:
    """From the first frame on that is the reader's own code; the innermost alone where none is."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES]
    libraries = tuple(
        os.path.join(os.path.dirname(file), "") if os.path.basename(file) == "__init__.py" else file
        for file in files
        if file
    )
    first = next((at for at, frame in enumerate(frames) if not frame[0].startswith(libraries)), None)
    return frames[:1] if first is None else frames[first:]


def collect(folder: str) -> list[str]:
    """What the processes left, as lines of text: by rank or pid, then by GPU."""
    found, lost = [], 0
    for name in os.listdir(folder):
        if name.endswith(SUFFIX):
            try:
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    found += [_peak(record) for record in json.load(file)]
            except (OSError, ValueError):  # cut off: the process was killed, or the disk is full
                lost += 1
    found.sort(key=lambda peak: (peak.rank, peak.pid, peak.gpu))
    several = len({peak.pid for peak in found}) > 1
    told = [f"Report: {lost} process{'es' * (lost > 1)} did not finish writing one."] if lost else []
    for peak in found:
        who = f"rank {peak.rank}, " if peak.rank >= 0 else f"process {peak.pid}, " if several else ""
        told += ["", *lines(peak, who)]
    return told or ["Report: no process left one (a process that is killed, or ends by os._exit, leaves none)."]


def lines(peak: Peak, who: str = "") -> list[str]:
    """The report on one GPU."""
    total = sum(block.bytes for block in peak.blocks)
    told = [f"{_title(peak, total, who)} in {len(peak.blocks)} blocks", *_kinds(peak, total)]
    told.append("  by the line that made them")
    made: dict[str, list[LiveBlock]] = {}
    for block in peak.blocks:
        made.setdefault(place(block), []).append(block)
    ranked = sorted(
        ((where, *_sum(blocks), blocks) for where, blocks in made.items()), key=lambda row: (-row[1], row[0])
    )
    rows = [(where, nbytes, _what(count, blocks)) for where, nbytes, count, blocks in ranked[:MAX_LINES]]
    rest = ranked[MAX_LINES:]
    if rest:
        rows.append((f"{len(rest)} more lines", sum(row[1] for row in rest), _what(sum(row[2] for row in rest), [])))
    return told + _table(rows, total) + ["  " + verdict(peak)]


def kinds_and_verdict(peak: Peak) -> list[str]:
    """The report without lines, where nobody has watched who made what."""
    total = sum(block.bytes for block in peak.blocks)
    return [_title(peak, total), *_kinds(peak, total), "  " + verdict(peak)]


def _title(peak: Peak, total: int, who: str = "") -> str:
    when = "at its peak" if peak.asked is None else "when it ran out of memory"
    return f"{who}GPU {peak.gpu} ({peak.card}, {size(peak.capacity)}) {when}: {size(total)}"


def _kinds(peak: Peak, total: int) -> list[str]:
    kinds = {kind: _sum(block for block in peak.blocks if _kind(block) == kind) for kind in KINDS}
    return _table([(kind, nbytes, "") for kind, (nbytes, _) in kinds.items() if nbytes], total)


def place(block: LiveBlock) -> str:
    """The line that made a block, once `own_frames` has left out PyTorch's."""
    if not block.frames:
        return "(made before frames were recorded)"
    file, line, function = block.frames[0]
    return f"{os.path.basename(file)}:{line} {function}"


def verdict(peak: Peak) -> str:
    """Does it fit, and what would have to go?"""
    taken = peak.reserved + peak.other
    left = peak.capacity - taken
    if peak.asked is None:
        held = sum(block.bytes for block in peak.blocks)
        cache = f"; {size(peak.reserved - held)} of what is reserved was not in use" if peak.reserved > held else ""
        return f"It fits: {size(taken)} of {size(peak.capacity)} taken, {size(left)} left{cache}."
    missing = peak.asked - max(0, left)
    told = f"It does not fit: {size(peak.asked)} more were asked for, with {size(max(0, left))} free"
    if missing <= 0:
        return f"{told}; the program is not allowed more."
    kinds = {kind: _sum(block for block in peak.blocks if _kind(block) == kind)[0] for kind in KINDS}
    enough = [kind for kind in KINDS if kinds[kind] >= missing]
    which = (
        f"; as much as {' or '.join(f'{100 * missing / kinds[kind]:.0f} % of the {kind}' for kind in enough)}"
        if enough
        else f"; no kind alone holds that much, all together hold {size(sum(kinds.values()))}"
    )
    return f"{told}: at least {size(missing)} would have to go{which}."


def _kind(block: LiveBlock) -> str:
    return block.kind if block.kind in KINDS else "other"


def _sum(blocks: Iterable[LiveBlock]) -> tuple[int, int]:
    sizes = [block.bytes for block in blocks]
    return sum(sizes), len(sizes)


def _what(count: int, blocks: list[LiveBlock]) -> str:
    kinds = sorted({_kind(block) for block in blocks}, key=KINDS.index)
    return ", ".join([f"{count} block{'s' * (count > 1)}", *kinds])


def _table(rows: list[tuple[str, int, str]], total: int) -> list[str]:
    if not rows:
        return ["    nothing"]
    width = max(len(name) for name, _, _ in rows)
    return [
        f"    {name:<{width}}  {size(nbytes):>11}  {100 * nbytes / total:3.0f} %  {more}".rstrip()
        for name, nbytes, more in rows
    ]


def _peak(record: dict) -> Peak:
    blocks = tuple(
        LiveBlock(block["bytes"], block["kind"], tuple(tuple(frame) for frame in block["frames"]))
        for block in record.pop("blocks")
    )
    return Peak(blocks=blocks, **record)
