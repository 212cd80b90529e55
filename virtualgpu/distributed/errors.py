"""Whatever keeps ranks from meeting becomes PyTorch's DistBackendError, which says who did not come."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import distributed as dist

from virtualgpu.distributed.arrivals import RankEnded, RankLate

ORDER = "Do all ranks call the same collectives in the same order?"


class Naming:
    """In a with-block: errors name the ranks that did not come. where: what this rank waits in; ranks: the global rank of each member;
    ended, behind: the members that are gone, and that are late, where an error does not say.
    """

    def __init__(
        self,
        where: str,
        ranks: Sequence[int],
        timeout: timedelta,
        ended: Callable[[], list[int]] = list,
        behind: Callable[[], list[int]] = list,
    ):
        self.where, self.ranks, self.timeout, self.ended, self.behind = where, ranks, timeout, ended, behind

    def __enter__(self) -> None:
        pass

    def __exit__(self, _, error, trace) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, (torch.OutOfMemoryError, dist.DistBackendError)):
            return
        text = str(error)
        if isinstance(error, RankEnded) and error.alive:
            raise dist.DistBackendError(
                f"{self.where}: {self._ranks([error.rank])} will not come to it: it has returned, or destroyed the group. {ORDER}"
            ) from error
        if isinstance(error, RankEnded) or "Connection closed by peer" in text or "Connection reset" in text:
            gone = [error.rank] if isinstance(error, RankEnded) else self.ended()
            raise dist.DistBackendError(
                f"{self.where}: {self._ranks(gone) or 'another rank'} has ended, and this rank waited for it. What stopped it stands in "
                "its own output"
            ) from error
        if isinstance(error, RankLate) or "timed out" in text.lower():
            late = error.ranks if isinstance(error, RankLate) else self.behind()
            raise dist.DistBackendError(
                f"{self.where} timed out after {self.timeout.total_seconds():g} s: {self._ranks(late) or 'another rank'} had not come to "
                f"it. {ORDER} The limit is init_process_group(timeout=...)"
            ) from error

    def _ranks(self, members: list[int]) -> str:
        return f"rank {', '.join(str(self.ranks[member]) for member in members)}" if members else ""
