"""Every operation passes here: are its tensors on one GPU, is there room for its result, and how long does the GPU work on it?

A TorchDispatchMode sees operations below autograd, as the kernels of a GPU would: forward, backward and optimizer alike, and those
that make a tensor with `device="cuda"`. What Python made says so by its option `pin_memory`, which PyTorch's bindings always give
and its C++ does not: a tensor that C++ makes on "the CPU" beside GPU tensors is labelled `MadeByCpp`.
"""

import torch
from torch import Tensor

from virtualgpu import _compat, errors
from virtualgpu.engine import cuda_checks, cuda_differences, dry_run, factories, overrides, values
from virtualgpu.engine.dry_run import DryRun
from virtualgpu.engine.eager import Eager
from virtualgpu.engine.factories import Factories
from virtualgpu.engine.frames import MadeByCpp, holders
from virtualgpu.engine.machine import GPU, Machine, dry_runs
from virtualgpu.engine.operations import ALOUD, Operation, with_tensors
from virtualgpu.engine.placement import may_stay_on_cpu, mismatch, place_of_lists, place_of_mixed
from virtualgpu.engine.storage import (
    allocation_of,
    gpu_of,
    is_pinned,
    label,
    made_by_cpp,
    place_output,
    place_outputs,
    tensors_of,
)
from virtualgpu.engine.timing import Timing

TENSORS_ALONE = (Tensor,)  # what types are where nothing is a subclass
STRIDED, EXACT = torch.strided, cuda_checks.EXACT
_operations: dict = {}  # what is known of each, for all threads


