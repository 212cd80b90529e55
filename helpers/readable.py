"""What a checkpoint may hold: asked before it is written, since whoever reads it later cannot cure it."""

import dataclasses
import io
import pickle
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch

# What makes a plain value of one that is more, the first that fits; str of all others
CURES = {
    np.generic: "{}.item()",
    str: "str({})",
    int: "int({})",
    float: "float({})",
    complex: "complex({})",
    Mapping: "dict({})",
    tuple: "tuple({})",
    Set: "set({})",
    (np.ndarray, torch.Tensor): "torch.tensor({})",
    Iterable: "list({})",
    Namespace: "vars({})",
}


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read. The message says why, what is safe, and what to do."""


def require_readable(value: Any, where: str = "state") -> None:
    """Raise CheckpointError where load() would refuse a part of `value`; it names the innermost one, and the cure."""
    if _is_readable(value):
        return
    if type(value) in (dict, OrderedDict, Counter):
        for place, (key, held) in enumerate(value.items()):
            require_readable(key, f"list({where})[{place}]")
            require_readable(held, f"{where}[{key!r}]")
    elif type(value) in (list, tuple, set):
        items = f"list({where})" if type(value) is set else where
        for place, held in enumerate(value):
            require_readable(held, f"{items}[{place}]")
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise CheckpointError(
        f"{where} is of type {kind}, which load() would refuse: it reads tensors and plain values alone. "
        f"Save {_cure(value).format(where)} instead, or leave it out; nothing was written."
    )


class _Outline(pickle.Pickler):
    """What torch.save pickles, without the tensors' contents."""

    def persistent_id(self, value: Any) -> int | None:
        return 0 if torch.is_storage(value) or isinstance(value, torch.storage.TypedStorage) else None


def _is_readable(value: Any) -> bool:
    """PyTorch's own answer, of a checkpoint without the tensors' contents: a fraction of the time that saving takes."""
    outline, checkpoint = io.BytesIO(), io.BytesIO()
    try:
        _Outline(outline, protocol=2).dump(value)
        with zipfile.ZipFile(checkpoint, "w") as archive:
            archive.writestr("a/data.pkl", outline.getvalue())
            archive.writestr("a/version", "3")
        checkpoint.seek(0)
        return not torch.serialization.get_unsafe_globals_in_checkpoint(checkpoint)
    except (pickle.PickleError, TypeError, AttributeError):
        return False


def _cure(value: Any) -> str:
    if hasattr(value, "state_dict"):
        return "{}.state_dict()"
    if dataclasses.is_dataclass(value):
        return "dataclasses.asdict({})"
    if type(value) is int:  # of thousands of digits
        return "str({})"
    return next((cure for kind, cure in CURES.items() if isinstance(value, kind)), "str({})")
