"""From where in the program an operation was called, by Python's frames; and whether Python holds what C++ made for the call."""

import sys
import warnings
from types import FrameType

import torch

from virtualgpu import _compat

BEGIN = ("virtualgpu.run.", "virtualgpu.torch_api.processes")  # what calls the program, or a thread of it


def below_another_mode() -> bool:
    """Did the operation come through another dispatch mode, or a kernel that is written in Python?"""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(64):
        if frame is None:
            break
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "__torch_dispatch__" and not name.startswith("virtualgpu."):
            return True
        frame = frame.f_back
    return False


def call_site() -> tuple:
    """The call that Python is in: its frame and instruction, or the backward pass."""
    task = _compat.graph_task()
    if task != -1:
        return ("backward", task)
    frame = callers_frame()
    return (id(frame), frame.f_lasti) if frame is not None else ()


def callers_frame():
    """The frame of Python that called the operation: not of ours, and not of another mode or kernel in Python on the way."""
    frame = caller = sys._getframe(1)
    for _ in range(64):
        if frame is None:
            break
        name = frame.f_globals.get("__name__", "")
        if name.startswith(BEGIN):
            break
        if frame.f_code.co_name == "__torch_dispatch__" or name.startswith("virtualgpu.") or name in _compat.BETWEEN:
            caller = frame.f_back
        frame = frame.f_back
    return caller


def initializes() -> bool:
    """Did one of torch.nn.init's functions call the operation? Numbers that it draws again and again until they suit are none of the
    program's decisions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith(("virtualgpu.", "torch.")):
        if name == "torch.nn.init":
            return True
        frame = frame.f_back
    return False


def warn_at_the_program(message: str) -> None:
    """A warning at the line of the program, below all of ours and PyTorch's: as from C++, once a line, unless its filters say otherwise."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("virtualgpu.", "torch.")):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)


# -- What C++ makes for a call of its own.


class MadeByCpp:
    """On a storage that PyTorch's own C++ made for its use: zeros for a gradient that is missing, the canvas of one_hot.

    Options that C++ copies from a GPU tensor say CPU here. Such a tensor belongs with whatever it meets, inside the call of Python
    that it was made in (`site`), or inside the same backward pass. Once Python has it, it is the CPU's: `Holders` tells, where the next
    call comes from the same instruction.
    """

    __slots__ = ("call_site",)
    gpu = None
    nbytes = 0
    block = None
    inferred = False

    def __init__(self):
        self.call_site = call_site()

    @property
    def in_creating_call(self) -> bool:
        """Are we still where it was made?"""
        return self.call_site == call_site()

    @property
    def in_backward(self) -> bool:
        """Was it made in a backward pass, which hands it to functions of Python as well?"""
        return self.call_site[:1] == ("backward",)


class Holders:
    """Does Python hold a tensor that C++ made, or C++ alone? Then an operation's arguments are all that refers to it.

    How many references that makes depends on the versions of Python and PyTorch: `learn` looks once.
    """

    of_cpp: int | None = None  # None: not known yet
    seen: list[int] | None = None

    def learn(self) -> None:
        """Look at what torch.vander hands from one operation to the next. It needs our dispatch mode, and no GPU."""
        self.seen = []
        try:
            torch.vander(torch.ones(2))
            self.of_cpp = min(self.seen, default=None)
        finally:
            self.seen = None

    def in_python(self, tensor: torch.Tensor, tensors: list) -> bool:
        """Of a tensor among `tensors`, an operation's arguments. False where it cannot be told: below a dispatch mode of somebody else,
        which holds what it passes on."""
        count = sys.getrefcount(tensor)
        if self.of_cpp is None:
            if self.seen is not None:
                self.seen.append(count)
            return False
        if count <= self.of_cpp:
            return False
        more = sum(other is tensor for other in tensors) - 1  # in the arguments, and in `tensors`
        return count - 2 * more > self.of_cpp and not below_another_mode()


holders = Holders()
