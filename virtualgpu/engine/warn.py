"""A warning at the line of the program, below all of ours and PyTorch's."""

import sys
import warnings


def at_the_program(message: str) -> None:
    """As from C++: once a line, unless the program's filters say otherwise."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("virtualgpu.", "torch.")):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)
