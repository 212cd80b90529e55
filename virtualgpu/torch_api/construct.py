"""What makes tensors or is asked for devices before the dispatch mode sees it: torch.tensor, one_hot, cov, torch.device, FloatTensor."""

import functools
from collections.abc import Callable

import torch

from virtualgpu import _compat
from virtualgpu.engine.cuda_checks import LEGACY
from virtualgpu.engine.dry_run import put_on_meta
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.storage import gpu_of
from virtualgpu.errors import foreign, on_real_gpu
from virtualgpu.torch_api.patches import Patches, standing_in

# -- torch.tensor, as_tensor and asarray: tensors of the program's numbers, which C++ reads, and of other tensors, about whose place it would be
# told: on the CPU.


def _install_constructors(machine: Machine, patches: Patches) -> None:
    _compat.device_constructors()  # torch.set_default_device remembers PyTorch's own functions, not those here
    patches.stand_in_builtin((torch,), "tensor", _tensor, machine)
    patches.stand_in_builtin((torch,), "as_tensor", _as_tensor, machine)
    patches.stand_in_builtin((torch,), "asarray", _asarray, machine)


def is_on_gpu(machine: Machine, data) -> bool:
    """Raises RuntimeError for a tensor of a real GPU."""
    if not isinstance(data, torch.Tensor) or machine.local.bypass:
        return False
    if machine.is_on_real_gpu(data):
        raise on_real_gpu(_compat.real_device(data))
    return gpu_of(data) is not None


def _with_numbers(machine: Machine, data):
    """In a dry run C++ cannot look into a list of tensors: in place of each, one with the number that it reads there."""
    if not isinstance(data, (list, tuple)) or not machine.dry or machine.local.bypass:
        return data
    return [(_number if isinstance(item, torch.Tensor) else _with_numbers)(machine, item) for item in data]


