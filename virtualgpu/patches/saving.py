"""torch.save and torch.load: tensors come back to the GPU that they were on, and a dry run destroys no file."""

import contextlib
import functools
import io
import os
import pickle
import warnings

import torch

from virtualgpu import _compat
from virtualgpu.engine.home import HOME
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.values import is_forgotten
from virtualgpu.patches.registry import Patches
from virtualgpu.patches.storage import meta_storage


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch.save, and answer where a storage is and where it goes."""
    _save(machine, patches)

    def tag(storage) -> str | None:
        if _made_dry(storage, machine):
            raise _refusal()  # hidden from the look into what is to be saved
        home = getattr(storage, HOME, None)
        return None if home is None or home.gpu is None else f"cuda:{home.gpu.index}"

    def restore(storage, location: str):
        if not location.startswith("cuda"):
            return None
        index = torch.device(location).index or 0
        if index >= len(machine.gpus):
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
                f"{len(machine.gpus)}. Please use torch.load with map_location to map your storages to an existing device."
            )
        gpu = machine.gpu(index)
        machine.charge_copy(None, gpu, storage.nbytes(), wait=True)
        return machine.place_storage(meta_storage(storage) if machine.dry else storage, gpu)

    rebuild = _compat.pickling._rebuild_tensor

    @functools.wraps(rebuild)
    def rebuild_tensor(storage, *geometry):
        """A dry run keeps what comes from a file, or from a loader's worker, with its values, as it does NumPy's arrays."""
        with_values = machine.dry and not _has_no_values(storage._untyped_storage)
        with machine.untracked() if with_values else contextlib.nullcontext():
            return rebuild(storage, *geometry)

    package = (0, tag, restore)  # before PyTorch's own, which have 10 and more
    patches.undo(lambda: package in _compat.saving and _compat.saving.remove(package))
    torch.serialization.register_package(*package)
    patches.replace(_compat.pickling, "_rebuild_tensor", rebuild_tensor)


def _save(machine: Machine, patches: Patches) -> None:
    """torch.save empties a file before it looks at what it is to write: what has no values is found before that."""
    original = torch.save

    @functools.wraps(original)
    def save(obj, f, *args, **kwargs):
        if not _has_made_dry(obj, machine):
            return original(obj, f, *args, **kwargs)
        if machine.dry and isinstance(f, (str, os.PathLike)):
            what = f"a dry run has no values to save: {os.fspath(f)} is not written"
            return warnings.warn(what, stacklevel=2)
        raise _refusal()

    patches.replace_everywhere(torch.serialization, "save", save)


def _refusal() -> RuntimeError:
    return RuntimeError(
        "this tensor comes from a dry run and has no values to save: switch saving off there, or make it outside dry_run()"
    )


def _has_made_dry(obj, machine: Machine) -> bool:
    """Is there a tensor in it that has no values because of a dry run?"""
    seeker = _Seeker(machine)
    with contextlib.suppress(Exception):  # what cannot be pickled, torch.save says better
        seeker.dump(obj)
    return seeker.found


class _Seeker(pickle.Pickler):
    """Walks through all that is to be saved, as torch.save does, and writes none of its tensors."""

    def __init__(self, machine: Machine):
        super().__init__(io.BytesIO(), protocol=5, buffer_callback=lambda array: None)  # arrays are not copied
        self.machine, self.found = machine, False

    def persistent_id(self, thing):
        if not isinstance(thing, (torch.UntypedStorage, torch.storage.TypedStorage)):
            return None
        self.found |= _made_dry(getattr(thing, "_untyped_storage", thing), self.machine)
        return "storage"


def _made_dry(storage, machine: Machine) -> bool:
    """Outside a dry run PyTorch's own meta tensors are saved as such, and a GPU's tensor without values was made in one."""
    home = getattr(storage, HOME, None)
    if machine.dry and is_forgotten(storage):
        return True
    return _has_no_values(storage) and (machine.dry or (home is not None and home.gpu is not None))


def _has_no_values(storage) -> bool:
    return _compat.real_storage_device(storage).type == "meta"
