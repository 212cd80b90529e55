"""Who has waited for whom: what of each stream's work is surely done before the next work of another stream, or of the host.

Vector clocks: every work of a stream has a number, from 1, and each stream knows up to which number of every other stream it has
waited. Simulated time decides nothing here: what happened to be done early enough is still a race.
"""

from virtualgpu.timing.streams import Queue

State = dict[Queue, int]  # of each stream: up to this number its work is done


class Order:
    """Of one process. All its threads are one host here: who waited in one thread may tell the others in ways that are not seen."""

    def __init__(self):
        self._count: State = {}
        self._seen: dict[Queue, State] = {}
        self._host: State = {}

    def next(self, queue: Queue) -> int:
        """The number of new work on that stream."""
        number = self._count[queue] = self._count.get(queue, 0) + 1
        return number

    def state(self, queue: Queue) -> State:
        """What is done when the stream has come to here: its own work, and all that it has waited for."""
        return {**self._seen.get(queue, {}), queue: self._count.get(queue, 0)}

    def wait(self, queue: Queue, state: State) -> None:
        """What comes on that stream from now on comes after that state."""
        _merge(self._seen.setdefault(queue, {}), state)

    def meet(self, one: Queue, other: Queue) -> None:
        """Each of two streams waits for the other."""
        states = self.state(one), self.state(other)
        self.wait(one, states[1])
        self.wait(other, states[0])

    def host_waits(self, state: State) -> None:
        """The host has waited for that state, or has been told that it is reached; so has all that it launches from now on."""
        _merge(self._host, state)

    def known_to_host(self, queue: Queue, number: int) -> bool:
        """Is this work of that stream done, as far as the host can know?"""
        return number <= self._host.get(queue, 0)

    def is_done(self, queue: Queue, number: int, here: Queue) -> bool:
        """Is this work of stream `queue` done before the next work of stream `here`?"""
        return queue is here or number <= self._host.get(queue, 0) or number <= self._seen.get(here, {}).get(queue, 0)


def _merge(into: State, state: State) -> None:
    for queue, number in state.items():
        if number > into.get(queue, 0):
            into[queue] = number
