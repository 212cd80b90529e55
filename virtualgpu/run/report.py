"""What is told at the end of a run: a table of what each GPU came to, and what lay on it at its peak."""

import os
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple, TypeVar

from virtualgpu import environment
from virtualgpu.environment import Card, Settings
from virtualgpu.hardware.units import text_table
from virtualgpu.memory.ledger import Entry, Usage, by_rank
from virtualgpu.run import results

Item = TypeVar("Item")

# -- The table at the end of a run: what each GPU came to, over all processes that used it.


def table_lines(entries: list[Entry], settings: Settings) -> list[str]:
    """The table as lines of text."""
    title = f"virtualgpu: {names(settings.cards)}{', dry run' if settings.dry else ''}"
    used = [entry for entry in entries if any(map(_is_used, entry.gpus))]
    if not used:
        return [f"{title}: no process used a GPU"]
    shared = False
    rows: list[tuple[str, ...]] = [
        ("GPU", "peak allocated", "peak reserved", "of capacity", "busy", "computing", "simulated")
    ]
    for index, card in enumerate(settings.cards):
        spans = [(e.born, e.last, e.gpus[index]) for e in used if index < len(e.gpus) and _is_used(e.gpus[index])]
        usage, is_shared = merge(spans)
        shared |= is_shared
        rows.append((str(index), *(_figures(usage, card) if spans else ("not used", "", "", "", "", ""))))
    text = [f"{title}, {len(used)} process{'es' * (len(used) > 1)}", *text_table(rows)]
    if shared:
        text.append("Where processes shared a GPU at the same time, their peaks are added: an upper bound.")
    return text + _collectives(used)


def _collectives(entries: list[Entry]) -> list[str]:
    """What each rank's collectives came to, where there were any."""
    rows: list[tuple[str, ...]] = [
        ("launch", "rank", "collectives", "bytes", "seconds", "hidden by kernels", "waited for the last")
    ]
    numbers = {id(entry): number for number, entry in enumerate(entries)}
    communicated = [entry for entry in entries if entry.communication.count]
    launches = together(
        communicated, lambda entry: (entry.born, entry.last)
    )  # the next one begins when its ranks have ended
    for launch, ranks in enumerate(launches):
        for _, entry in by_rank(ranks):
            what = entry.communication
            rows.append(
                (
                    str(launch),
                    str(entry.rank if entry.rank >= 0 else numbers[id(entry)]),
                    str(what.count),
                    size(what.nbytes),
                    f"{what.seconds:.3g} s",
                    f"{100 * what.hidden / what.seconds:.0f} %" if what.seconds else "",
                    f"{what.waited:.3g} s",
                )
            )
    if len(launches) < 2:
        rows = [row[1:] for row in rows]
    return text_table(rows) if len(rows) > 1 else []


def together(items: Iterable[Item], span: Callable[[Item], tuple[int, int]]) -> list[list[Item]]:
    """Groups of those that were there at the same time, by their beginnings. span: when one began and ended."""
    groups: list[list[Item]] = []
    for item in sorted(items, key=span):
        if groups and span(item)[0] < max(span(other)[1] for other in groups[-1]):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def merge(spans: list[tuple[int, int, Usage]]) -> tuple[Usage, bool]:
    """One GPU over its processes, each with wall-clock begin and end; and whether any two of them were there together.

    Processes one after the other: the largest peak, times added. At the same time: peaks added, the longest time.
    """
    groups = together(spans, lambda span: span[:2])
    total = Usage(0, 0, 0, 0.0, 0.0)
    for group in groups:
        usages = [usage for _, _, usage in group]
        computing, longest = sum(usage.computing for usage in usages), max(usage.now for usage in usages)
        total = Usage(
            0,
            max(total.peak_allocated, sum(usage.peak_allocated for usage in usages)),
            max(total.peak_reserved, sum(usage.peak_reserved for usage in usages)),
            total.busy + min(sum(usage.busy for usage in usages), max(computing, longest)),
            total.now + max(computing, longest),  # kernels of one GPU take turns
            total.computing + computing,
        )
    return total, len(groups) < len(spans)


def _is_used(usage: Usage) -> bool:
    return bool(usage.peak_reserved or usage.busy)


def _figures(usage: Usage, card: Card) -> tuple[str, ...]:
    return (
        size(usage.peak_allocated),
        size(usage.peak_reserved),
        f"{100 * usage.peak_reserved / card.memory:.0f} % of {size(card.memory)}",
        f"{100 * usage.busy / usage.now:.0f} %" if usage.now else "",
        f"{100 * usage.computing / usage.now:.0f} %" if usage.now else "",
        f"{usage.now:.3g} s",
    )


def names(cards: tuple[Card, ...]) -> str:
    """2 x Tesla T4, 1 x NVIDIA L4."""
    return ", ".join(f"{len(list(same))} x {name}" for name, same in groupby(card.name for card in cards))


def size(nbytes: int) -> str:
    """Bytes for people: 1.50 GiB, 512.00 MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.2f} {unit}"
    return f"{nbytes} bytes"


# -- What lay on each GPU at its peak, by kind and by the line that made it; and whether it fits.
#
# A process hands over, for each GPU, a `Peak`: the blocks that were there when its memory stood highest, or when it ran out.
# `lines` tells it. Under the runner `leave` writes this process's peaks to the folder, and `collect` reads them all.


LEFT = "report"
KINDS = ("parameters", "gradients", "optimizer", "activations", "cuBLAS workspaces", "other")
MAX_LINES = 10  # lines of a program that are told; the rest is one line
LIBRARIES = ("torch", "torchvision", "virtualgpu", "contextlib", "threading")  # a line in these is nobody's to change
Frame = tuple[str, int, str]  # file, line and function
OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
STANDARD_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")


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
        results.leave(folder, LEFT, peaks)


def is_the_programs(file: str) -> bool:
    """Of the program, not of Python, a package, a command such as torchrun, or ours."""
    others = (OURS, STANDARD_LIBRARY, "<frozen ")
    is_installed = "site-packages" in file or "dist-packages" in file
    is_command = os.path.basename(os.path.dirname(file)) == "bin" and not file.endswith(".py")
    return not file.startswith(others) and not is_installed and not is_command


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
    records = [record for _, record in results.collect(folder, LEFT)]
    lost, peaks = records.count(None), [Peak(*peak) for record in records for peak in record or ()]
    peaks = [peak._replace(blocks=tuple(LiveBlock(*block) for block in peak.blocks)) for peak in peaks]
    peaks.sort(key=lambda peak: (peak.rank, peak.pid, peak.gpu))
    several = len({peak.pid for peak in peaks}) > 1
    text = [f"Report: {lost} process{'es' * (lost > 1)} did not finish writing one."] if lost else []
    for peak in peaks:
        who = f"rank {peak.rank}, " if peak.rank >= 0 else f"process {peak.pid}, " if several else ""
        text += ["", *peak_lines(peak, who)]
    return text or ["Report: no process left one (a process that is killed, or ends by os._exit, leaves none)."]


def peak_lines(peak: Peak, who: str = "") -> list[str]:
    """The report on one GPU."""
    total = sum(block.bytes for block in peak.blocks)
    blocks_by_line: dict[str, list[LiveBlock]] = {}
    for block in peak.blocks:
        blocks_by_line.setdefault(place(block), []).append(block)
    ranked = sorted(
        ((where, sum(block.bytes for block in blocks), blocks) for where, blocks in blocks_by_line.items()),
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
    return [f"    {line}" for line in text_table(cells, left=(0, 3))] or ["    nothing"]
