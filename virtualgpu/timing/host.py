"""The host's time: what launches, views and an optimizer's Python cost a processor, operation by operation (data/)."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, is_grad_enabled

from virtualgpu import _compat
from virtualgpu.hardware.machine import HOSTS, Host
from virtualgpu.timing.kernels import read_table
from virtualgpu.timing.streams import HostThread, Queue, Streams, graph_task

# -- What an operation costs the host beside the average one: some look for an algorithm, ask for workspaces or start several kernels.
#
# data/host_weights.csv, which tests/gpu/host_table.py writes. What autograd does with a parameter's gradient is in the weight of the operation that
# makes it; views that C++ calls by the thousand (`view`, `t`, `expand`, `slice`, `detach`: linear, matmul, autograd, DDP) in that of their caller.


class Weight(NamedTuple):
    """Of an operation in a forward and in a backward pass: shares of `hardware.machine.Host.forward` and `.backward`."""

    forward: float
    backward: float


WEIGHTS = {
    row["operation"]: Weight(float(row["forward"]), float(row["backward"])) for row in read_table("host_weights")
}
AVERAGE, ELEMENTWISE, OF_LIST = (WEIGHTS[name] for name in ("average", "elementwise", "list"))
EVALUATED, BIASED = WEIGHTS["evaluated batch norm"], WEIGHTS["convolution with bias"]
BEGUN = WEIGHTS["backward pass"].backward  # another thread wakes, and this one at the end
BIASES = {
    "convolution": 2,
    "_convolution": 2,
    "convolution_backward": 3,
}  # arguments that say so; of the last its sizes

SIMPLE, FURTHER = ELEMENTWISE.backward, WEIGHTS["further in a node"].backward  # a second product costs as the first
UNRECORDED = WEIGHTS["without autograd"].forward
STEP = [WEIGHTS[name].forward for name in ("step", "step, a parameter", "step, a count of steps on the CPU")]
LOCKED, BROADCAST, REPLICATED = (
    WEIGHTS[f"replicas, {name}"].forward for name in ("Python's lock", "a tensor", "a module")
)


def weight_of(name: str, pointwise: bool, launches: int = 1) -> Weight:
    """Of the operation of that name. launches: its kernels; of what was not measured, each beyond the first costs a bare launch (4 us)."""
    if name in WEIGHTS:
        return WEIGHTS[name]
    first, more = ELEMENTWISE if pointwise else AVERAGE, launches - 1
    return first if not more else Weight(first.forward + 0.2 * more, first.backward + 0.25 * more)


def depends_on_call(name: str, kind) -> bool:
    """Is what an operation of that name and kind costs the host another thing with other arguments (`in_call`)?"""
    return kind.training is not None or name in BIASES


def in_call(op, args) -> Weight:
    """Of the operation with these arguments. op: an engine's, with its name, weight and kind."""
    if op.kind.evaluates(args):
        return EVALUATED
    at = BIASES.get(op.name)
    return op.weight if at is None or args[at] is None or (at == 3 and not args[at][0]) else BIASED


# -- The host's time, and what its work costs it: launches, views, an optimizer's Python.
#
# Each thread of Python has its own, in a backward pass one for each GPU (streams.py). Autograd's threads are C++ and do without Python's lock (GIL).


NOT_MEASURED = contextlib.nullcontext()
LAUNCH = HOSTS["launch"].forward  # of a question to the driver


