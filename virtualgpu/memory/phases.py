"""What a recorded step held of which kind: told from a snapshot's trace by the phase that made each block, as somebody can who has only that file.
(`run/peaks.py` is told by modules and optimizers while the program runs, and needs no phases.)"""

from collections.abc import Iterator, Mapping, Sequence

KEPT = {"model": "parameters", "forward": "activations", "backward": "gradients", "optimizer": "optimizer state"}


def kinds(trace: Sequence[Mapping], phases: Sequence[tuple[int, str]]) -> dict[str, list[float]]:
    """MiB held after each event of a snapshot's trace (`snapshot["device_traces"][0]`), one list a kind.

    phases: (number of the first event, "model", "forward", "backward" or "optimizer") in order. A block's kind is told by the
    phase that made it, if it outlives that phase: what backward leaves behind are gradients. What does not is temporary.
    """
    ends = [start for start, _ in phases[1:]] + [len(trace)]
    held = {kind: [0.0] * len(trace) for kind in (*KEPT.values(), "temporary")}
    for size, start, end in _lives(trace):
        name, over = next((name, over) for (_, name), over in zip(phases, ends, strict=True) if start < over)
        row = held[KEPT[name] if end >= over else "temporary"]
        for index in range(start, end):
            row[index] += size / 2**20
    return held


def _lives(trace: Sequence[Mapping]) -> Iterator[tuple[int, int, int]]:
    """Of each block: bytes, the event that made it, and the one that freed it (len(trace) where none did)."""
    open_: dict[int, tuple[int, int]] = {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            open_[event["addr"]] = event["size"], index
        elif event["action"] == "free_completed" and event["addr"] in open_:
            yield *open_.pop(event["addr"]), index
    for size, start in open_.values():
        yield size, start, len(trace)
