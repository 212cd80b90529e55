"""What is known about each operation of ATen, from its schema and a few lists; and for which of them the host waits."""

from collections.abc import Callable

import torch
from torch import Tensor

from virtualgpu import _compat
from virtualgpu.engine import cuda_differences
from virtualgpu.engine.cuda_checks import ALERTS, CHECKS
from virtualgpu.engine.gpu import USERS
from virtualgpu.engine.rng import draws, from_default, with_generator
from virtualgpu.engine.scratch_memory import TEMPORARIES
from virtualgpu.engine.storage import gpu_of, tensors_of
from virtualgpu.timing import host
from virtualgpu.timing.flops import CONVOLUTIONS, WRITE_ONLY, formula, tf32_switch
from virtualgpu.timing.memory_bound import ELEMENTWISE, KINDS, ORDINARY

aten = torch.ops.aten

# Operations whose tensors may be on different devices: indices and lengths may stay on the CPU
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
PACKING = {aten._pack_padded_sequence, aten._pad_packed_sequence, aten._pack_padded_sequence_backward}
LENGTHS = {aten._ctc_loss, aten._ctc_loss_backward}
# A number on the CPU (no dimensions) may join most operations of GPU tensors; not these, where PyTorch is strict: the pointwise ones among
# them are those without `device_check: NoCheck` in native_functions.yaml
STRICT = {aten.cat, aten.stack, aten.index_select, aten.gather, aten.take, aten.embedding, aten.nll_loss_forward}
STRICT |= {aten.clamp, aten.clamp_, aten.clamp_min, aten.clamp_min_, aten.clamp_max, aten.clamp_max_, aten.equal}
STRICT |= {aten.gcd, aten.lcm, aten.logaddexp, aten.logaddexp2, aten.igamma, aten.igammac, aten.nextafter}
# Results that are for the host in any case
HOST_RESULTS = {aten._pack_padded_sequence: 1, aten._pad_packed_sequence: 1}
# Results that have no memory on a GPU: what the CPU's kernel keeps for the derivative, and CUDA's does not
EMPTY_RESULTS = {aten.log_sigmoid_forward: 1}
# Namespaces of PyTorch: ATen, and what FSDP2 and symmetric memory register for each device by itself
OWN = {"aten", "prims", "prim", "fsdp", "symm_mem", "_native"}
# What stands for an operation with numbers
ON_GPU = {
    **cuda_differences.FFT,
    **cuda_differences.HISTOGRAMS,
    **cuda_differences.LAYER_NORM,
    **cuda_differences.LAYOUTS,
}
ON_GPU |= cuda_differences.WIDER
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
    cuda_differences.IN_FLOAT32); `random` (draws from a generator; `generator`: one can be given; `drawn_with`: draws the same from one that it
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
        aten_own = func.namespace == "aten"
        self.override = override
        self.alert = ALERTS.get(self.name) if aten_own else None
        self.composite = aten_own and _compat.is_composite(func)
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
        self.unsupported = CHECKS.get(self.name) if aten_own else None
        self.waits = _waits_of(func)
        self.workspace = USERS.get(self.name) if aten_own else None
        self.temporaries = TEMPORARIES.get(self.name) if aten_own else None
        self.derives = aten_own and self.name in cuda_differences.NODES
        self.host_result = HOST_RESULTS.get(packet)
        self.empty_result = EMPTY_RESULTS.get(packet)
        self.new = any(argument is None for argument in self.returns)
        self.random = draws(func)
        self.apart = self.random or func in cuda_differences.IN_FLOAT32
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


# -- For which operations the host waits for the GPU, and whether torch.cuda.set_sync_debug_mode speaks of it.
#
# It speaks where PyTorch waits by c10::cuda (memcpy_and_sync, stream_synchronize), as item() does; Thrust's algorithms wait by themselves. By
# the kernels in aten/src/ATen/native, and, for what they share with the CPU's, by what PyTorch's profiler shows below them there. The source
# counts where documentation says more: `cond` by another norm than 2, -2 and "nuc" reads no value. What C++ composes of other
# operations (linalg.inv of inv_ex and a check) is not here, for these come by.


SILENTLY, ALOUD = 1, 2
Rule = Callable[[tuple, dict], int]  # (args, kwargs) -> SILENTLY, ALOUD, or 0: it does not wait
MASKS = {torch.bool, torch.uint8}  # as indices
FUSED_MODE = 2048  # numbers of a row, up to which torch.mode is one kernel (TensorModeKernel.cpp)


def _aloud_if(condition: Callable[[tuple, dict], object]) -> Rule:
    return lambda args, kwargs: ALOUD if condition(args, kwargs) else 0


def _argument(args, kwargs, position: int, name: str, default=None):
    return args[position] if len(args) > position else kwargs.get(name, default)


def _reads(name: str, *positions: int) -> Rule:
    """It waits where one of these arguments, or the one of that name, is a tensor on a GPU."""
    return _aloud_if(lambda args, kwargs: any(_is_on_gpu(_argument(args, kwargs, at, name)) for at in positions))


def _is_on_gpu(value) -> bool:
    return isinstance(value, Tensor) and gpu_of(value) is not None


def _by_mask(args, kwargs) -> bool:
    return any(index is not None and index.dtype in MASKS for index in args[1])


def _compares_values(args, kwargs) -> bool:
    """equal: two sizes are two tensors, and nothing equals nothing. A traced function hands over numbers."""
    one, other = args[:2]
    return not (isinstance(one, Tensor) and isinstance(other, Tensor)) or (one.shape == other.shape and one.numel())


def _finds_range(args, kwargs) -> bool:
    """histc: the range of the numbers, where none is given."""
    low, high = (_argument(args, kwargs, at, name, 0) for at, name in ((2, "min"), (3, "max")))
    return low == high and args[0].numel()


def _sorts(args, kwargs) -> bool:
    """isin of many: the unique ones among both are sorted, unless they are so already (TensorCompare.cpp)."""
    elements, among = (value.numel() if isinstance(value, Tensor) else 1 for value in args[:2])
    many = isinstance(args[1], Tensor) and among >= 10 * elements**0.145
    return many and not kwargs.get("assume_unique")


def _long_rows(args, kwargs) -> int:
    dim = _argument(args, kwargs, 1, "dim", -1)
    return SILENTLY if args[0].dim() and args[0].shape[dim] > FUSED_MODE else 0


def _within(*nodes: str) -> Rule:
    """Derivatives ask for a value that C++ does not ask for where a dispatch mode is on (areAnyTensorSubclassLike): it takes another way,
    of which this operation is a part."""
    return _aloud_if(lambda args, kwargs: _compat.graph_task() != -1 and _compat.current_node().name() in nodes)


# What a decomposition reports is read: infos.any().item() (_linalg_check_errors), infos.cpu() (_check_gesvdj_convergence); lengths are copied
# to the GPU (ctc_loss); std.min() (normal)
ALWAYS = (
    "_linalg_check_errors _linalg_eigh _linalg_svd linalg_eig _linalg_eigvals linalg_eigvals linalg_lstsq linalg_pinv linalg_polar "
    "linalg_matrix_sqrth _ctc_loss _ctc_loss_backward masked_scatter_backward normal.float_Tensor normal.Tensor_Tensor "
    "quantize_per_tensor.tensor_qparams _nested_tensor_from_mask _nested_tensor_from_mask_left_aligned"
)
FROM_STRIDED = ("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc")
# x[mask] = values: PyTorch counts the mask's entries, unless it is one number of the host's, with which it fills
WRITES_BY_MASK = _aloud_if(lambda a, k: (a[2].numel() != 1 or gpu_of(a[2]) is not None) and _by_mask(a, k))
# By name, or by name and overload: arguments by position (a) and by name (k)
WAITS: dict[str, Rule] = {
    **dict.fromkeys(ALWAYS.split(), lambda a, k: ALOUD),
    "linalg_matrix_exp": _aloud_if(lambda a, k: a[0].numel() and a[0].shape[-1] > 1),  # their norms
    **dict.fromkeys(FROM_STRIDED, _aloud_if(lambda a, k: a[0].layout is torch.strided)),
    # indices of several dimensions become one by factors that are copied from the host
    "_coalesce": lambda a, k: ALOUD if a[0].sparse_dim() > 1 else SILENTLY,
    "segment_reduce": _aloud_if(lambda a, k: not k.get("unsafe") and k.get("lengths") is not None),
    **dict.fromkeys(("linspace", "logspace"), _reads("start", 0, 1)),
    **dict.fromkeys(("masked_fill.Tensor", "masked_fill_.Tensor"), _reads("value", 2)),
    **dict.fromkeys(("index_fill.int_Tensor", "index_fill_.int_Tensor"), _reads("value", 3)),
    # its smallest and largest index
    "searchsorted": _aloud_if(lambda a, k: (sorter := k.get("sorter")) is not None and sorter.numel()),
    "histc": _aloud_if(_finds_range),
    "isin": _aloud_if(_sorts),
    "equal": _aloud_if(_compares_values),
    "repeat_interleave": _aloud_if(lambda a, k: k.get("output_size") is None),
    **dict.fromkeys(("index", "_unsafe_index"), _aloud_if(_by_mask)),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), WRITES_BY_MASK),
    "mode": _long_rows,
    **dict.fromkeys(("unique_dim", "unique_dim_consecutive"), lambda a, k: SILENTLY),
    "unique_consecutive": lambda a, k: ALOUD if _argument(a, k, 3, "dim") is None else SILENTLY,
    "where": _within("MaskedFillBackward1"),
    "logical_and": _within("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"),
    "cumprod": _within("ProdBackward0", "ProdBackward1", "CumprodBackward0"),
}


def _waits_of(func) -> Rule | None:
    """When the host waits for an operation; None: never. PyTorch's tags say so of those that give a value, or a shape of values."""
    if func.namespace != "aten":
        return None
    name, overload = _compat.packet(func).__name__, _compat.overload_name(func).removesuffix("_out")
    rule = WAITS.get(f"{name}.{overload}", WAITS.get(name))
    if rule is not None:
        return rule
    if any(argument.name == "check_errors" for argument in _compat.schema(func).arguments):  # linalg's that end in _ex
        return _aloud_if(lambda a, k: k.get("check_errors"))
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return (lambda a, k: ALOUD) if any(tag in func.tags for tag in tags) else None
