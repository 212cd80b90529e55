"""What the allocator asks about time: blocks that a stream still uses are not free yet."""

from typing import Protocol


class Timeline(Protocol):
    """What the allocator asks about time, in seconds."""

    def now(self) -> float:
        """As the host sees it."""

    def ready(self, stream: int) -> float:
        """When the stream is done with all that is queued on it so far."""

    def wait_until(self, moment: float) -> None:
        """The host waits."""


class Untimed:
    """All is done at once."""

    def now(self) -> float:
        """Always 0."""
        return 0.0

    def ready(self, stream: int) -> float:
        """Always 0: every stream is done."""
        return 0.0

    def wait_until(self, moment: float) -> None:
        """Returns at once."""
        pass
