"""Devices that C++ cannot tell: "cuda" without an index where it asks CUDA for the current one, and, on some wheels, `device=1`.

What makes a tensor from Python's numbers (torch.tensor and its kind) does not leave "cuda" to the dispatcher: it asks C++'s CUDA for
the current device, which is 0 for ever without a driver, and an error on wheels without CUDA. So "cuda" becomes the current GPU
before C++ meets it, also where torch.set_default_device or `with torch.device("cuda")` say it.

Wheels without CUDA do not know either which device a bare number means: `torch.device(1)` and `torch.ones(2, device=1)` raise (on a
Mac they mean mps). There a number becomes cuda:number in each function that takes a device. torch.device is another class then than
the one that a library imported earlier may have as an annotation; isinstance knows both as one, TorchScript does not.
"""

import functools
from collections.abc import Callable

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.errors import foreign
from virtualgpu.torch_api.registry import Patches, standing_in

ASKING = ["as_tensor", "asarray", "tensor"]
SPARSE = [f"sparse_{kind}_tensor" for kind in ("bsc", "bsr", "compressed", "coo", "csc", "csr")]
# Besides those that torch.set_default_device knows
LIKE = ["empty_like", "full_like", "normal", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"]
METHODS = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"]


def install(machine: Machine, patches: Patches) -> None:
    """Replace what asks C++ for the current GPU; on wheels without CUDA torch.device and what takes one, too."""
    spelling = Spelling(machine)
    for name, function in spelling.functions().items():
        builtin = _compat.builtin_name(getattr(torch, name))
        if builtin is not None:
            patches.undo(_compat.register_as_builtin(function, builtin))
        patches.replace(torch, name, function)
    patches.stand_in(_compat.DeviceContext, "__torch_function__", spelling.in_context)
    patches.stand_in(_compat.NN, "_parse_to", parse_to)
    if spelling.cuda_wheel:
        return
    patches.stand_in(_compat.fake_tensor.FakeTensorConverter, "from_real_tensor", from_real_tensor)
    for owner, names in ((torch.fft, ("fftfreq", "rfftfreq")), (torch.Tensor, METHODS)):
        for name in names:
            patches.wrap(owner, name, spelling.spells)
    patches.replace(torch, "device", Device)


class Spelling:
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
            names |= {*LIKE, *(made.__name__ for made in self.known if hasattr(torch, made.__name__))}
        functions = {}
        for name in sorted(names):
            original = getattr(torch, name)
            function = self.copied.get(original) or self.spells(original)
            functions[name] = standing_in(function, self.not_dry) if name in SPARSE else function
        return functions

    def spelled(self, device):
        """A torch.device with an index for a number, and for "cuda"; what else it may be stays."""
        device = numbered(device)
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
        made = original(*args, **kwargs)
        return (made if device is None else made.to(self.spelled(device))).requires_grad_(requires_grad)

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


def parse_to(original, *args, **kwargs):
    """What nn.Module.to(1) and nn.Module.to(tensor) are given."""
    other = args[0] if args else kwargs.pop("tensor", None)
    if isinstance(other, torch.Tensor):
        args = (other.device, other.dtype, *args[1:])
    if kwargs.get("device") is not None:
        kwargs["device"] = numbered(kwargs["device"])
    return original(*map(numbered, args[:1]), *args[1:], **kwargs)


def from_real_tensor(original, converter, mode, tensor, *args, **kwargs):
    """Of a fake tensor that says cuda and wants gradients, autograd's C++ asks a stream, and ends the process where it finds no CUDA."""
    if tensor.requires_grad and tensor.is_cuda:
        raise NotImplementedError(
            "torch.export and other users of fake tensors need a wheel of PyTorch with CUDA (no driver) for parameters on a "
            "virtual GPU; or move the model to the CPU first"
        )
    return original(converter, mode, tensor, *args, **kwargs)


def numbered(device):
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
            return _compat.Device(numbered(*args, **kwargs))
        return _compat.Device(*args, **kwargs)


Device = _Kind("device", (), {"__module__": "torch", "__doc__": _compat.Device.__doc__})
