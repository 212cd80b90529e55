"""Whatever keeps ranks from meeting becomes PyTorch's DistBackendError, which says who did not come."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import distributed as dist

from virtualgpu.distributed.arrivals import RankEnded, RankLate

ORDER = "Do all ranks call the same collectives in the same order?"


def explain(
    error: RuntimeError,
    where: str,
    ranks: Sequence[int],
    timeout: timedelta,
    ended: Callable[[], list[int]] = list,
    behind: Callable[[], list[int]] = list,
) -> None:
    """Raises DistBackendError, which names the ranks that did not come; returns where the error is about something else.

    where: what this rank waited in; ranks: the global rank of each member; ended, behind: the members that are gone, and that are late,
    where the error does not say.
    """
    if isinstance(error, (torch.OutOfMemoryError, dist.DistBackendError)):
        return
    text = str(error)
    if isinstance(error, RankEnded) and error.alive:
        message = f"{where}: {_names([error.rank], ranks)} will not come to it: it has returned, or destroyed the group. {ORDER}"
    elif isinstance(error, RankEnded) or "Connection closed by peer" in text or "Connection reset" in text:
        gone = [error.rank] if isinstance(error, RankEnded) else ended()
        message = f"{where}: {_names(gone, ranks)} has ended, and this rank waited for it. What stopped it stands in its own output"
    elif isinstance(error, RankLate) or "timed out" in text.lower():
        late = error.ranks if isinstance(error, RankLate) else behind()
        message = (
            f"{where} timed out after {timeout.total_seconds():g} s: {_names(late, ranks)} had not come to it. {ORDER} "
            "The limit is init_process_group(timeout=...)"
        )
    else:
        return
    raise dist.DistBackendError(message) from error


def _names(members: list[int], ranks: Sequence[int]) -> str:
    return f"rank {', '.join(str(ranks[member]) for member in members)}" if members else "another rank"
