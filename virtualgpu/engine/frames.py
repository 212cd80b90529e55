"""Python's frames: from where in the program an operation was called."""

import sys
import warnings

from virtualgpu import _compat

BEGIN = ("virtualgpu.run.", "virtualgpu.torch_api.processes")  # what calls the program, or a thread of it


def below_another_mode() -> bool:
    """Did the operation come through another dispatch mode, or a kernel that is written in Python?"""
    frame = sys._getframe(1)
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
    frame = sys._getframe(1)
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
