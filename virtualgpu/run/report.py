"""What lay on each GPU at its peak, by kind and by the line that made it; and whether it fits.

A process hands over, for each GPU, a `Peak`: the blocks that were there when its memory stood highest, or when it ran out.
`lines` tells it. Under the runner `leave` writes this process's peaks to the folder, and `collect` reads them all.
"""

import os
import sys
from collections.abc import Iterable
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.run import left
from virtualgpu.run.table import columns, size

LEFT = "report"
KINDS = ("parameters", "gradients", "optimizer", "activations", "cuBLAS workspaces", "other")
MAX_LINES = 10  # lines of a program that are told; the rest is one line
LIBRARIES = ("torch", "torchvision", "virtualgpu", "contextlib", "threading")  # a line in these is nobody's to change
Frame = tuple[str, int, str]  # file, line and function


class LiveBlock(NamedTuple):
    """One block of a GPU's memory. bytes: rounded, as the allocator counts it. kind: one of KINDS. frame: where the program made it."""

    bytes: int
    kind: str
    frame: Frame | None = None


class Peak(NamedTuple):
    """One GPU of one process at its highest. Sizes in bytes. reserved: by PyTorch's allocator, at its own peak. other: the CUDA context, and
    other processes on this GPU. asked: what could not be had, where the program ran out of memory."""

    gpu: int
    card: str
    capacity: int
    reserved: int
    other: int = 0
    blocks: tuple[LiveBlock, ...] = ()
    asked: int | None = None
    rank: int = -1
    pid: int = 0

    @classmethod
    def of(cls, gpu, blocks: Iterable[LiveBlock], asked: int | None = None, reserved: int | None = None) -> "Peak":
        """With these blocks on the engine's GPU; reserved: what is now unless given."""
        memory = gpu.settled()
        reserved = memory.reserved if reserved is None else reserved
        other = memory.context + memory.others_held
        return cls(gpu.physical, gpu.spec.name, memory.capacity, reserved, other, tuple(blocks), asked)


def leave(folder: str, peaks: Iterable[Peak]) -> None:
    """Write this process's peaks for the runner."""
    peaks = [peak._replace(rank=environment.rank(), pid=os.getpid()) for peak in peaks]
    if peaks:
        left.leave(folder, LEFT, peaks)


def own_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """From the first frame on that is the reader's own code; the innermost alone where none is."""
    frames = tuple(frames)
    files = [file for name in LIBRARIES if (file := getattr(sys.modules.get(name), "__file__", None))]
    libraries = tuple(
        os.path.join(os.path.dirname(file), "") if os.path.basename(file) == "__init__.py" else file for file in files
    )
    first = next((index for index, frame in enumerate(frames) if not frame[0].startswith(libraries)), None)
    return frames[:1] if first is None else frames[first:]


def collect(folder: str) -> list[str]:
    """What the processes left, as lines of text: by rank or pid, then by GPU."""
    records = [record for _, record in left.collect(folder, LEFT)]
    lost, peaks = records.count(None), [Peak(*peak) for record in records for peak in record or ()]
    peaks = [peak._replace(blocks=tuple(LiveBlock(*block) for block in peak.blocks)) for peak in peaks]
    peaks.sort(key=lambda peak: (peak.rank, peak.pid, peak.gpu))
    several = len({peak.pid for peak in peaks}) > 1
    text = [f"Report: {lost} process{'es' * (lost > 1)} did not finish writing one."] if lost else []
    for peak in peaks:
        who = f"rank {peak.rank}, " if peak.rank >= 0 else f"process {peak.pid}, " if several else ""
        text += ["", *lines(peak, who)]
    return text or ["Report: no process left one (a process that is killed, or ends by os._exit, leaves none)."]


def lines(peak: Peak, who: str = "") -> list[str]:
    """The report on one GPU."""
    total = sum(block.bytes for block in peak.blocks)
    made: dict[str, list[LiveBlock]] = {}
    for block in peak.blocks:
        made.setdefault(place(block), []).append(block)
    ranked = sorted(
        ((where, sum(block.bytes for block in blocks), blocks) for where, blocks in made.items()),
        key=lambda row: (-row[1], row[0]),
    )
    rows = [(where, nbytes, _what(len(blocks), blocks)) for where, nbytes, blocks in ranked[:MAX_LINES]]
    if rest := ranked[MAX_LINES:]:
        count = sum(len(blocks) for _, _, blocks in rest)
        rows.append((f"{len(rest)} more lines", sum(nbytes for _, nbytes, _ in rest), _what(count, [])))
    title = f"{_title(peak, total, who)} in {len(peak.blocks)} blocks"
    by_line = ["  by the line that made them", *_table(rows, total)]
    return [title, *_kinds(peak, total), *by_line, "  " + verdict(peak)]


def kinds_and_verdict(peak: Peak) -> list[str]:
    """The report without lines, where nobody has watched who made what."""
    total = sum(block.bytes for block in peak.blocks)
    return [_title(peak, total), *_kinds(peak, total), "  " + verdict(peak)]


def _title(peak: Peak, total: int, who: str = "") -> str:
    when = "at its peak" if peak.asked is None else "when it ran out of memory"
    return f"{who}GPU {peak.gpu} ({peak.card}, {size(peak.capacity)}) {when}: {size(total)}"


def _kinds(peak: Peak, total: int) -> list[str]:
    return _table([(kind, nbytes, "") for kind, nbytes in _by_kind(peak).items() if nbytes], total)


def place(block: LiveBlock) -> str:
    """The line that made a block."""
    if block.frame is None:
        return "(made before frames were recorded)"
    file, line, function = block.frame
    return f"{os.path.basename(file)}:{line} {function}"


def verdict(peak: Peak) -> str:
    """Does it fit, and what would have to go?"""
    taken, kinds = peak.reserved + peak.other, _by_kind(peak)
    free, held = peak.capacity - taken, sum(kinds.values())
    if peak.asked is None:
        cache = f"; {size(peak.reserved - held)} of what is reserved was not in use" if peak.reserved > held else ""
        return f"It fits: {size(taken)} of {size(peak.capacity)} taken, {size(free)} left{cache}."
    missing = peak.asked - max(0, free)
    sentence = f"It does not fit: {size(peak.asked)} more were asked for, with {size(max(0, free))} free"
    if missing <= 0:
        return f"{sentence}; the program is not allowed more."
    enough = [f"{100 * missing / kinds[kind]:.0f} % of the {kind}" for kind in KINDS if kinds[kind] >= missing]
    none = f"no kind alone holds that much, all together hold {size(held)}"
    which = f"as much as {' or '.join(enough)}" if enough else none
    return f"{sentence}: at least {size(missing)} would have to go; {which}."


def _by_kind(peak: Peak) -> dict[str, int]:
    """Bytes of each of KINDS."""
    kinds = dict.fromkeys(KINDS, 0)
    for block in peak.blocks:
        kinds[_kind(block)] += block.bytes
    return kinds


def _kind(block: LiveBlock) -> str:
    return block.kind if block.kind in KINDS else "other"


def _what(count: int, blocks: list[LiveBlock]) -> str:
    kinds = sorted({_kind(block) for block in blocks}, key=KINDS.index)
    return ", ".join([f"{count} block{'s' * (count > 1)}", *kinds])


def _table(rows: list[tuple[str, int, str]], total: int) -> list[str]:
    cells = [(name, f"{size(nbytes):>11}", f"{100 * nbytes / total:3.0f} %", more) for name, nbytes, more in rows]
    return [f"    {line}" for line in columns(cells, left=(0, 3))] or ["    nothing"]