def _number(machine: Machine, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() != 1 or not _compat.is_really_meta(tensor):
        return tensor
    number = tensor.item()
    with machine.untracked():
        return torch.full(tensor.shape, number, dtype=tensor.dtype, device="cpu")


def _as_tensor(machine: Machine, original, data, dtype=None, device=None):
    """Of a tensor: itself, where neither dtype nor device ask for another."""
    data = _with_numbers(machine, data)
    if not is_on_gpu(machine, data):
        return _marked(machine, original(data, dtype=dtype, device=device), device)
    device = device if device is not None else _compat.default_device()
    return data.to(data.device if device is None else device, data.dtype if dtype is None else dtype)


def _asarray(machine: Machine, original, obj, *, dtype=None, device=None, copy=None, requires_grad=False):
    """Of a tensor: the same memory, where nothing asks for another."""
    if is_on_gpu(machine, obj):
        device = device if device is not None else _compat.default_device()
        other_device = device is not None and machine.gpu(device) is not gpu_of(obj)
        if copy is False and other_device:
            raise ValueError(f"can't alias tensor from device '{obj.device}' to '{torch.device(device)}'.")
        if other_device or (dtype is not None and dtype is not obj.dtype and copy is not False):
            obj, dtype, copy = obj.to(device if other_device else obj.device, dtype or obj.dtype), None, None
        device = None
    obj = _with_numbers(machine, obj)
    options = {"dtype": dtype, "copy": copy, "requires_grad": requires_grad}
    if machine.dry and isinstance(obj, torch.UntypedStorage):  # safetensors: a file's, which keeps its numbers
        with machine.untracked():
            out = original(obj, **options)
        return out if device is None else out.to(device)
    return _marked(machine, original(obj, device=device, **options), device)


def _tensor(machine: Machine, original, data, *args, device=None, pin_memory=False, **kwargs):
    """Of a tensor: a copy where that is. pin_memory=True pins below the dispatch mode."""
    if device is None and is_on_gpu(machine, data) and _compat.default_device() is None:
        device = data.device
    data = _with_numbers(machine, data)
    out = _marked(machine, original(data, *args, device=device, **kwargs), device)
    return out.pin_memory() if pin_memory else out


def _marked(machine: Machine, out: torch.Tensor, device) -> torch.Tensor:
    """Where the program has asked for meta in a dry run: C++ copies it there, and dispatch cannot tell that from copies of its own."""
    device = device if device is not None else _compat.default_device()
    asked = device is not None and torch.device(device).type == "meta"
    return put_on_meta(out) if asked and machine.dry else out


# -- Devices that C++ cannot tell: "cuda" without an index where it asks CUDA for the current one, and, on some wheels, `device=1`.
#
# What makes a tensor from Python's numbers (torch.tensor and its kind) does not leave "cuda" to the dispatcher: it asks C++'s CUDA for
# the current device, which is 0 for ever without a driver, and an error on wheels without CUDA. So "cuda" becomes the current GPU
# before C++ meets it, also where torch.set_default_device or `with torch.device("cuda")` say it.
#
# Wheels without CUDA do not know either which device a bare number means: `torch.device(1)` and `torch.ones(2, device=1)` raise (on a
# Mac they mean mps). There a number becomes cuda:number in each function that takes a device. torch.device is another class then than
# the one that a library imported earlier may have as an annotation; isinstance knows both as one, TorchScript does not.


ASKING = ["as_tensor", "asarray", "tensor"]
SPARSE = [f"sparse_{kind}_tensor" for kind in ("bsc", "bsr", "compressed", "coo", "csc", "csr")]
# Besides those that torch.set_default_device knows
LIKE = ["empty_like", "full_like", "normal", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"]
METHODS = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"]


def _install_devices(machine: Machine, patches: Patches) -> None:
    spelling = _Spelling(machine)
    for name, function in spelling.functions().items():
        builtin = _compat.builtin_name(getattr(torch, name))
        if builtin is not None:
            patches.undo(_compat.register_as_builtin(function, builtin))
        patches.replace(torch, name, function)
    patches.stand_in(_compat.DeviceContext, "__torch_function__", spelling.in_context)
    patches.stand_in(_compat.NN, "_parse_to", _parse_to)
    if spelling.cuda_wheel:
        return
    patches.stand_in(_compat.fake_tensor.FakeTensorConverter, "from_real_tensor", _from_real_tensor)
    for owner, names in ((torch.fft, ("fftfreq", "rfftfreq")), (torch.Tensor, METHODS)):
        for name in names:
            patches.wrap(owner, name, spelling.spells)
    patches.replace(torch, "device", Device)


class _Spelling:
    """What makes each function write the device that it is given as C++ understands it."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.known, self.cuda_wheel = _compat.device_constructors(), _compat.numbers_are_gpus()
        # These make C++'s current device theirs first, which fails even with an index without CUDA, and where there are fewer real GPUs:
        # made on the CPU, and copied
        made_by_device = machine.real_gpus or not self.cuda_wheel
        originals = [getattr(torch, name) for name in [*SPARSE, "range"]] if made_by_device else []
        self.copied = {original: standing_in(original, self.copy) for original in originals}

    def functions(self) -> dict[str, Callable]:
        """{name in torch: what stands in for it}."""
        names = {*ASKING, *SPARSE} | ({"range"} if self.copied else set())
        if not self.cuda_wheel:
            names |= {*LIKE, *(out.__name__ for out in self.known if hasattr(torch, out.__name__))}
        functions = {}
        for name in sorted(names):
            original = getattr(torch, name)
            function = self.copied.get(original) or self.spells(original)
            functions[name] = standing_in(function, self.not_dry) if name in SPARSE else function
        return functions

    def spelled(self, device):
        """A torch.device with an index for a number, and for "cuda"; what else it may be stays."""
        device = _numbered(device)
        if isinstance(device, str) and device.partition(":")[0] == "cuda":
            device = _compat.Device(device)
        plain = type(device) is not _compat.Device or device.type != "cuda" or device.index is not None
        return device if plain or self.machine.local.bypass else _compat.Device("cuda", self.machine.local.current)

    def spells(self, original):
        """A function that gives `original` its device spelled."""

        @functools.wraps(original)
        def function(*args, **kwargs):
            __tracebackhide__ = True
            if kwargs.get("device") is not None:
                kwargs["device"] = self.spelled(kwargs["device"])
            try:
                return original(*args, **kwargs)
            except RuntimeError as error:
                frames = foreign(error.__traceback__)
                raise error.with_traceback(frames) from error.__cause__  # PyTorch's error, for the line above

        return function

    def copy(self, original, *args, device=None, requires_grad=False, **kwargs):
        """Made on the CPU, and copied from there."""
        out = original(*args, **kwargs)
        return (out if device is None else out.to(self.spelled(device))).requires_grad_(requires_grad)

    def not_dry(self, function, *args, **kwargs):
        """C++ looks for a sparse tensor's size among the indices before it comes to a dispatch mode."""
        if self.machine.dry and not self.machine.local.bypass:
            raise NotImplementedError(
                f"sparse tensors are not modelled in a dry run ({function.__name__}). Run this line outside dry_run()"
            )
        return function(*args, **kwargs)

    def in_context(self, run, context, func, types, args=(), kwargs=None):
        """What is made inside `with torch.device("cuda")` reaches C++ from here."""
        kwargs = kwargs or {}
        if func in self.known and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.spelled(context.device)}
        return run(context, self.copied.get(func, func), types, args, kwargs)


def _parse_to(original, *args, **kwargs):
    """What nn.Module.to(1) and nn.Module.to(tensor) are given."""
    other = args[0] if args else kwargs.pop("tensor", None)
    if isinstance(other, torch.Tensor):
        args = (other.device, other.dtype, *args[1:])
    if kwargs.get("device") is not None:
        kwargs["device"] = _numbered(kwargs["device"])
    return original(*map(_numbered, args[:1]), *args[1:], **kwargs)


def _from_real_tensor(original, converter, mode, tensor, *args, **kwargs):
    """Of a fake tensor that says cuda and wants gradients, autograd's C++ asks a stream, and ends the process where it finds no CUDA."""
    if tensor.requires_grad and tensor.is_cuda:
        raise NotImplementedError(
            "torch.export and other users of fake tensors need a wheel of PyTorch with CUDA (no driver) for parameters on a "
            "virtual GPU; or move the model to the CPU first"
        )
    return original(converter, mode, tensor, *args, **kwargs)


def _numbered(device):
    """cuda:1 for 1; anything else as it is."""
    if isinstance(device, (str, bool, torch.Tensor, _compat.Device, torch.dtype)) or not hasattr(device, "__index__"):
        return device
    return _compat.Device("cuda", device.__index__())


class _Kind(type):
    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, _compat.Device)

    def __subclasscheck__(cls, other) -> bool:
        return issubclass(other, _compat.Device) or other is cls

    def __call__(cls, *args, **kwargs):
        if len(args) + len(kwargs) == 1 and "type" not in kwargs:
            return _compat.Device(_numbered(*args, **kwargs))
        return _compat.Device(*args, **kwargs)


