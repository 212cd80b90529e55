"""Messages that wait for each other: who stands where, in the words of what each rank called, and what would help."""

from collections.abc import Sequence
from typing import NamedTuple

from virtualgpu.distributed.message_log import SEND, Hang, MessageLog
from virtualgpu.distributed.nodes import Layout
from virtualgpu.hardware.fabric import STEPS
from virtualgpu.timing.streams import DEFAULT


class Stuck(NamedTuple):
    """A message at which a rank stands. Ranks count within the group; index as in `message_log.Message`; stream: that it was called on."""

    rank: int
    direction: int
    peer: int
    index: int
    nbytes: int
    stream: int


def words(hang: Hang, log: MessageLog, ranks: Sequence[int], layout: Layout) -> str:
    """Who waits for whom, why NCCL would hang there, and the cure. ranks: the global rank of each member."""
    stuck = _called(hang, log) if hang.circle else _carried(hang, log)
    first = stuck.index(min(stuck))
    stuck = stuck[first:] + stuck[:first]  # whoever tells it
    members = sorted({ranks[one.rank] for one in stuck})
    who = "both ranks" if len(members) == 2 else f"ranks {', '.join(map(str, members))}"
    sends = [one for one in stuck if one.direction == SEND]
    if not sends:
        does, cure = "receive first", "Let one of them send first, or use batch_isend_irecv"
    elif len(sends) == len(stuck):
        does, cure = "send first", "Use batch_isend_irecv, or let one of them receive first"
    else:
        does, cure = "wait for each other", "Use batch_isend_irecv, or call both sides of each message in one order"
    calls = ", ".join(_call(one, ranks) for one in stuck)
    reason = "; ".join(dict.fromkeys(_reason(one, layout) for one in sends))
    beside = any(one.stream != DEFAULT for one in stuck) and len(members) > 2
    apart = " (on streams that do not wait for each other a GPU may go on: here the host waits)" if beside else ""
    return f"{who} {does}, and NCCL would hang{apart}: {calls}{'; ' * bool(reason)}{reason}. {cure}"


def _called(hang: Hang, log: MessageLog) -> list[Stuck]:
    """Of ranks whose hosts wait, each until another one has come to the other side of a message: most often of its own."""
    return [_stuck(log, awaited.peer, 1 - awaited.direction, awaited.rank, awaited.index) for _, awaited in hang.circle]


def _carried(hang: Hang, log: MessageLog) -> list[Stuck]:
    """Of batches on streams, each behind one that waits for the other rank."""
    stuck = []
    for (rank, number), (other, before) in zip(hang.path, hang.path[1:], strict=False):
        if rank == other and log.batches[rank][number].after == before:
            message = log.batches[rank][before].messages[0]
            stuck.append(_stuck(log, rank, message.direction, message.peer, message.index))
    return stuck


def _stuck(log: MessageLog, rank: int, direction: int, peer: int, index: int) -> Stuck:
    batch = log.batches[rank][log.batch_with(rank, direction, peer, index)]
    return Stuck(rank, direction, peer, index, log.nbytes(rank, direction, peer, index), batch.stream)


def _call(one: Stuck, ranks: Sequence[int]) -> str:
    what = f"sends {one.nbytes:,} bytes to" if one.direction == SEND else "receives from"
    on = f" on stream {one.stream}" if one.stream != DEFAULT else ""
    return f"rank {ranks[one.rank]} {what} rank {ranks[one.peer]}{on}"


def _reason(one: Stuck, layout: Layout) -> str:
    room = STEPS * layout.step(one.rank, one.peer)
    if one.nbytes > room:
        return f"a message of more than {room >> 20} MiB leaves its sender when the receiver has come to it"
    if one.index == 0:
        return "the first message of a direction connects its sender with its receiver, and returns when both have come to it"
    return f"NCCL's buffer has room for {STEPS} small messages that nobody has received"
