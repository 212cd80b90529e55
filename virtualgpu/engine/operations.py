"""What is known about each operation of ATen, from its schema and a few lists; and PyTorch's words for tensors in the wrong place."""

from itertools import zip_longest

import torch

from virtualgpu.engine.machine import gpu_of
from virtualgpu.simulation.costs import CONVOLUTIONS, WRITE_ONLY, formula

aten = torch.ops.aten

# Operations whose tensors may be on different devices: indices and lengths may stay on the CPU
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
PACKING = {aten._pack_padded_sequence, aten._pad_packed_sequence, aten._pack_padded_sequence_backward}
# A number on the CPU (no dimensions) may join most operations of GPU tensors; not these, where PyTorch is strict
STRICT = {aten.cat, aten.stack, aten.index_select, aten.gather, aten.take, aten.embedding, aten.nll_loss_forward}
# Results that are for the host in any case
HOST_RESULTS = {aten._pack_padded_sequence: 1, aten._pad_packed_sequence: 1}
MASKS = {torch.bool, torch.uint8}  # as indices
RESIZING = {"resize_", "resize_as_", "set_", "_resize_output_"}
LEGACY = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.uint8: "ByteTensor",
    torch.bool: "BoolTensor",
}


class Operation:
    """What the schema tells about one operation, once."""

    __slots__ = (
        "cacheable",
        "convolves",
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
        "strict",
        "write_only",
    )

    def __init__(self, func):
        schema = func._schema
        packet = func._overloadpacket
        self.func, self.name = func, packet.__name__
        self.is_view = func.is_view or packet is aten._unsafe_view or packet is aten.lift_fresh
        self.copies = packet is aten.copy_
        self.convolves = func in CONVOLUTIONS
        self.foreach = self.name.startswith("_foreach_") or self.name.startswith("_amp_foreach_")
        self.indexes = packet in INDEXING
        self.mixed = self.foreach or self.copies or self.indexes or packet in PACKING
        self.strict = packet in STRICT
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


def _alias(info) -> str | None:
    """The letter by which a schema says that a result is an argument: "a" of Tensor(a!)."""
    return min(info.before_set) if info is not None and info.is_write and info.before_set else None


def tensors_of(args, kwargs) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def mismatch(op: Operation, args) -> RuntimeError:
    """PyTorch's error for tensors on two devices: which words it has depends on the operation."""
    schema = op.func._schema.arguments
    named = []
    for argument, value in zip_longest(schema, args):
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                gpu = gpu_of(tensor)
                named.append((argument.name, tensor, torch.device("cpu") if gpu is None else gpu.device))
    if op.name in ("convolution", "_convolution") and named[0][2].type != named[1][2].type:
        kinds = [type_name(tensor) for _, tensor, _ in named[:2]]
        return RuntimeError(f"Input type ({kinds[0]}) and weight type ({kinds[1]}) should be the same")
    if torch.Tag.pointwise in op.func.tags:
        first, other = named[0][2], next(d for _, _, d in named if d != named[0][2])
        return RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {other}!"
        )
    common = named[0][2]
    name, odd = next((name, d) for name, _, d in named if d != common)
    return RuntimeError(
        f"Expected all tensors to be on the same device, but got {name} is on {odd}, different from other tensors on "
        f"{common} (when checking argument in method wrapper_CUDA_{op.name})"
    )


def type_name(tensor: torch.Tensor) -> str:
    """What Tensor.type() answers, and some errors still say: torch.cuda.FloatTensor."""
    return f"torch.{'cuda.' if gpu_of(tensor) else ''}{LEGACY.get(tensor.dtype, str(tensor.dtype))}"
