"""What each thread is doing with the virtual GPUs.

A dry run holds for the thread that is in it, and for the threads and a pool's work that it starts meanwhile, but not for others: two
threads may have dry runs that overlap, or one a dry run while another computes with numbers. It also outlives a call of gpus(), so it is
kept for the process; everything else is kept for one machine.
"""

import contextlib
import threading
from collections.abc import Iterator


class ThreadContext(threading.local):
    """One thread's, on one machine.

    current: torch.cuda.current_device(). seen: the machine whose dispatch mode the thread has. bypass, nccl, target, counts, replicas:
    set by the blocks below.
    """

    current: int = 0
    seen = None
    bypass: bool = False
    nccl: bool = False
    target = None  # a GPU
    counts: bool = False
    replicas: int = 1

    def saw(self, machine) -> None:
        """See `seen`."""
        self.seen = machine

    def use_device(self, index: int) -> None:
        """torch.cuda.set_device, unchecked."""
        self.current = index

    def untracked(self) -> contextlib.AbstractContextManager[None]:
        """Operations in here are the bookkeeper's own: no place, no memory, no time, and devices are what they really are."""
        return self._while("bypass", True)

    def by_nccl(self) -> contextlib.AbstractContextManager[None]:
        """Copies in here are NCCL's: whoever asked for them books their time."""
        return self._while("nccl", True)

    def made_on(self, gpu) -> contextlib.AbstractContextManager[None]:
        """What C++ makes in here "on the CPU" is this GPU's: its options came from that GPU's tensors."""
        return self._while("target", gpu)

    def counted_by_cpp(self) -> contextlib.AbstractContextManager[None]:
        """What C++ asks room for in here, it writes itself (lengths): a dry run gives it memory."""
        return self._while("counts", True)

    def replicating(self, replicas: int) -> contextlib.AbstractContextManager[None]:
        """Threads that are started in here are so many that do the same, while this one waits for them."""
        return self._while("replicas", replicas)

    @contextlib.contextmanager
    def _while(self, name: str, value) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)


class _Dry(threading.local):
    dry: bool | None = None  # None: as all of the machine's threads


class DryRuns:
    """The process's threads that are in a dry run. some: is there one? epoch: changes each time the last of them ends."""

    def __init__(self):
        self.some, self.epoch = False, 1
        self._count, self._lock, self.thread = 0, threading.Lock(), _Dry()

    @property
    def here(self) -> bool | None:
        """Does this thread work on shapes alone? None: as all of the machine's threads."""
        return self.thread.dry

    @contextlib.contextmanager
    def set_here(self, dry: bool | None) -> Iterator[None]:
        """In this block this thread works on shapes alone (True), with numbers (False), or as all of the machine's threads (None)."""
        thread = self.thread
        before, thread.dry = thread.dry, dry
        self._add(bool(dry))
        try:
            yield
        finally:
            thread.dry = before
            self._add(-bool(dry))

    def _add(self, step: int) -> None:
        with self._lock:
            self._count = max(0, self._count + step)  # a forked process may leave a block that its parent entered
            before, self.some = self.some, self._count > 0
            self.epoch += before and not self.some

    def begin_anew(self) -> None:
        """In a process that was just forked: its one thread computes with numbers."""
        self._count, self._lock, self.thread = 0, threading.Lock(), _Dry()
        self.some, self.epoch = False, self.epoch + 1


dry_runs = DryRuns()
