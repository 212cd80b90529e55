"""What process groups do with tensors, told to the detector: asynchronous work runs on a stream of its own, until wait()."""

import torch

from virtualgpu.engine.machine import Machine
from virtualgpu.sanitizer.detector import Detector
from virtualgpu.sanitizer.waits import after
from virtualgpu.timing.streams import Queue
from virtualgpu.torch_api.registry import Patches

STATE = "_virtual_state"  # of a work: what is done when it is


def install(machine: Machine, patches: Patches, detector: Detector) -> None:
    """Report collectives and messages; nothing where PyTorch was built without torch.distributed."""
    if not torch.distributed.is_available():
        return
    from virtualgpu.distributed.communicator import Communicator
    from virtualgpu.distributed.p2p import RECV, Exchange, Messages
    from virtualgpu.distributed.work import VirtualWork

    clock, order = machine.clock, detector.order
    start, join = Communicator.start, VirtualWork.join

    def collective(work, kind: str, pairs, asynchronous: bool) -> None:
        queue, begun = work.stream, detector.work(kind)
        detector.joined(queue, [clock.current(work.gpu.index)])
        for outputs, inputs in pairs:
            for tensor in inputs:
                begun.touch(tensor, "input", False, queue)
            for tensor in outputs:
                begun.touch(tensor, "output", True, queue)
        _remember(work, queue)
        if kind == "barrier" and not asynchronous:
            order.host_waits(order.state(queue))

    def start_and_tell(of, call, gpu, asynchronous):
        __tracebackhide__ = True
        pairs = list(call.pairs)  # a work that is done lets go of them
        work = start(of, call, gpu, asynchronous)
        if of.machine is machine:
            collective(work, call.kind, pairs, asynchronous)
        return work

    def messages(_, of, exchange) -> None:
        if of.communicator.machine is not machine:
            return
        queue, begun = exchange.stream, detector.work("a message")
        detector.joined(queue, [clock.current(exchange.gpu.index)])
        for way, peer, tensor in exchange.messages:
            begun.operation = ("recv from" if way == RECV else "send to") + f" rank {of.communicator.ranks[peer]}"
            begun.touch(tensor, "tensor", way == RECV, queue)
        _remember(exchange, queue)

    def _remember(work, queue: Queue) -> None:
        with detector.lock:
            setattr(work, STATE, order.state(queue))

    def waits(work) -> None:
        """The current stream waits for it; after a barrier the host does."""
        with detector.lock:
            order.wait(clock.current(work.gpu.index), getattr(work, STATE, {}))
            if getattr(getattr(work, "call", None), "kind", "") == "barrier":
                order.host_waits(getattr(work, STATE, {}))

    def join_and_tell(work):
        waits(work)  # before what is done with the work's future
        return join(work)

    def asked(over, work) -> None:
        if over:
            with detector.lock:
                order.host_waits(getattr(work, STATE, {}))

    patches.replace(Communicator, "start", start_and_tell)
    after(patches, Messages, "start", messages)
    patches.replace(VirtualWork, "join", join_and_tell)
    after(patches, Exchange, "wait", lambda _, work, *args: waits(work))
    for kind in (VirtualWork, Exchange):
        after(patches, kind, "is_completed", asked)
