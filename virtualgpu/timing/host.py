"""The host's time, and what its work costs it: launches, views, an optimizer's Python.

Each thread of Python has its own, and in a backward pass one for each GPU (streams.py). How much: host_weights.py, in shares of what an
operation costs the host that is set (hardware/hosts.py).
"""

from collections.abc import Callable

from torch import Tensor, is_grad_enabled

from virtualgpu.hardware.hosts import HOSTS, Host
from virtualgpu.timing.host_weights import FURTHER, STEP, UNRECORDED, Weight
from virtualgpu.timing.queues import Queue
from virtualgpu.timing.streams import HostThread, Streams, graph_task, node_in_cpp

LAUNCH = HOSTS["launch"].forward  # of a question to the driver


class HostTime(Streams):
    """costs: what an operation costs the host. stream_of_leaf: see `Streams`."""

    def __init__(self, costs: Host, stream_of_leaf: Callable[[Tensor], Queue | None] | None = None):
        super().__init__(stream_of_leaf)
        self.costs = costs

    def set_costs(self, costs: Host) -> None:
        """What an operation costs the host from now on."""
        self.costs = costs

    @property
    def host(self) -> float:
        """Now, as this thread of the program sees it."""
        local = self.local
        if local.backward is not None:
            if graph_task() != -1:
                return max(local.backward, default=local.now)
            self._leave_backward(local)
        return local.now

    def inherit(self, now: float) -> None:
        """This thread goes on no earlier than another one's `now`: it was started, or waited for it."""
        self.local.now = max(self.local.now, now)

    def wait_until(self, until: float) -> None:
        """The host waits for a moment."""
        local = self.local
        if self._in_backward(local) and local.backward is not None:
            local.backward = [max(thread, until) for thread in local.backward]
        elif until > local.now:
            local.now = until

    def pass_view(self, gpu: int, weight: Weight) -> None:
        """The thread that serves this GPU makes a view, and launches nothing."""
        local, costs = self.local, self.costs
        if self._in_backward(local) and local.backward is not None:
            local.backward[gpu] += costs.backward * weight.backward
        else:
            local.now += self._cost(weight)

    def pass_step(self, parameters: int, counts: int) -> None:
        """An optimizer's step in lists begins. parameters: that have a gradient. counts: of steps, that it keeps on the CPU."""
        once, each, of_count = STEP
        self.wait_until(self.host + self.costs.optimizer * (once + each * parameters + of_count * counts))

    def pass_time(self) -> None:
        """The host asks for something, which takes as long as a launch."""
        self.wait_until(self.host + LAUNCH)

    def over(self, moment: float) -> bool:
        """Has the host come to that moment? Where it has not, asking takes a moment, so that who asks again and again comes to it."""
        if moment > self.host:
            self.pass_time()
        return moment <= self.host

    def _cost(self, weight: Weight) -> float:
        """Seconds of an operation that Python calls; less where autograd takes no notes."""
        cost = self.costs.forward * weight.forward
        return cost if is_grad_enabled() else UNRECORDED * cost

    def _cost_in_backward(self, local: HostThread, weight: Weight) -> float:
        """Seconds of an operation in a backward pass. What a node calls after its first operation costs C++ a launch and little else; what
        Python calls there (a checkpoint that computes again, a function of its own) costs what it does in a forward pass."""
        if is_grad_enabled():
            return self._cost(weight)
        key = node_in_cpp()
        again, local.launched_by = key is not None and key == local.launched_by, key
        return self.costs.backward * (
            weight.backward if not again or weight.backward > 1.0 else FURTHER * weight.backward
        )
