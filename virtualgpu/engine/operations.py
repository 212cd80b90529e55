"""What is known about each operation of ATen, from its schema and a few lists; and PyTorch's words for tensors in the wrong place."""

import torch

from virtualgpu import _compat
from virtualgpu.engine import cuda_differences, half_precision, host_waits
from virtualgpu.engine.cuda_checks import ALERTS, LEGACY, check_of
from virtualgpu.engine.rng import draws, from_default, with_generator
from virtualgpu.engine.scratch_memory import RULES, USERS
from virtualgpu.engine.storage import gpu_of, tensors_of
from virtualgpu.timing import host
from virtualgpu.timing.flops import CONVOLUTIONS, WRITE_ONLY, formula, tf32_switch
from virtualgpu.timing.memory_bound import ELEMENTWISE, KINDS, ORDINARY

aten = torch.ops.aten

# Operations whose tensors may be on different devices: indices and lengths may stay on the CPU
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
PACKING = {aten._pack_padded_sequence, aten._pad_packed_sequence, aten._pack_padded_sequence_backward}
LENGTHS = {aten._ctc_loss, aten._ctc_loss_backward}
# A number on the CPU (no dimensions) may join most operations of GPU tensors; not these, where PyTorch is strict
STRICT = {aten.cat, aten.stack, aten.index_select, aten.gather, aten.take, aten.embedding, aten.nll_loss_forward}
# and among the pointwise ones, those without `device_check: NoCheck` in native_functions.yaml
STRICT_POINTWISE = {
    aten.clamp,
    aten.clamp_,
    aten.clamp_min,
    aten.clamp_min_,
    aten.clamp_max,
    aten.clamp_max_,
    aten.equal,
}
STRICT_POINTWISE |= {aten.gcd, aten.lcm, aten.logaddexp, aten.logaddexp2, aten.igamma, aten.igammac, aten.nextafter}
STRICT |= STRICT_POINTWISE
# Results that are for the host in any case
HOST_RESULTS = {aten._pack_padded_sequence: 1, aten._pad_packed_sequence: 1}
# Results that have no memory on a GPU: what the CPU's kernel keeps for the derivative, and CUDA's does not
EMPTY_RESULTS = {aten.log_sigmoid_forward: 1}
# Namespaces of PyTorch: ATen, and what FSDP2 and symmetric memory register for each device by itself
OWN = {"aten", "prims", "prim", "fsdp", "symm_mem", "_native"}
# What stands for an operation with numbers
ON_GPU = {**half_precision.FFT, **cuda_differences.HISTOGRAMS, **half_precision.LAYER_NORM, **cuda_differences.LAYOUTS}
ON_GPU |= {**half_precision.SCALED_PRODUCTS, **cuda_differences.WIDER}
RESIZING = {"resize_", "resize_as_", "set_", "_resize_output_"}
# Views without PyTorch's tag: what they return has the storage of what they are given
VIEWS = {aten._unsafe_view, aten.lift_fresh, aten._values, aten._indices, aten.values, aten.indices}
VIEWS |= {aten.crow_indices, aten.col_indices, aten.ccol_indices, aten.row_indices}
# Only memory: no kernel runs
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
# Results that may be larger than all that goes in: room is asked for before the CPU allocates them
GROWING = {aten.repeat, aten.repeat_interleave, aten.cat, aten.stack, aten.pad, aten.constant_pad_nd, aten.clone}
GROWING |= {aten.matmul, aten.convolution, aten.embedding, aten.index, aten.contiguous}
GROWING |= {aten.index_select, aten.gather, aten.cdist, aten._cdist_forward, aten.upsample_nearest2d, aten.addr}
GROWING |= {aten.outer, aten.kron, aten.upsample_bilinear2d, aten.upsample_nearest3d, aten.tile, aten.scatter}
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # which argument is the left factor
MKLDNN = " or input should be a MKLDNN tensor and weight is a dense tensor"
SAME_DEVICE = "Expected all tensors to be on the same device"


