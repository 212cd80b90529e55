"""Every operation passes here: are its tensors on one GPU, is there room for its result, and how long does the GPU work on it?

A TorchDispatchMode sees operations below autograd, as the kernels of a GPU would: forward, backward and optimizer alike.
"""

import warnings
from itertools import zip_longest
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.virtual.costs import WRITE_ONLY, formula, moved, rate
from helpers.virtual.machine import GPU, Home, Machine, home_of, storage_of

aten = torch.ops.aten
UNKNOWN = object()
# The home of a tensor that PyTorch's own C++ made for its use (the zeros of a gradient that is missing, say): options that it
# copied from a GPU tensor say CPU here. It belongs with whatever it meets. Factories called from Python are not among them.
ANYWHERE = SimpleNamespace(gpu=None, nbytes=0)
KINDS = 20_000  # kinds of operation remembered (an operation and the shapes it meets); beyond that, start again

# Operations whose tensors may be on different devices: indices and lengths may stay on the CPU
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
PACKING = {aten._pack_padded_sequence, aten._pad_packed_sequence, aten._pack_padded_sequence_backward}
# ... and results that are for the host in any case
HOST_RESULTS = {aten._pack_padded_sequence: 1, aten._pad_packed_sequence: 1}
MASKS = {torch.bool, torch.uint8}  # as indices
RESIZING = {"resize_", "resize_as_", "set_", "_resize_output_"}


class Operation:
    """What the schema tells about one operation, once."""

    __slots__ = (
        "cacheable",
        "copies",
        "foreach",
        "formula",
        "func",
        "host_result",
        "indexes",
        "is_view",
        "mixed",
        "name",
        "new",
        "reads",
        "resizes",
        "returns",
        "shape_from_values",
        "write_only",
    )

    def __init__(self, func):
        schema = func._schema
        packet = func._overloadpacket
        self.func, self.name = func, packet.__name__
        self.is_view = func.is_view or packet is aten._unsafe_view or packet is aten.lift_fresh
        self.copies = packet is aten.copy_
        self.foreach = self.name.startswith("_foreach_") or self.name.startswith("_amp_foreach_")
        self.indexes = packet in INDEXING
        self.mixed = self.foreach or self.copies or self.indexes or packet in PACKING
        self.reads = torch.Tag.data_dependent_output in func.tags
        self.shape_from_values = torch.Tag.dynamic_output_shape in func.tags
        self.resizes = self.name in RESIZING or any(argument.is_out for argument in schema.arguments)
        # which argument each result is, for operations in place; None: a new tensor
        names = [_alias(argument.alias_info) for argument in schema.arguments]
        self.returns = [names.index(alias) if (alias := _alias(r.alias_info)) else None for r in schema.returns]
        self.formula = formula(func)
        self.write_only = func in WRITE_ONLY
        self.host_result = HOST_RESULTS.get(packet)
        self.new = any(argument is None for argument in self.returns)
        self.cacheable = not (
            self.resizes or self.reads or torch.Tag.inplace_view in func.tags or self.name.startswith("rand")
        )


