"""Lines of the program, as far as they are the user's: not PyTorch's, not Python's own, not virtualgpu's."""

import contextlib
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType

import torch

from virtualgpu.memory.history import line_of

Frames = tuple[tuple[CodeType, int], ...]  # code and instruction, innermost first

SHOWN = 2
DEEPEST = 8  # frames that are kept
_OURS = tuple(str(Path(path)) + os.sep for path in (Path(__file__).parents[1], Path(torch.__file__).parent))
_PYTHON = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_kinds: dict[str, int] = {}  # by file: 0 the user's, 1 an installed package's, 2 nobody's concern


def here() -> Frames:
    """Where the program is now."""
    frames: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < DEEPEST:
        if _kind(frame.f_code.co_filename) < 2:
            frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames)


def lines(frames: Frames) -> list[str]:
    """`train.py:12, in step: y = x * 2` of each, the innermost first. Packages that are installed only where nothing else is."""
    own = [frame for frame in frames if _kind(frame[0].co_filename) == 0] or list(frames)
    result = []
    for code, instruction in own[:SHOWN]:
        line = line_of(code, instruction)
        text = linecache.getline(code.co_filename, line).strip()
        result.append(f"{_short(code.co_filename)}:{line}, in {code.co_name}{f': {text}' if text else ''}")
    return result


def _kind(file: str) -> int:
    kind = _kinds.get(file)
    if kind is None:
        if file.startswith(_OURS) or file.startswith("<frozen"):
            kind = 2
        elif file.startswith(_INSTALLED):
            kind = 1
        else:
            kind = 2 if file.startswith(_PYTHON) else 0
        _kinds[file] = kind
    return kind


def _short(file: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        inside = os.path.relpath(file)
        if not inside.startswith(os.pardir) and os.path.exists(inside):
            return inside
    return file
