"""How long a GPU works on an operation, and on which stream: told to the clock."""

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.operations import Operation
from virtualgpu.engine.storage import Allocation, allocation_of, gpu_of, tensors_of
from virtualgpu.hardware.datasheet import FLOAT32
from virtualgpu.timing import flops, host, memory_bound
from virtualgpu.timing.flops import OF_CUDNN, moved, parts, rate
from virtualgpu.timing.memory_bound import KINDS, ORDINARY

FLAGS, LISTS, STRIDED = (bool, int), (list, tuple), torch.strided
KNOWN = 20_000  # operations of known shapes whose seconds are remembered; beyond that, start again

# One kernel of a list: up to so many tensors, and chunks of so many numbers (aten/src/ATen/native/cuda/MultiTensorApply.cuh and
# ForeachFunctors.cuh)
LIST, CHUNKS, CHUNK = 64, 320, 65536


class Kernel:
    """What `Timing.launch` asks of an operation, for those that are carried out apart from the others."""

    write_only = False

    def __init__(self, func, formula):
        self.func, self.name, self.formula = func, func.name().removeprefix("aten::"), formula
        self.kind = KINDS.get(self.name, ORDINARY)
        self.weight = host.weight_of(self.name, False, self.kind.launches)
        self.weighed_in_call = host.depends_on_call(self.name, self.kind)
        self.tf32_switch = flops.tf32_switch(func)
        self.convolves = func in OF_CUDNN  # asks for cuDNN's handle, too


class Timing:
    """Launches the kernels of one machine's operations."""

    def __init__(self, machine: Machine):
        self.machine, self.clock = machine, machine.clock

    def note_streams(self, tensors, gpu: GPU) -> None:
        """For the backward pass, which goes back to the streams of this one."""
        self.clock.note_node(gpu.index)
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.requires_grad and tensor.is_leaf and (there := gpu_of(tensor)) is not None:
                    allocation_of(tensor).used_in_forward(self.clock.current(there.index))

    def book(self, kernel: Kernel, args, inputs, outputs, gpu: GPU, fraction: float = 1.0) -> None:
        """One kernel that reads `inputs`, and whose `outputs` are on that GPU from now on. fraction: of its FLOPs, where
        values decide how many of them it leaves out."""
        for tensor in outputs:
            if gpu_of(tensor) is None:
                self.machine.place(tensor, gpu)
        tensors = [*inputs, *outputs]
        if self.clock.multi and _compat.graph_task() == -1:
            self.note_streams(tensors, gpu)
        self.launch(kernel, args, {}, tensors, outputs, gpu, fraction)

    def launch(self, op: Operation | Kernel, args, kwargs, tensors, out, gpu: GPU, fraction: float = 1.0) -> None:
        """A kernel, by this fraction of the operation's FLOPs and the bytes of `tensors`: all that it reads and writes."""
        more, weight = 0.0, host.in_call(op, args) if op.weighed_in_call else op.weight
        if isinstance(op, Operation) and op.writes_lists:  # a fused optimizer: what it writes it has read, too
            more = self.clock.costs.entry * len(tensors)
            tensors = [*tensors, *op.written(args, kwargs)]
        elif args and type(args[0]) in LISTS:
            more = self.clock.costs.entry * len(args[0])
        if op.formula is None:
            nbytes = moved(tensors[:1] if op.write_only else tensors)
            if op.kind is ORDINARY:
                seconds = gpu.kernels.moving(nbytes, ORDINARY)
            else:
                seconds = memory_bound.seconds(gpu.kernels, op.kind, args, tensors, nbytes)
        else:
            if op.convolves and not gpu.cudnn and torch.backends.cudnn.enabled:
                gpu.use_cudnn()
            seconds = self._multiplying(op, args, kwargs, tensors, out, gpu, fraction)
        if not self.clock.multi:
            self.clock.launch(gpu.index, seconds, op.name, more=more, weight=weight)
            return
        # on a GPU autograd lets the stream of a backward operation wait for its gradient; who uses streams in the forward pass
        # waits for what they made by themselves
        backward = self.clock.local.backward is not None
        after = max((allocation.done for allocation in _allocations(tensors, gpu)), default=0.0) if backward else 0.0
        end = self.clock.launch(gpu.index, seconds, op.name, after, more, weight)
        for allocation in _allocations(tensors_of((out,), {}), gpu):
            allocation.written_until(end)

    def launch_foreach(self, op: Operation, args, tensors) -> None:
        """One kernel per GPU that has tensors in the list, each with its share of the bytes."""
        lists = [value for value in args if isinstance(value, LISTS) and isinstance(value[0], torch.Tensor)]
        total, by_gpu = 0, dict[GPU, tuple[int, int, int]]()  # bytes of all; of each GPU: tensors, bytes, chunks
        for tensor in lists[0]:
            total += tensor.nbytes
            if (gpu := gpu_of(tensor)) is not None:
                count, size, chunks = by_gpu.get(gpu, (0, 0, 0))
                by_gpu[gpu] = count + 1, size + tensor.nbytes, chunks - (-tensor.numel() // CHUNK)
        nbytes, costs = moved(tensors), self.clock.costs
        each = costs.entry * len(lists) + (0.0 if op.name.endswith("_") else costs.made)
        for gpu, (count, size, chunks) in by_gpu.items():
            kernels = max(-(-count // LIST), -(-chunks // CHUNKS))
            seconds = gpu.kernels.moving(nbytes * size // (total or 1), op.kind)
            seconds += (kernels - 1) * gpu.spec.kernel
            more = (kernels - 1) * costs.launch + count * each
            self.clock.launch(gpu.index, seconds, op.name, more=more, weight=host.OF_LIST)

    def write(self, op: Operation, out: torch.Tensor, gpu: GPU) -> None:
        """A kernel that fills a new tensor; none where it is left as it is."""
        if op.kernel:
            weight = op.weight if op.kind.launches > 1 else host.AVERAGE
            self.clock.launch(gpu.index, gpu.kernels.moving(moved([out]), op.kind), op.name, weight=weight)

    def _multiplying(self, op: Operation | Kernel, args, kwargs, tensors, out, gpu: GPU, fraction: float) -> float:
        """The seconds of an operation whose FLOPs are counted; remembered by all that decides over them."""
        kernels = gpu.kernels
        parts_of_key = [op, fraction, _compat.fp32_precision("cuda", op.tf32_switch)]
        for tensor in tensors:  # without a function for each: this is on the way of every product
            layout = tensor.stride() if tensor.layout is STRIDED else sum(part.numel() for part in parts(tensor))
            parts_of_key += tensor.shape, layout, tensor.dtype
        for arg in args:  # a flag, a number or a few of these, such as the dilation of a convolution
            if type(arg) in FLAGS:
                parts_of_key.append(arg)
            elif type(arg) in LISTS and arg and type(arg[0]) in FLAGS:
                parts_of_key.append(tuple(arg))
        key = tuple(parts_of_key)
        seconds = kernels.known.get(key)
        if seconds is None:
            if len(kernels.known) > KNOWN:
                kernels.known.clear()
            count = op.formula(*args, **kwargs, out_val=out) * (4 if tensors[0].is_complex() else 1)
            rates = rate(op.func, tensors) if count else FLOAT32
            seconds = flops.seconds(kernels, op.name, args, tensors, count, moved(tensors), rates, fraction)
            kernels.known[key] = seconds
        return seconds


def _allocations(tensors, gpu: GPU) -> list[Allocation]:
    """Labels of those tensors that are on this GPU."""
    return [label for label in map(allocation_of, tensors) if label is not None and label.gpu is gpu]
