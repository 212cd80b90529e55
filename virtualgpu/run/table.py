"""The table at the end of a run: what each GPU came to, over all processes that used it."""

from collections.abc import Sequence
from itertools import groupby

from virtualgpu.environment import Card, Settings
from virtualgpu.memory.ledger import Entry, Usage, by_rank


def lines(entries: list[Entry], settings: Settings) -> list[str]:
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
        usage, together = merge(spans)
        shared |= together
        rows.append((str(index), *(_figures(usage, card) if spans else ("not used", "", "", "", "", ""))))
    text = [f"{title}, {len(used)} process{'es' * (len(used) > 1)}", *columns(rows)]
    if shared:
        text.append("Where processes shared a GPU at the same time, their peaks are added: an upper bound.")
    return text + _collectives(used)


def _collectives(entries: list[Entry]) -> list[str]:
    """What each rank's collectives came to, where there were any."""
    rows: list[tuple[str, ...]] = [
        ("launch", "rank", "collectives", "bytes", "seconds", "hidden by kernels", "waited for the last")
    ]
    numbers = {id(entry): number for number, entry in enumerate(entries)}
    launches = _launches([entry for entry in entries if entry.communication.count])
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
    return columns(rows) if len(rows) > 1 else []


def _launches(entries: list[Entry]) -> list[list[Entry]]:
    """Processes that were there together: ranks of one launch meet, and the next one begins when they have ended."""
    together: list[list[Entry]] = []
    for entry in sorted(entries, key=lambda entry: (entry.born, entry.pid)):
        if together and entry.born < max(other.last for other in together[-1]):
            together[-1].append(entry)
        else:
            together.append([entry])
    return together


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (), gap: str = "  ") -> list[str]:
    """Lines of text, one a row. left: columns whose cells begin at the left; others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return [gap.join(row).rstrip() for row in cells]


def merge(spans: list[tuple[int, int, Usage]]) -> tuple[Usage, bool]:
    """One GPU over its processes, each with wall-clock begin and end; and whether any two of them were there together.

    Processes one after the other: the largest peak, times added. At the same time: peaks added, the longest time.
    """
    groups: list[list[tuple[int, int, Usage]]] = []
    for span in sorted(spans, key=lambda span: span[:2]):
        if groups and span[0] < max(end for _, end, _ in groups[-1]):
            groups[-1].append(span)
        else:
            groups.append([span])
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