Device = _Kind("device", (), {"__module__": "torch", "__doc__": _compat.Device.__doc__})


# -- torch.cuda.FloatTensor and its kind: constructors, and the types that isinstance asks for.


def _install_legacy(machine: Machine, patches: Patches) -> None:
    plain_types = {}
    for dtype, name in LEGACY.items():
        plain = plain_types[f"torch.{name}"] = getattr(torch, name)
        shared = {"machine": machine, "plain": plain, "dtype": dtype}
        patches.add(torch.cuda, name, _OnGPU(name, (), shared | {"__module__": "torch.cuda", "is_cuda": True}))
        on_cpu = {"__module__": "torch", "is_cuda": False, "layout": torch.strided}
        patches.replace(torch, name, _OnCPU(name, (), shared | on_cpu))
    patches.stand_in(torch, "set_default_tensor_type", _set_default, plain_types)


def _set_default(plain_types: dict[str, type], original, t) -> None:
    """torch.cuda.FloatTensor: new tensors are float32, and on the GPU."""
    name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
    if not name.startswith("torch.cuda."):
        torch.set_default_device(None)
        original(plain_types.get(name, t))
        return
    kind = name.rpartition(".")[2]
    torch.set_default_dtype(next(dtype for dtype, other in LEGACY.items() if other == kind))
    torch.set_default_device("cuda")


class _Legacy(type):
    """The class of such a type, which is of tensors of one dtype. plain: PyTorch's own on the CPU."""

    machine: Machine
    plain: type
    dtype: torch.dtype


class _OnCPU(_Legacy):
    """torch.FloatTensor itself takes every tensor here for its own, and none that has no values (torchvision's ToTensor asks it)."""

    def __instancecheck__(cls, instance) -> bool:
        if cls.machine.dry and isinstance(instance, torch.Tensor):
            return (instance.dtype, instance.device.type, instance.layout) == (cls.dtype, "cpu", torch.strided)
        return isinstance(instance, cls.plain) and gpu_of(instance) is None

    def __call__(cls, *args, **kwargs):
        return cls.plain(*args, **kwargs)


class _OnGPU(_Legacy):
    """torch.cuda.FloatTensor."""

    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype is cls.dtype and gpu_of(instance) is not None

    def __call__(cls, *args, device=None):
        """FloatTensor(2, 3): of that size, uninitialized; FloatTensor([1, 2]): of those values."""
        gpu = cls.machine.expect_gpu("cuda" if device is None else device)
        with cls.machine.untracked():
            out = cls.plain(*args)
        return out.to(gpu.device)


def install(machine: Machine, patches: Patches) -> None:
    """All of this file's stand-ins."""
    _install_constructors(machine, patches)
    _install_devices(machine, patches)
    _install_legacy(machine, patches)