class Operation:
    """What the schema tells about one operation, once.

    How dispatch passes it: `plain`, as most do, or `composite` (made of other operations, for all devices alike), `is_view` (shares its
    argument's storage), `override` (what carries it out instead), `extension` (not of PyTorch's own), `factory` (makes a tensor from no
    other), `takes_device` (has an argument `device`), `copies` (copy_), `converts` (_to_copy), `foreach` (works on lists, each entry by itself).

    Where its tensors may be: `mixed` (not all on one device), `indexes` (the first argument is what the others index), `packs` (wants lengths
    on the CPU), `strict` (see STRICT).

    What it returns: `new` (makes at least one tensor), `returns` (which argument each result is, None for a new tensor), `writes` (position and
    name of each argument that it writes to; `writes_lists`: one is a list), `derives` (in some derivatives it works in place on a GPU),
    `host_result` (the result that stays on the CPU), `empty_result` (see EMPTY_RESULTS), `returns_value_to_host` (the host waits for a value),
    `shape_from_values` (the result's shape is one of values), `resizes` (may change a storage's size), `may_be_large` (its result may be larger
    than all that goes in; `grows`: see GROWING; `product`: see PRODUCTS), `cacheable` (a dry run may remember its result's shape).

    What carries it out: `on_cpu` and `on_gpu`, for their tensors; `apart` (with numbers it may need more than that: it draws, or is one of
    half_precision.IN_FLOAT32); `random` (draws from a generator; `generator`: one can be given; `drawn_with`: draws the same from one that it
    is given by name, None: nothing does); `alert` (see cuda_checks.ALERTS); `unsupported` (raises what CUDA's kernel refuses). None for most.

    What it costs: `kernel` (takes the time of one, by FLOPs and bytes), `formula` (counts its FLOPs), `kind` (what limits it, where it only
    moves memory), `write_only` (reads none), `tf32_switch` (which setting lets it round to TF32), `convolves`, `pointwise`, `workspace` and
    `temporaries` (memory that it works in), `waits` (asks whether the host waits for it; None: never), `weight` (what it costs the host;
    `weighed_in_call`: that depends on its arguments; `weight_of_view`: of a view, which starts no kernel).
    """

    def __init__(self, func, override=None):
        schema = _compat.schema(func)
        packet = _compat.packet(func)
        arguments = schema.arguments
        self.func, self.name = func, packet.__name__
        self.override = override
        self.alert = ALERTS.get(self.name) if func.namespace == "aten" else None
        self.composite = func.namespace == "aten" and _compat.is_composite(func)
        self.is_view = func.is_view or packet in VIEWS
        if torch.Tag.inplace_view in func.tags and self.name not in RESIZING:
            self.is_view = True  # t_, unsqueeze_, detach_
        self.copies = packet is aten.copy_
        self.converts = packet is aten._to_copy
        self.convolves = func in CONVOLUTIONS
        self.foreach = self.name.startswith("_foreach_") or self.name.startswith("_amp_foreach_")
        self.indexes = packet in INDEXING
        self.packs = packet is aten._pack_padded_sequence
        self.mixed = self.copies or self.indexes or packet in PACKING or packet in LENGTHS
        self.strict = packet in STRICT
        self.returns_value_to_host = torch.Tag.data_dependent_output in func.tags
        self.kernel = not (self.returns_value_to_host or self.foreach or self.copies or self.name in EMPTY)
        self.shape_from_values = torch.Tag.dynamic_output_shape in func.tags
        self.resizes = self.name in RESIZING or any(argument.is_out for argument in arguments)
        # which argument each result is, for operations in place; None: a new tensor
        names = [_alias(argument.alias_info) for argument in arguments]
        self.returns = [names.index(alias) if (alias := _alias(r.alias_info)) else None for r in schema.returns]
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
        self.writes = [(index, argument.name) for index, argument in enumerate(arguments) if written[index]]
        self.writes_lists = any("List" in str(arguments[index].type) for index, _ in self.writes)
        self.formula = formula(func)
        self.kind = KINDS.get(self.name, ELEMENTWISE if torch.Tag.pointwise in func.tags else ORDINARY)
        self.weight = host.weight_of(self.name, torch.Tag.pointwise in func.tags, self.kind.launches)
        self.weighed_in_call = host.depends_on_call(self.name, self.kind)
        self.tf32_switch = tf32_switch(func)
        self.weight_of_view = host.WEIGHTS.get(self.name) if self.is_view else None
        self.write_only = func in WRITE_ONLY
        self.unsupported = check_of(func)
        self.waits = host_waits.rule_of(func)
        self.workspace = USERS.get(self.name) if func.namespace == "aten" else None
        self.temporaries = RULES.get(self.name) if func.namespace == "aten" else None
        self.derives = self.name in cuda_differences.NODES and func.namespace == "aten"
        self.host_result = HOST_RESULTS.get(packet)
        self.empty_result = EMPTY_RESULTS.get(packet)
        self.new = any(argument is None for argument in self.returns)
        self.random = draws(func)
        self.apart = self.random or func in half_precision.IN_FLOAT32
        self.drawn_with = with_generator(func) if self.random else None
        self.on_cpu = from_default(func) if self.random else func
        self.on_gpu = ON_GPU.get(func, func)
        self.generator = any(argument.name == "generator" for argument in arguments)
        self.takes_device = any(argument.name == "device" for argument in arguments)
        tensors = any("Tensor" in str(argument.type) for argument in arguments if not argument.is_out)
        self.factory = self.takes_device and not tensors
        self.extension = func.namespace not in OWN
        self.pointwise = torch.Tag.pointwise in func.tags
        self.grows = packet in GROWING
        self.product = PRODUCTS.get(packet)
        self.may_be_large = self.new and (self.grows or self.pointwise or self.formula is not None)
        special = self.composite, self.is_view, self.override, self.extension, self.factory
        self.plain = not any((*special, self.generator, self.takes_device))
        in_place = torch.Tag.inplace_view in func.tags
        self.cacheable = not (self.resizes or self.returns_value_to_host or in_place or self.name.startswith("rand"))

    def written(self, args, kwargs) -> list[torch.Tensor]:
        """The arguments that it writes to, those in lists included."""
        return tensors_of([args[index] if index < len(args) else kwargs.get(name) for index, name in self.writes], {})