class Dispatch(_compat.TorchDispatchMode):
    """The mode of one thread. All of them share the machine, and what is known about operations."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile runs eagerly here, and guarding against it would cost a microsecond an operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """PyTorch turns this mode off while torch.compile compiles, and on again for what it made."""
        return True

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine, self.clock, self.local = machine, machine.clock, machine.local
        self.dry, self.eager, self.timing = DryRun(machine), Eager(machine), Timing(machine)
        self.factories = Factories(self)
        self.last: GPU | None = None  # on which the latest operation ran

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        __tracebackhide__ = True  # IPython shows the reader's line, not ours
        if types and types != TENSORS_ALONE and any(has_dispatch(kind) for kind in types):
            if any(kind.__name__ == "FakeTensor" for kind in types):
                return func(*args, **(kwargs or {}))  # its own mode, below this one, knows what to do
            return NotImplemented  # a wrapper (DTensor and its kind) takes itself apart; its inner operations come by
        try:
            if self.clock.own is not None:
                return self._run_apart(func, args, kwargs or {})
            return self._run(func, args, kwargs or {})
        except (RuntimeError, IndexError) as error:
            if "of type 'Tensor' for argument" in str(error):
                return self._run(func, with_tensors(func, args), kwargs or {})
            self.clock.set_kind("forward")  # an optimizer's step ends here, too
            frames = errors.foreign(error.__traceback__)
            raise error.with_traceback(frames) from error.__cause__  # PyTorch's error, for the line above

    def _run_apart(self, func, args, kwargs):
        """As `_run`, apart from the program's own work, which is measured."""
        own = self.clock.own
        own.enter()
        try:
            return self._run(func, args, kwargs)
        finally:
            own.leave(surely=getattr(func, "namespace", "") != "aten")

    def _run(self, func, args, kwargs):
        if self.local.bypass or self.machine.closed:
            return func(*args, **kwargs)
        op = _operations.get(func)
        if op is None:
            if isinstance(func, _compat.HigherOrderOperator):
                if self.machine.in_flight.parts:
                    self.machine.in_flight.let_finish(tensors_of(args, kwargs))
                if (
                    func in overrides.FLEX_KERNELS
                    and (out := overrides.run_flex(self, func, args, kwargs)) is not NotImplemented
                ):
                    return out
                with self:  # the operations that it is made of come by
                    return _compat.implementation(func)(*args, **kwargs)
            op = Operation(func, overrides.handler(func))
            if op.extension:
                op.on_gpu = overrides.extension_on_gpu(func)
            _operations[func] = op
        if overrides.Nested.some or op.name in overrides.MAKERS:
            self._let_finish(op, args, kwargs)
            out = overrides.run_nested(self, op, args, kwargs)
            if out is not NotImplemented:
                return out
        if op.plain:
            tensors = tensors_of(args, kwargs)
            if self.machine.in_flight.parts:
                self.machine.in_flight.let_finish(tensors, op.written(args, kwargs))
            return self._work(op, args, kwargs, tensors, self.place(op, args, kwargs, tensors))
        if op.composite:  # in inference mode; otherwise autograd has taken it apart
            with self:
                return _compat.decompose(func, args, kwargs)
        if op.is_view and (not isinstance(args[0], Tensor) or args[0].layout is STRIDED):
            out = func(*args, **kwargs)  # the transpose of a sparse tensor has storages of its own
            if op.weight_of_view is not None and (gpu := gpu_of(args[0])) is not None:
                self.clock.pass_view(gpu.index, op.weight_of_view)
            return out
        if op.override is not None:
            if func.namespace == "aten":  # a collective looks after its own
                self._let_finish(op, args, kwargs)
            out = op.override(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if op.extension and (out := overrides.run_extension(self, func, args, kwargs)) is not NotImplemented:
            return out
        if op.factory:
            return self.factories.make(op, args, kwargs)
        self._let_finish(op, args, kwargs)
        tensors = tensors_of(args, kwargs)
        gpu = self.place(op, args, kwargs, tensors)
        if op.generator:
            self.eager.check_generator(args, kwargs, gpu)
        if op.takes_device and (kwargs.get("device") is not None or kwargs.get("pin_memory")):
            return self.factories.make_like(op, args, kwargs, tensors, gpu)
        return self._work(op, args, kwargs, tensors, gpu)

    def place(self, op: Operation, args, kwargs, tensors) -> GPU | None:
        """The one GPU of these tensors, None for the CPU. As on a GPU, a CPU tensor of no dimension may join in."""
        machine = self.machine
        gpu: GPU | None
        inferred: GPU | None
        if op.foreach:
            gpu = place_of_lists(op, args, kwargs, tensors)
            return None if gpu is None else machine.own(gpu)
        gpu = inferred = None
        unplaced: list[Tensor] = []
        found = written = False
        for tensor in tensors:
            try:
                allocation = tensor.untyped_storage()._virtual_allocation
            except NotImplementedError:  # sparse tensors
                allocation = allocation_of(tensor)
            here = None if allocation is None else allocation.gpu
            if here is None:
                if allocation is not None:
                    if allocation.in_creating_call and (
                        allocation.in_backward or not holders.in_python(tensor, tensors)
                    ):
                        unplaced.append(tensor)
                        continue
                    label(tensor, None)
                if found and gpu is None:
                    continue
                if not (op.strict or tensor.dim()):
                    written = written or any(target is tensor for target in op.written(args, kwargs))
                    continue
            elif here is gpu:
                continue
            elif allocation.inferred and (found or len(tensors) > 1):
                unplaced.append(tensor)
                inferred = here
                continue
            if not found:
                gpu, found = here, True
            elif op.mixed:
                gpu = gpu or here
            elif not may_stay_on_cpu(op, gpu, here):
                raise mismatch(op, args, kwargs)
        if not found:
            gpu = inferred
        if gpu is None:
            for tensor in unplaced:
                if allocation_of(tensor).gpu is not None:  # an inference that was wrong: it is the CPU's
                    label(tensor, None)
            return None
        if op.mixed:
            gpu = place_of_mixed(op, args, gpu)
            if gpu is None:
                return None
        elif written:
            raise mismatch(op, args, kwargs)
        for tensor in unplaced:
            if allocation_of(tensor).gpu is not gpu:
                machine.place(tensor, gpu)
        self.last = gpu
        return machine.own(gpu) if machine.forked or gpu.machine is not machine else gpu

    def _let_finish(self, op: Operation, args, kwargs) -> None:
        """The collectives that fill what this operation reads, or read what it writes to."""
        if self.machine.in_flight.parts:
            self.machine.in_flight.let_finish(tensors_of(args, kwargs), op.written(args, kwargs))

    def _work(self, op: Operation, args, kwargs, tensors, gpu: GPU | None):
        """Carry out an operation of tensors that are all on `gpu` (None: the CPU)."""
        machine, clock = self.machine, self.clock
        if op.alert is not None and gpu is not None and torch.are_deterministic_algorithms_enabled():
            cuda_checks.check(op, args, kwargs)
        if op.unsupported is not None and gpu is not None:
            kind = tensors[0].dtype if op.product is not None else None
            if kind not in EXACT or tensors[1].dtype is not kind or tensors[-1].dtype is not kind:
                op.unsupported(*args, **kwargs)  # a product in one of these types needs no question
        waits = 0 if op.waits is None else op.waits(args, kwargs)
        asserts = ""
        if (dry_runs.some or machine.always_dry) and machine.dry:
            if dry_run.Marks.some:
                dry_run.check(op, args, tensors)
            if waits and op.shape_from_values:
                out = self.dry.sized(op, args, kwargs, tensors)
            elif gpu is None and op.writes and (out := values.written(op, args, kwargs, tensors)) is not NotImplemented:
                return out
            else:
                out = self.dry.run(op, args, kwargs, tensors, gpu)
                if not op.returns_value_to_host:
                    on_host = gpu is None or (op.copies and gpu_of(args[0]) is None)
                    (values.propagate if on_host else values.propagate_on_gpu)(op, args, kwargs, tensors, out)
            if dry_run.Marks.some and gpu is None:
                dry_run.propagate(op, tensors, out)
        elif gpu is None:
            out = op.on_cpu(*args, **kwargs)
        else:
            out, asserts = self.eager.run(op, args, kwargs, tensors, gpu)
        if gpu is None:
            if op.new and type(out) is Tensor and tensors and all(made_by_cpp(tensor) for tensor in tensors):
                label(out, MadeByCpp())
            return out
        if clock.multi and _compat.graph_task() == -1:
            self.timing.note_streams(tensors, gpu)
        if type(out) is Tensor:
            if op.derives and _compat.graph_task() != -1:
                cuda_differences.take_over(op, args, out)
            place_output(op, out, gpu)
            tensors.append(out)
        elif isinstance(out, (tuple, list)):
            place_outputs(op, args, out, gpu)
            tensors.extend([tensor for tensor in out if isinstance(tensor, Tensor)])
        if op.kernel:
            if op.indexes:
                for index in args[1]:
                    if index is not None and gpu_of(index) is None:  # copied at every call; the host waits
                        machine.charge_copy(None, gpu, index.nbytes)
            if op.workspace is not None:
                machine.workspaces.use(op.workspace, args, kwargs, out, gpu)
            if op.temporaries is not None:
                gpu.lend(op.temporaries(args, kwargs, out, gpu), needed=not op.convolves)
            self.timing.launch(op, args, kwargs, tensors, out, gpu)
            if waits:
                clock.wait_for(clock.current(gpu.index), waits == ALOUD)
        elif op.returns_value_to_host:
            if waits:
                seconds = machine.host_link(gpu, "out", False).seconds(8)
                clock.host_copy(gpu.index, seconds, True, op.name, "out")
        elif op.foreach:
            self.timing.launch_foreach(op, args, [*tensors, *op.written(args, kwargs)])
        elif op.copies:
            target = gpu_of(args[0])
            source = gpu_of(args[1]) if isinstance(args[1], Tensor) else target  # a number is no copy
            if target is source:
                moves = args[1::-1] if isinstance(args[1], Tensor) else args[:1]  # what it writes it does not read
                self.timing.launch(op, args, kwargs, moves, out, gpu)
            else:
                pinned = is_pinned(args[0]) or is_pinned(args[1])
                factories.charge(machine, args[0], args[1], (target, source), len(args) > 2 and args[2], pinned)
        if asserts:
            clock.stop(gpu.index, asserts)
        return out


class DispatchBesideReal(Dispatch):
    """As `Dispatch`, where real GPUs work as well. A tensor that lies on one would seem to be the CPU's: it can be read and taken over, no more."""

    def _run(self, func, args, kwargs):
        if self.local.bypass or self.machine.closed or func in READ:
            return super()._run(func, args, kwargs)
        self._check(args, kwargs)
        out = super()._run(func, args, kwargs)
        # no fake one
        if any(type(output) is Tensor and _compat.is_really_on_gpu(output) for output in tensors_of((out,), {})):
            raise errors.made_on_real_gpu(func)
        return out

    def _check(self, args, kwargs) -> None:
        """A function of its own: a variable of `_run` would be one reference more to a tensor, which `Holders` counts."""
        for tensor in tensors_of(args, kwargs):
            if _compat.is_really_on_gpu(tensor):
                raise errors.on_real_gpu(_compat.real_device(tensor))
            if _compat.is_really_meta(tensor) and gpu_of(tensor) is not None and not self.machine.dry:
                raise errors.without_values()  # where its device is asked, a real GPU would get memory for the result


READ = (torch.ops.aten.detach.default, torch.ops.aten._local_scalar_dense.default)


def operation_of(frame):
    """The operation that a frame of Python dispatches; None for any other frame."""
    return frame.f_locals["func"] if frame.f_code is Dispatch.__torch_dispatch__.__code__ else None


_wrappers: dict = {}


def has_dispatch(kind: type) -> bool:
    """Does this subclass of Tensor take its operations apart by itself?"""
    cached = _wrappers.get(kind)
    if cached is None:
        custom = getattr(kind, "__torch_dispatch__", None)
        cached = _wrappers[kind] = (
            custom is not None and custom is not _compat.no_dispatch and custom is not torch.Tensor.__torch_dispatch__
        )
    return cached