class Lock:
    """Python's, by how much of each slice of time threads have held it: who comes later takes what is left, whichever is computed first."""

    SLICE, KEPT = 1e-3, 100_000  # seconds; so many slices, the older half of which is then taken as free

    def __init__(self):
        self.left: dict[int, float] = {}

    def hold(self, now: float, seconds: float) -> float:
        """When a thread that wants it from `now` on has had it for so long."""
        index = int(now / self.SLICE)
        free = min(self.left.get(index, self.SLICE), (index + 1) * self.SLICE - now)
        while free < seconds:
            seconds -= free
            self.left[index] = max(0.0, self.left.get(index, self.SLICE) - free)
            index += 1
            now, free = index * self.SLICE, self.left.get(index, self.SLICE)
        self.left[index] = self.left.get(index, self.SLICE) - seconds
        if len(self.left) > self.KEPT:
            self.left = dict([*self.left.items()][self.KEPT // 2 :])
        return now + seconds


class HostTime(Streams):
    """costs: what an operation costs the host. stream_of_leaf: see `Streams`."""

    lock: Lock | None = None  # Python's, once a second thread launches
    own: Any = None  # what the program works beside (torch_api/host_time.py), once it has read a stopwatch

    def __init__(self, costs: Host, stream_of_leaf: Callable[[Tensor], Queue | None] | None = None):
        super().__init__(stream_of_leaf)
        self.costs = costs

    def reset(self, gpus: int) -> None:
        """As new, with so many GPUs."""
        super().reset(gpus)
        self.lock = None

    @property
    def host(self) -> float:
        """Now, as this thread of the program sees it."""
        local = self.local
        if local.backward is not None and graph_task() == -1:
            self._leave_backward(local)
        return local.now if local.backward is None else max(local.backward, default=local.now)

    def inherit(self, now: float) -> None:
        """This thread goes on no earlier than another one's `now`."""
        self.local.now = max(self.local.now, now)

    def measure_own_work(self, measure: Callable) -> None:
        """From now on what the program works passes: see `own`. measure: makes it, of `spend` and of what tells a moment."""
        self.own = measure(self.spend, lambda: (self.host, graph_task() != -1 or self.local.kind == "optimizer"))

    def ours(self) -> contextlib.AbstractContextManager:
        """What is done in here is no work of the program's; what it did before has passed."""
        return self.own or NOT_MEASURED

    def spend(self, seconds: float) -> None:
        """This thread of Python works for so long, if no other one does."""
        local = self.local
        if self._in_backward(local) and local.backward is not None:
            local.backward = [thread + seconds for thread in local.backward]
        else:
            local.now = self._turn(local, local.now + seconds)

    def _turn(self, local: HostThread, until: float) -> float:
        """When a thread of Python comes to what it would come to then, had it the lock to itself."""
        if local.replicas > 1:
            return local.now + max(1.0, LOCKED * local.replicas) * (until - local.now)
        if self.lock is None and not local.contends:
            return until
        self.lock = self.lock or Lock()
        return max(until, self.lock.hold(local.now, LOCKED * (until - local.now)))

    def wait_until(self, until: float) -> None:
        """The host waits for a moment."""
        with self.ours():
            local = self.local
            if self._in_backward(local) and local.backward is not None:
                local.backward = [max(thread, until) for thread in local.backward]
            elif until > local.now:
                local.now = until

    def pass_view(self, gpu: int, weight: Weight) -> None:
        """The thread that serves this GPU makes a view, and launches nothing."""
        local = self.local
        if self._in_backward(local) and local.backward is not None:
            local.backward[gpu] += self.costs.backward * weight.backward
        else:
            local.now = self._turn(local, local.now + self._cost(weight))

    def pass_step(self, parameters: int, counts: int) -> None:
        """An optimizer's step in lists begins. parameters: that have a gradient. counts: of steps, that it keeps on the CPU."""
        self.spend(self.costs.optimizer * (STEP[0] + STEP[1] * parameters + STEP[2] * counts))

    def begins(self) -> float:
        """Seconds until autograd's threads are awake, and this one is again."""
        return BEGUN * self.costs.backward

    def pass_time(self) -> None:
        """The host asks the driver for something."""
        self.wait_until(self.host + LAUNCH)

    def over(self, moment: float) -> bool:
        """Has the host come to that moment? Where it has not, asking takes time, so that who asks again and again comes to it."""
        with self.ours():
            if moment > self.host:
                self.pass_time()
            return moment <= self.host

    def _cost(self, weight: Weight) -> float:
        """Seconds of an operation that Python calls; less where autograd takes no notes."""
        return self.costs.forward * weight.forward * (1.0 if is_grad_enabled() else UNRECORDED)

    def _cost_in_backward(self, local: HostThread, weight: Weight) -> float:
        """Seconds of an operation in a backward pass. What Python calls there (a checkpoint that computes again, a function of its own) costs
        what it does in a forward pass."""
        if is_grad_enabled():
            return self._cost(weight)
        node, key = _compat.current_node(), None  # None: in a function of Python, and in a hook of a leaf
        if node is not None and not isinstance(node, _compat.PythonNode) and not hasattr(node, "variable"):
            key = _compat.sequence_number(node)
        again, local.launched_by = key is not None and key == local.launched_by, key
        return self.costs.backward * weight.backward * (FURTHER if again and weight.backward <= SIMPLE else 1.0)
