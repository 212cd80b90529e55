"""The surface: every name of PyTorch's C++ that has to do with GPUs, in a row of `surface.toml` that says what becomes of it.

A name is *answered* by a module of this package, *refused* with NotImplementedError in one sentence with the cure, or *harmless*:
it works without a driver.
"""

import functools
import inspect
import tomllib
from pathlib import Path

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.patches import Patches

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OF_CUDA_WHEELS: list[str] = TABLE["of_cuda_wheels"]["names"].split()


def _by_name(rows: dict[str, str]) -> dict[str, str]:
    return {name: key for key, names in rows.items() for name in names.split()}


ANSWERED = _by_name(TABLE["answered"])  # {name: the module whose `install` puts the answer in place}
HARMLESS = _by_name(TABLE["harmless"])  # {name: why}
# {name: the first version that has it}, {name: the first that has it no more}
SINCE, UNTIL = (
    {name: tuple(map(int, version.split("."))) for name, version in _by_name(TABLE[key]).items()}
    for key in ("since", "until")
)
REFUSED = {  # {name: the sentence}
    name: f"{row['subject']} not modelled on virtual GPUs: {row['cure']}"
    for row in TABLE["refused"]
    for name in row["names"].split()
}


def install(machine: Machine, patches: Patches) -> None:
    """Refuse the rows of REFUSED and, where PyTorch has no CUDA, of OF_CUDA_WHEELS. After all other modules, which answer."""
    for name, sentence in REFUSED.items():
        _refuse(name, sentence, patches)
    for name in () if _compat.built_with_cuda else OF_CUDA_WHEELS:
        if not hasattr(_compat.C, name):
            sentence = f"this wheel of PyTorch has no torch._C.{name}: install one with CUDA, or leave the call out"
            _refuse(name, sentence, patches)


def lacking(version: tuple[int, ...]) -> set[str]:
    """The names that a wheel with CUDA of that version of PyTorch, (2, 15), does not have."""
    return {name for name in SINCE if version < SINCE[name]} | {name for name in UNTIL if version >= UNTIL[name]}


def locate(name: str) -> tuple[object, str]:
    """(owner, attribute) of a row's name; the owner is None where this PyTorch has no such module or class."""
    path = name.split(".") if name.startswith("torch.") else ["torch", "_C", *name.split(".")]
    owner = torch
    for step in path[1:-1]:
        owner = getattr(owner, step, None)
    return owner, path[-1]


def _refuse(name: str, sentence: str, patches: Patches) -> None:
    owner, attribute = locate(name)
    if hasattr(owner, attribute):  # other modules may have imported it by name
        patches.replace_everywhere(owner, attribute, refusing(sentence, getattr(owner, attribute)))
    elif owner is _compat.C and not _compat.built_with_cuda and name not in lacking(_compat.VERSION):
        patches.add(owner, attribute, refusing(sentence))


def refusing(sentence: str, original=None):
    """What raises NotImplementedError in the place of `original`; a class stays a class, for isinstance."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(sentence)

    if not isinstance(original, type):
        return functools.wraps(original)(refuse) if inspect.isfunction(original) else refuse
    factories = [
        key
        for key in dir(original)
        if not key.startswith("__") and isinstance(inspect.getattr_static(original, key), (staticmethod, classmethod))
    ]
    members = {"__new__": refuse, "__init__": refuse, "__module__": original.__module__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (original,), members | {key: staticmethod(refuse) for key in factories})
