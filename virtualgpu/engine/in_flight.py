"""Numbers on their way: the memory that a collective fills, or reads, until they have come.

Collectives of one communicator run one after the other on a GPU, so several may be of one tensor. And all is computed in the program's
order here, so who uses a tensor without wait() (a race: the sanitizer's concern) gets the numbers that the collective brings. In both
cases whoever comes second lets the first finish.
"""

import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch

from virtualgpu import _compat
from virtualgpu.engine.allocation import reach, storage_of


class _Part(NamedTuple):
    """Bytes of a storage, from `begin` to `end`."""

    begin: int
    end: int
    fills: bool
    work: object


class InFlight:
    """Of one machine. parts: of each storage, by its address in C++; the work that uses it keeps it alive."""

    def __init__(self):
        self.parts: dict[int, list[_Part]] = {}
        self._lock = threading.Lock()

    def add(self, work, filled: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> None:
        """From now on until `remove`, `work` fills and reads these."""
        with self._lock:
            for fills, tensors in ((True, filled), (False, read)):
                for tensor in tensors:
                    self.parts.setdefault(_storage(tensor), []).append(_Part(*_extent(tensor), fills, work))

    def remove(self, work, tensors: Iterable[torch.Tensor]) -> None:
        """It is done with them."""
        with self._lock:
            for storage in set(map(_storage, tensors)):
                rest = [part for part in self.parts.pop(storage, []) if part.work is not work]
                if rest:
                    self.parts[storage] = rest

    def let_finish(self, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor] = ()) -> None:
        """Somebody uses `tensors`, and writes to `written`: what fills the former, or reads the latter, finishes first."""
        for writes, used in ((False, tensors), (True, written)):
            for tensor in used:
                known = self.parts.get(_storage(tensor))
                if known is None:
                    continue
                begin, end = _extent(tensor)
                for part in list(known):
                    if (writes or part.fills) and part.begin < end and begin < part.end:
                        part.work.finish()


def _storage(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else _compat.address(storage)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    size, begin = tensor.element_size(), tensor.storage_offset()
    if not tensor.numel():
        return 0, 0
    return begin * size, (begin + reach(tensor)) * size