def _alias(info) -> str | None:
    """The letter by which a schema says that a result is an argument: "a" of Tensor(a!)."""
    return min(info.before_set) if info is not None and info.is_write and info.before_set else None


# Numbers as the tensors that stand for them
NUMBERS = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}


def with_tensors(func, args) -> list:
    """A tensor that stands for a number (TorchScript's constants) comes as that number, which some operations refuse: as tensors again."""
    arguments = _compat.schema(func).arguments
    return [
        torch.scalar_tensor(value, dtype=NUMBERS[type(value)])
        if type(value) in NUMBERS and str(argument.type) == "Tensor"
        else value
        for value, argument in zip(args, arguments, strict=False)
    ]


def mismatch(op: Operation, args, kwargs) -> RuntimeError:
    """PyTorch's error for tensors on two devices: which words it has depends on the operation."""
    values = list(zip([argument.name for argument in _compat.schema(op.func).arguments], args, strict=False))
    named = []
    for name, value in (*values, *kwargs.items()):
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                named.append((name, tensor, tensor.device))
    if op.name in ("convolution", "_convolution"):
        (_, input, place), *others = named
        for name, tensor, where in others:
            if where.type != place.type:
                kinds = f"Input type ({type_name(input)}) and {name} type ({type_name(tensor)}) should be the same"
                return RuntimeError(kinds + ("" if place.type == "cuda" else MKLDNN))
    common = named[0][2]
    if op.name == "allclose" or (op.pointwise and _compat.packet(op.func) not in STRICT_POINTWISE):
        common = next((where for _, _, where in named if where.type == "cuda"), common)  # TensorIterator's
        other = next((where for _, _, where in named if where != common), common)
        return RuntimeError(f"{SAME_DEVICE}, but found at least two devices, {common} and {other}!")
    name, other = next(((name, where) for name, _, where in named if where != common), named[0][::2])
    if op.foreach:
        return RuntimeError(f"{SAME_DEVICE}, but found at least two devices, {common} and {other}!")
    return wrong_device(op.func, name, other, common)


def wrong_device(func, name: str, other, common) -> RuntimeError:
    """The error of the code that PyTorch generates around each kernel (torchgen/dest/register_dispatch_key.py)."""
    kernel = _compat.packet(func).__name__
    if kernel == "embedding":
        func, name = aten.index_select.default, "index"
    elif kernel == "stack":
        func = aten.cat.default
    kernel, overload = _compat.packet(func).__name__, _compat.overload_name(func)
    overload = "" if overload == "default" else overload
    wrapper = "_".join(filter(None, (kernel, overload))) if _compat.is_structured(func) else f"{overload}_{kernel}"
    return RuntimeError(
        f"{SAME_DEVICE}, but got {name} is on {other}, different from other tensors on "
        f"{common} (when checking argument in method wrapper_CUDA_{wrapper})"
    )


def type_name(tensor: torch.Tensor) -> str:
    """What Tensor.type() answers, and some errors still say: torch.cuda.FloatTensor."""
    sparse = "sparse." if tensor.layout is torch.sparse_coo else ""
    where = "cuda." if gpu_of(tensor) else ""
    return f"torch.{where}{sparse}{LEGACY.get(tensor.dtype, str(tensor.dtype))}"
