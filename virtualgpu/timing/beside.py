"""What NCCL's kernels take of one GPU: time in which it is busy without computing, and processors of the kernels beside them.

A kernel of NCCL is there from the moment at which its rank has come to it, also while it waits for the last rank (it polls), so that
nvidia-smi counts all of it as busy. It holds a multiprocessor for each of its blocks, and the kernels beside it have the rest.

When it ends is known only after other ranks have come, and by then the kernels beside it are queued. So they stay where they are,
and what they lose is made up for in one piece: a delay of the stream that next waits for a collective, comes to one, or is waited
for by the host (`charge`). A collective that was launched behind slowed kernels is that much later itself (`lateness`).
"""

from virtualgpu.timing.queues import Engine


class _Stretch:
    """One kernel of NCCL. share: of the GPU's processors that it holds. charged: of the delay that it makes, so far."""

    __slots__ = ("charged", "end", "share", "start")

    def __init__(self, start: float, end: float, share: float):
        self.start, self.end, self.share, self.charged = start, end, share, 0.0

    def shared(self, kernels: Engine, until: float = float("inf")) -> float:
        """For how long kernels run beside it, slowed as they are."""
        end = min(self.end, until)
        if end <= self.start:
            return 0.0
        return min(end - self.start, kernels.overlap(self.start, end) / (1 - self.share))

    def delay(self, kernels: Engine, until: float = float("inf")) -> float:
        """What kernels lose beside it."""
        return self.share * self.shared(kernels, until) if self.share else 0.0


class Beside:
    """Of one GPU. kernels: when its kernels ran. Moments in seconds."""

    def __init__(self, kernels: Engine):
        self.kernels = kernels
        self._covered = Engine()  # by kernels of NCCL
        self._open: list[_Stretch] = []  # parts of it, beside which kernels may still be queued
        self._alone = 0.0  # in the other parts, for how long nothing else ran
        self._slowing: list[_Stretch] = []
        self._past = 0.0  # delays of those that are over
        self.charged = 0.0  # delays so far

    def add(self, came: float, end: float, share: float) -> None:
        """A kernel of NCCL is there then."""
        for part in [part for part in self._open if part.end <= came]:  # kernels begin no earlier than this from now on
            self._alone += part.end - part.start - part.shared(self.kernels)
            self._open.remove(part)
        self._open += [_Stretch(*part, share) for part in self._covered.cover(came, end)]
        for one in [one for one in self._slowing if one.end <= came]:
            if one.delay(self.kernels) <= one.charged:
                self._past += one.charged
                self._slowing.remove(one)
        if share:
            self._slowing.append(_Stretch(came, end, share))

    def alone(self) -> float:
        """For how long kernels of NCCL ran and no others, as far as is known."""
        return self._alone + sum(part.end - part.start - part.shared(self.kernels) for part in self._open)

    def charge(self) -> float:
        """What the kernels queued so far lose, and have not been charged yet."""
        more = 0.0
        for one in self._slowing:
            delay = max(one.charged, one.delay(self.kernels))
            more, one.charged = more + delay - one.charged, delay
        self.charged += more
        return more

    def lateness(self, issued: float, charged: float) -> float:
        """Of a kernel of NCCL that was put behind kernels at `issued`, when so much had been charged."""
        return max(0.0, self._past + sum(one.delay(self.kernels, issued) for one in self._slowing) - charged)