class Dispatch(TorchDispatchMode):
    """The mode of one thread. All of them share the machine, and what is known about operations."""

    operations: ClassVar[dict] = {}
    flops: ClassVar[dict] = {}
    results: ClassVar[dict] = {}  # of dry runs

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile is not modelled, and guarding against it would cost a microsecond an operation

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine, self.clock, self.local = machine, machine.clock, machine.local

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.local.bypass:
            return func(*args, **kwargs)
        op = self.operations.get(func)
        if op is None:
            op = self.operations[func] = Operation(func)
        if op.is_view:
            return func(*args, **kwargs)
        tensors = _tensors(args, kwargs)
        gpu = self._device(op, args, tensors)
        waits = op.shape_from_values and (not op.indexes or any(t.dtype in MASKS for t in tensors[1:]))
        if waits and self.machine.dry:
            raise NotImplementedError(
                f"the shape of what {op.name} returns depends on values, and a dry run has none. Run this line outside dry_run()"
            )
        out = self._dry(op, args, kwargs, tensors, gpu) if self.machine.dry else func(*args, **kwargs)
        if gpu is None:
            if op.new and type(out) is torch.Tensor and all(_is_anywhere(tensor) for tensor in tensors):
                out.untyped_storage()._virtual_home = ANYWHERE
            return out
        if type(out) is torch.Tensor:
            self._settle(op, out, gpu)
            tensors.append(out)
        elif isinstance(out, (tuple, list)):
            self._settle_all(op, args, out, gpu)
            tensors.extend(tensor for tensor in out if tensor is not None)
        if op.reads:
            self.clock.host_copy(gpu.index, gpu.spec.host.seconds(8), True, op.name)
        elif op.foreach:
            self._launch_foreach(op, args, tensors)
        elif op.copies and (crossing := self._crossing(args)):
            self.travel(*crossing, args[1], wait=not (len(args) > 2 and args[2]))
        else:
            if op.write_only:
                tensors = tensors[:1]
            flops = 0 if op.formula is None else self._flops(op, args, kwargs, tensors, out)
            seconds = gpu.spec.seconds(flops, moved(tensors), rate(op.func, flops, tensors))
            self.clock.launch(gpu.index, seconds, op.name)
            if waits:  # the host needs to know how large the result is
                self.clock.wait(gpu.index)
        return out

    def _device(self, op: Operation, args, tensors) -> GPU | None:
        """The one GPU of these tensors, None for the CPU. As on a GPU, a CPU tensor of no dimension may join in."""
        gpu = UNKNOWN
        for tensor in tensors:
            try:
                home = tensor.untyped_storage()._virtual_home
            except NotImplementedError:  # sparse tensors
                home = None
            here = None if home is None else home.gpu
            if here is gpu or (here is None and (home is ANYWHERE or not tensor.dim())):
                continue
            if gpu is UNKNOWN:
                gpu = here
            elif op.mixed:
                gpu = gpu or here
            else:
                self._mismatch(op, args)
        if gpu is UNKNOWN or gpu is None:
            return None
        if op.indexes and home_of(tensors[0]) is None:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if gpu.machine is not self.machine:
            raise RuntimeError(
                f"this tensor lives on {gpu.device} of virtual GPUs that a later call of gpus() replaced; make it again"
            )
        return gpu

    def _flops(self, op: Operation, args, kwargs, tensors, out) -> int:
        key = (op.func, *[tensor.shape for tensor in tensors], *[arg for arg in args if type(arg) is bool])
        known = self.flops.get(key)
        if known is None:
            _bound(self.flops)
            known = self.flops[key] = op.formula(*args, **kwargs, out_val=out)
        return known

    def _settle_all(self, op: Operation, args, out, gpu: GPU) -> None:
        for at, tensor in enumerate(out):
            if tensor is None or at == op.host_result:
                continue
            if op.foreach:  # each result where its own input is
                home = home_of(args[0][at])
                gpu = None if home is None else home.gpu
            self._settle(op, tensor, gpu)

    def _settle(self, op: Operation, tensor: torch.Tensor, gpu: GPU | None) -> None:
        storage = tensor.untyped_storage()
        home = storage._virtual_home
        if home is None:
            if op.new and gpu is not None:
                storage._virtual_home = Home(gpu, storage.nbytes())
        elif op.resizes and home.nbytes != storage.nbytes():
            storage._virtual_home = Home(home.gpu, storage.nbytes())

    def _launch_foreach(self, op: Operation, args, tensors) -> None:
        """One kernel per GPU that has tensors in the list, each with its share of the bytes."""
        first = [(tensor.nbytes, home_of(tensor)) for tensor in args[0]]
        total, nbytes = sum(size for size, _ in first) or 1, moved(tensors)
        for gpu in dict.fromkeys(home.gpu for _, home in first if home is not None):
            share = sum(size for size, home in first if home is not None and home.gpu is gpu)
            seconds = gpu.spec.seconds(0, nbytes * share // total, torch.float32)
            self.clock.launch(gpu.index, seconds, op.name)

    def _crossing(self, args) -> tuple[GPU | None, GPU | None] | None:
        target, source = home_of(args[0]), home_of(args[1])
        target, source = target and target.gpu, source and source.gpu
        return None if target is source else (source, target)

    def travel(self, source: GPU | None, target: GPU | None, tensor: torch.Tensor, wait: bool) -> None:
        """The time of a copy between two places. Only a copy from or to pinned memory leaves the host free."""
        nbytes = tensor.nbytes
        if source is not None and target is not None:
            self.clock.between(source.index, target.index, source.spec.peer.seconds(nbytes))
        elif target is not None:
            self.clock.host_copy(target.index, target.spec.host.seconds(nbytes), wait, "copy from the host")
        elif source is not None:
            self.clock.host_copy(source.index, source.spec.host.seconds(nbytes), wait, "copy to the host")

    def _mismatch(self, op: Operation, args) -> None:
        """Raises the error of PyTorch for tensors on two devices."""
        schema = op.func._schema.arguments
        named = []
        for argument, value in zip_longest(schema, args):
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    home = home_of(tensor)
                    named.append((argument.name, tensor, torch.device("cpu") if home is None else home.gpu.device))
        if op.name in ("convolution", "_convolution") and named[0][2].type != named[1][2].type:
            kinds = [f"torch.{'cuda.' if d.type == 'cuda' else ''}{_legacy_type(tensor)}" for _, tensor, d in named[:2]]
            raise RuntimeError(f"Input type ({kinds[0]}) and weight type ({kinds[1]}) should be the same")
        if torch.Tag.pointwise in op.func.tags:
            first, other = named[0][2], next(d for _, _, d in named if d != named[0][2])
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {first} and {other}!"
            )
        common = named[0][2]
        name, odd = next((name, d) for name, _, d in named if d != common)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but got {name} is on {odd}, different from other tensors on "
            f"{common} (when checking argument in method wrapper_CUDA_{op.name})"
        )

    def _dry(self, op: Operation, args, kwargs, tensors, gpu: GPU | None):
        """The result as a shape: what the same operation on the same shapes gave before, or else PyTorch's meta kernel."""
        if op.reads:
            return self._no_value(op, tensors, gpu)
        key = [op.func, torch.is_grad_enabled()]
        _describe(args, key)
        _describe(kwargs.items(), key)
        key = tuple(key)
        made = self.results.get(key)
        if made is not None:
            return made(args)
        shapes, options = _on_meta(args), _on_meta(kwargs)
        if "device" in options:
            options["device"] = torch.device("meta")
        with self.machine.aside():
            out = op.func(*shapes, **options)
            again = _recipe(op, out, tensors) if op.cacheable and tensors else None
        if again is not None:
            _bound(self.results)
            self.results[key] = again
            return again(args)
        same = op.returns[0] if len(op.returns) == 1 else None
        return out if same is None or same >= len(args) else args[same]

    def _no_value(self, op: Operation, tensors, gpu: GPU | None):
        if gpu is not None and not self.machine.explained:
            self.machine.explained = True
            warnings.warn(
                "a dry run computes shapes, no values: what it reads is nan (0 for whole numbers, False for booleans)",
                stacklevel=4,
            )
        if op.name != "_local_scalar_dense":
            return False
        dtype = tensors[0].dtype
        return float("nan") if dtype.is_floating_point else False if dtype is torch.bool else 0


