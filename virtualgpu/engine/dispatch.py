"""Every operation passes here: are its tensors on one GPU, is there room for its result, and how long does the GPU work on it?

A TorchDispatchMode sees operations below autograd, as the kernels of a GPU would: forward, backward and optimizer alike, and those
that make a tensor with `device="cuda"`. What Python made says so by its option `pin_memory`, which PyTorch's bindings always give
and its C++ does not: a tensor that C++ makes on "the CPU" beside GPU tensors is labelled `MadeByCpp`.
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from virtualgpu import _compat, errors
from virtualgpu.engine import special
from virtualgpu.engine.dry import DryRun
from virtualgpu.engine.eager import Eager
from virtualgpu.engine.home import Home, MadeByCpp, gpu_of, sparse_parts
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.operations import MASKS, Operation, mismatch, tensors_of
from virtualgpu.simulation.costs import moved, rate

UNSET = object()
KNOWN = 20_000  # FLOP counts remembered; beyond that, start again
_operations: dict = {}  # what is known of each, for all threads
_flops: dict = {}
CPU = torch.device("cpu")


class Dispatch(TorchDispatchMode):
    """The mode of one thread. All of them share the machine, and what is known about operations."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile runs eagerly here, and guarding against it would cost a microsecond an operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine, self.clock, self.local = machine, machine.clock, machine.local
        self.dry, self.eager = DryRun(machine), Eager(machine)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        __tracebackhide__ = True  # IPython shows the reader's line, not ours
        if types and any(has_dispatch(kind) for kind in types):
            if any(kind.__name__ == "FakeTensor" for kind in types):
                return func(*args, **(kwargs or {}))  # its own mode, below this one, knows what to do
            return NotImplemented  # a wrapper (DTensor and its kind) takes itself apart; its inner operations come by
        try:
            return self._run(func, args, kwargs or {})
        except (RuntimeError, IndexError) as error:
            self.clock.local.kind = "forward"  # an optimizer's step ends here, too
            frames = errors.foreign(error.__traceback__)
            raise error.with_traceback(frames) from error.__cause__  # PyTorch's error, for the line above

    def _run(self, func, args, kwargs):
        if self.local.bypass or self.machine.closed:
            return func(*args, **kwargs)
        op = _operations.get(func)
        if op is None:
            if isinstance(func, _compat.HigherOrderOperator):
                with self:  # flex_attention, say: the operations that it is made of come by
                    return _compat.implementation(func)(*args, **kwargs)
            op = _operations[func] = Operation(func, special.OPERATIONS)
        if op.plain:
            tensors = tensors_of(args, kwargs)
            return self._work(op, args, kwargs, tensors, self._device(op, args, kwargs, tensors))
        if op.composite:  # in inference mode; otherwise autograd has taken it apart
            with self:
                return _compat.decompose(func, args, kwargs)
        if op.is_view and (not isinstance(args[0], torch.Tensor) or args[0].layout is torch.strided):
            return func(*args, **kwargs)  # the transpose of a sparse tensor has storages of its own
        if op.special is not None and (out := op.special(self, func, args, kwargs)) is not NotImplemented:
            return out
        if op.python is not None:
            with self:  # a custom operation written in Python: what it calls comes by
                return op.python(*args, **kwargs)
        if op.factory:
            return self._make(op, args, kwargs)
        tensors = tensors_of(args, kwargs)
        gpu = self._device(op, args, kwargs, tensors)
        if op.generator:
            self.eager.check_generator(args, kwargs, gpu)
        if op.takes_device and (kwargs.get("device") is not None or kwargs.get("pin_memory")):
            return self._make_like(op, args, kwargs, tensors, gpu)
        return self._work(op, args, kwargs, tensors, gpu)

    def _work(self, op: Operation, args, kwargs, tensors, gpu: GPU | None):
        """Carry out an operation of tensors that are all on `gpu` (None: the CPU)."""
        machine, clock = self.machine, self.clock
        waits = op.shape_from_values and (not op.indexes or any(t.dtype in MASKS for t in tensors[1:]))
        if waits and machine.dry:
            raise NotImplementedError(
                f"the shape of what {op.name} returns depends on values, and a dry run has none. Run this line outside dry_run()"
            )
        asserts = False
        if machine.dry:
            out = self.dry.run(op, args, kwargs, tensors, gpu)
        elif gpu is None:
            out = op.func(*args, **kwargs)
        else:
            out, asserts = self.eager.run(op, args, kwargs, tensors, gpu)
        if gpu is None:
            if op.new and type(out) is torch.Tensor and tensors and all(_made_by_cpp(tensor) for tensor in tensors):
                _label(out, MadeByCpp())
            return out
        if clock.multi and _compat.graph_task() == -1:
            self._note_streams(tensors, gpu)
        if type(out) is torch.Tensor:
            self._settle(op, out, gpu)
            tensors.append(out)
        elif isinstance(out, (tuple, list)):
            self._settle_all(op, args, out, gpu)
            tensors.extend(tensor for tensor in out if isinstance(tensor, torch.Tensor))
        if op.reads:
            self.clock.host_copy(gpu.index, gpu.spec.host.seconds(8), True, op.name, "out")
        elif op.foreach:
            self._launch_foreach(op, args, tensors)
        elif op.copies and gpu_of(args[0]) is not gpu_of(args[1]):
            free = len(args) > 2 and args[2] and self._may_run_on(args[0], args[1])
            machine.charge_copy(gpu_of(args[1]), gpu_of(args[0]), args[1].nbytes, wait=not free)
        else:
            self._launch(op, args, kwargs, tensors, out, gpu)
            if waits:  # the host needs to know how large the result is
                self.clock.wait_for(self.clock.current(gpu.index))
        if asserts:
            self.clock.stop(gpu.index)
        return out

    def _note_streams(self, tensors, gpu: GPU) -> None:
        """For the backward pass, which goes back to the streams of this one."""
        self.clock.note_node(gpu.index)
        if torch.is_grad_enabled():
            for tensor in tensors:
                if (
                    tensor.requires_grad
                    and tensor.is_leaf
                    and (home := _home(tensor)) is not None
                    and home.gpu is not None
                ):
                    home.used_on = home.used_on or self.clock.current(home.gpu.index)

    def _launch(self, op: Operation, args, kwargs, tensors, out, gpu: GPU) -> None:
        flops = 0 if op.formula is None else self._flops(op, args, kwargs, tensors, out)
        if op.convolves and not gpu.cudnn and torch.backends.cudnn.enabled:
            gpu.use_cudnn()
        if op.write_only:
            seconds = gpu.spec.seconds(0, moved(tensors[:1]), torch.float32)
        else:
            seconds = gpu.spec.seconds(flops, moved(tensors), rate(op.func, flops, tensors))
        if not self.clock.multi:
            self.clock.launch(gpu.index, seconds, op.name)
            return
        # on a GPU autograd lets the stream of a backward operation wait for its gradient; who uses streams in the forward pass
        # waits for what they made by themselves
        backward = self.clock.local.backward is not None
        homes = [home for tensor in tensors if (home := _home(tensor)) is not None and home.gpu is gpu]
        after = max((home.done for home in homes), default=0.0) if backward else 0.0
        end = self.clock.launch(gpu.index, seconds, op.name, after)
        for tensor in [out] if isinstance(out, torch.Tensor) else out if isinstance(out, (list, tuple)) else []:
            if isinstance(tensor, torch.Tensor) and (home := _home(tensor)) is not None and home.gpu is gpu:
                home.done = end

    # -- which GPU

    def _device(self, op: Operation, args, kwargs, tensors) -> GPU | None:
        """The one GPU of these tensors, None for the CPU. As on a GPU, a CPU tensor of no dimension may join in."""
        if op.foreach:
            return self._device_of_lists(op, args, kwargs, tensors)
        gpu, adrift, guess, written = UNSET, None, None, False
        for tensor in tensors:
            try:
                home = tensor.untyped_storage()._virtual_home
            except NotImplementedError:  # sparse tensors
                home = _home(tensor)
            if home is not None:
                here = home.gpu
                if here is None:
                    if home.at_home:
                        adrift = [tensor] if adrift is None else [*adrift, tensor]
                        continue
                    _label(tensor, None)
            else:
                here = None
            if here is gpu:
                continue
            if here is None and not (op.strict or tensor.dim()):
                written = written or special.is_written(op, tensor, args, kwargs)
                continue
            if home is not None and home.guessed and (gpu is not UNSET or len(tensors) > 1):
                adrift = [tensor] if adrift is None else [*adrift, tensor]
                guess = here
                continue
            if gpu is UNSET:
                gpu = here
            elif op.mixed:
                gpu = gpu or here
            elif not special.may_stay_on_cpu(op, tensor, gpu, here):
                raise mismatch(op, args, kwargs)
        if gpu is UNSET and guess is not None:
            gpu = guess
        if gpu is UNSET or gpu is None:
            for tensor in adrift or ():
                if gpu is None and _home(tensor).gpu is not None:  # a guess that was wrong: it is the CPU's
                    _label(tensor, None)
            return None
        if op.mixed:
            gpu = special.place_of_mixed(op, args, kwargs, gpu)
        elif written:
            raise mismatch(op, args, kwargs)
        if adrift:
            for tensor in adrift:
                if not op.indexes and _home(tensor).gpu is not gpu:
                    self.machine.place(tensor, gpu)
        self.local.last = gpu
        return self.machine.own(gpu)

    def _device_of_lists(self, op: Operation, args, kwargs, tensors) -> GPU | None:
        """Entries of one list may be anywhere; those at one place in all lists must be together."""
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
        first = None
        for column in zip(*[entries for entries in lists if isinstance(entries[0], torch.Tensor)], strict=False):
            homes = {gpu_of(tensor) for tensor in column if tensor.dim()}
            if len(homes) > 1:
                raise mismatch(op, column, {})
            first = first or next(iter(homes), None)
        found = first or next((gpu for tensor in tensors if (gpu := gpu_of(tensor)) is not None), None)
        return found and self.machine.own(found)

    # -- results

    def _settle_all(self, op: Operation, args, out, gpu: GPU) -> None:
        lists = [value for value in args if isinstance(value, (list, tuple)) and value] if op.foreach else None
        for at, tensor in enumerate(out):
            if isinstance(tensor, (list, tuple)):
                self._settle_all(op, args, tensor, gpu)
            elif isinstance(tensor, torch.Tensor) and at != op.host_result:
                if lists:  # each result where its own input is
                    gpu = next((gpu_of(entries[at]) for entries in lists if isinstance(entries[0], torch.Tensor)), gpu)
                self._settle(op, tensor, gpu)

    def _settle(self, op: Operation, tensor: torch.Tensor, gpu: GPU | None) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            for part in sparse_parts(tensor):
                self._settle(op, part, gpu)
            return
        home = storage._virtual_home
        if home is None or home.gpu is None:
            if gpu is not None and (op.new or home is not None):
                storage._virtual_home = Home(gpu, storage.nbytes())
        elif op.resizes and home.nbytes != storage.nbytes():
            where = home.gpu
            home = storage._virtual_home = None  # its block is free before the next is asked for
            storage._virtual_home = Home(where, storage.nbytes())

    def _launch_foreach(self, op: Operation, args, tensors) -> None:
        """One kernel per GPU that has tensors in the list, each with its share of the bytes."""
        lists = next(value for value in args if isinstance(value, (list, tuple)) and isinstance(value[0], torch.Tensor))
        first = [(tensor.nbytes, gpu_of(tensor)) for tensor in lists]
        total, nbytes = sum(size for size, _ in first) or 1, moved(tensors)
        for gpu in dict.fromkeys(where for _, where in first if where is not None):
            share = sum(size for size, where in first if where is gpu)
            seconds = gpu.spec.seconds(0, nbytes * share // total, torch.float32)
            self.clock.launch(gpu.index, seconds, op.name)

    def _flops(self, op: Operation, args, kwargs, tensors, out) -> int:
        key = (op.func, *[tensor.shape for tensor in tensors], *[arg for arg in args if type(arg) is bool])
        known = _flops.get(key)
        if known is None:
            if len(_flops) > KNOWN:
                _flops.clear()
            known = _flops[key] = op.formula(*args, **kwargs, out_val=out)
        return known

    # -- new tensors

    def _make(self, op: Operation, args, kwargs):
        """A tensor from no other: on the GPU or the CPU that `device` says."""
        machine, device = self.machine, kwargs.get("device")
        by_python, pinned = "pin_memory" in kwargs, kwargs.get("pin_memory")
        if (device is not None and self._is_elsewhere(device, by_python)) or _compat.fake_mode_is_on():
            return op.func(*args, **kwargs)
        gpu = machine.gpu(device) if device is not None and device.type == "cuda" else None
        if op.generator:
            self.eager.check_generator(args, kwargs, gpu)
        options = {**kwargs, "device": torch.device(machine.base)}
        if pinned:
            options["pin_memory"] = False
            if gpu is not None:
                raise RuntimeError("Only dense CPU tensors can be pinned")
        if gpu is not None and not machine.dry:
            self.eager.require_for_factory(args, kwargs, gpu)
        if machine.dry:
            out = self.dry.run(op, args, options, [], gpu)
        elif gpu is None:
            out = op.func(*args, **options)
        else:
            out, _ = self.eager.run(op, args, options, [], gpu)
        if gpu is not None:
            self._settle(op, out, gpu)
            self.clock.launch(gpu.index, gpu.spec.seconds(0, moved([out]), out.dtype), op.name)
        elif pinned:
            out.untyped_storage()._virtual_pinned = True
        elif not by_python:
            self._label_made_by_cpp(op, out)
        return out

    def _label_made_by_cpp(self, op: Operation, out: torch.Tensor) -> None:
        """In a backward pass it may become a gradient without meeting any other: it belongs where the pass is."""
        if _compat.graph_task() != -1 and op.name != "scalar_tensor":
            node = _compat.current_node()
            by_python = isinstance(
                node, torch.autograd.function.BackwardCFunction
            )  # then it is of an output, not an input
            leaf = None if by_python else next((found for found in _leaves(node)), None)
            gpu = self.local.last if leaf is None else gpu_of(leaf)
            if gpu is not None:
                if gpu.machine is self.machine:
                    out.untyped_storage()._virtual_home = Home(gpu, out.untyped_storage().nbytes(), guessed=True)
                return
        _label(out, MadeByCpp())

    def _make_like(self, op: Operation, args, kwargs, tensors, source: GPU | None):
        """A tensor from another one, with a `device` of its own: zeros_like(x, device=...), and copies that C++ asks for."""
        machine, device = self.machine, kwargs.get("device") or (CPU if source is None else source.device)
        from_options = "layout" in kwargs if op.converts else "pin_memory" not in kwargs
        if self._is_elsewhere(device, not from_options):
            return op.func(*args, **kwargs)
        target = machine.gpu(device) if device.type == "cuda" else None
        if source is not None and target is None and from_options:
            target = source  # options that C++ copied from a GPU tensor: the backward of a cast, say
        options = {**kwargs, "device": torch.device(machine.base)}
        if options.pop("pin_memory", None):
            if target is not None:
                raise RuntimeError("Only dense CPU tensors can be pinned")
            options["pin_memory"] = False
        if op.converts and target is source:
            del options["device"]
        if machine.dry:
            out = self.dry.run(op, args, options, tensors, target)
        elif target is None:
            out = op.func(*args, **options)
        else:
            out, _ = self.eager.run(op, args, options, tensors, target)
        if target is not None:
            self._settle(op, out, target)
        if op.converts and target is not source:
            machine.charge_copy(
                source, target, math.prod(out.shape) * out.element_size(), wait=not kwargs.get("non_blocking")
            )
        elif target is not None:
            self.clock.launch(target.index, target.spec.seconds(0, moved([out]), out.dtype), op.name)
        if kwargs.get("pin_memory") and target is None:
            out.untyped_storage()._virtual_pinned = True
        return out

    def _is_elsewhere(self, device: torch.device, by_python: bool) -> bool:
        """Neither the CPU nor a GPU? What C++ copies from a tensor of a dry run says meta."""
        return device.type not in ("cpu", "cuda") and (by_python or not (self.machine.dry and device.type == "meta"))

    def _may_run_on(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Does an asynchronous copy between host and GPU leave the host free? Only where the host's side is pinned."""
        if gpu_of(target) is not None and gpu_of(source) is not None:
            return True
        host = source if gpu_of(source) is None else target
        return getattr(host.untyped_storage(), "_virtual_pinned", False)


def _leaves(node):
    """The tensors whose gradients this node of the graph makes, where they are leaves."""
    for next_node, _ in node.next_functions if node is not None else ():
        if hasattr(next_node, "variable"):
            yield next_node.variable


_wrappers: dict = {}


def has_dispatch(kind: type) -> bool:
    """Does this subclass of Tensor take its operations apart by itself?"""
    known = _wrappers.get(kind)
    if known is None:
        own = getattr(kind, "__torch_dispatch__", None)
        known = _wrappers[kind] = (
            own is not None
            and own is not torch._C._disabled_torch_dispatch_impl
            and own is not torch.Tensor.__torch_dispatch__
        )
    return known


def _home(tensor: torch.Tensor):
    try:
        return tensor.untyped_storage()._virtual_home
    except NotImplementedError:
        parts = sparse_parts(tensor)
        return _home(parts[-1]) if parts else None


def _label(tensor: torch.Tensor, home) -> None:
    try:
        tensor.untyped_storage()._virtual_home = home
    except NotImplementedError:
        for part in sparse_parts(tensor):
            _label(part, home)


def _made_by_cpp(tensor: torch.Tensor) -> bool:
    home = _home(tensor)
    return home is not None and home.gpu is None and home.at_home