_has_no_numbers = torch._C.TensorBase.is_meta.__get__  # whatever placement lets is_meta say


def _is_anywhere(tensor: torch.Tensor) -> bool:
    storage = storage_of(tensor)
    return storage is not None and storage._virtual_home is ANYWHERE


def _alias(info) -> str | None:
    """The letter by which a schema says that a result is an argument: "a" of Tensor(a!)."""
    return min(info.before_set) if info is not None and info.is_write and info.before_set else None


def _tensors(args, kwargs) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def _describe(values, key: list) -> None:
    """What of the arguments decides over the result's shape: add it to the key."""
    for value in values:
        if isinstance(value, torch.Tensor):
            key.append(value.dtype)
            key.append(value.shape)
            key.append(value.stride())
            key.append(_has_no_numbers(value))
        elif type(value) is float:
            key.append(float)
        elif isinstance(value, (list, tuple)):
            key.append(len(value))
            _describe(value, key)
        else:
            key.append(value)


def _bound(known: dict) -> None:
    if len(known) > KINDS:
        known.clear()


def _recipe(op: Operation, out, tensors):
    """A function that makes `out` again, from other arguments of the same shapes; None where it cannot."""
    if out is None:
        return lambda args: None
    single = isinstance(out, torch.Tensor)
    known = {tensor.untyped_storage()._cdata for tensor in tensors}
    steps = []
    for at, result in enumerate([out] if single else out):
        same = op.returns[at] if at < len(op.returns) else None
        if same is not None:
            steps.append((same, None))
        elif result is None:
            steps.append((None, None))
        elif (
            not isinstance(result, torch.Tensor)
            or result.untyped_storage()._cdata in known
            or result.device.type != "meta"
        ):
            return None
        else:
            known.add(result.untyped_storage()._cdata)
            steps.append((None, (tuple(result.shape), result.stride(), result.dtype)))
    if single:
        same, new = steps[0]
        return (lambda args: _empty(*new)) if same is None else (lambda args: args[same])
    kind = list if isinstance(out, list) else tuple
    return lambda args: kind(
        args[same] if same is not None else None if new is None else _empty(*new) for same, new in steps
    )


def _empty(shape, stride, dtype) -> torch.Tensor:
    return torch._C._VariableFunctions.empty_strided(shape, stride, dtype=dtype, device="meta")


def _on_meta(value):
    """Tensors with numbers become shapes, where a dry run meets them."""
    if isinstance(value, torch.Tensor):
        if not value.dim() or _has_no_numbers(value):
            return value
        if value.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"a tensor of shape {tuple(value.shape)} that wants gradients was made outside dry_run(). Make the model inside, too"
            )
        return _empty(value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_meta, value))
    if isinstance(value, dict):
        return {name: _on_meta(item) for name, item in value.items()}
    return value


def _legacy_type(tensor: torch.Tensor) -> str:
    return {torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16"}.get(
        tensor.dtype, "Long"
    ) + "Tensor"
