"""torch.save and torch.load: tensors come back to the GPU that they were on, and a dry run destroys no file."""

import contextlib
import functools
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch

from virtualgpu import _compat
from virtualgpu.engine.dry_run import put_on_meta
from virtualgpu.engine.machine import Machine, dry_runs
from virtualgpu.engine.storage import ALLOCATION, gpu_of
from virtualgpu.engine.values import is_stale
from virtualgpu.torch_api.moves import meta_storage
from virtualgpu.torch_api.patches import Patches, standing_in, when_imported

# -- Files that a dry run did not write, having no values: a checkpoint is written beside the old one and then renamed, linked or copied.
#
# What a program opened itself is there, and empty: it may go to a new name, but not in the place of what is there already.

MOVES = [(os, "replace"), (os, "rename")]
COPIES = [(os, "link"), (shutil, "copyfile"), (shutil, "copy"), (shutil, "copy2")]
REMOVALS = [(os, "remove"), (os, "unlink")]


class Unwritten:
    """Their names. From the first on, functions of `os` and `shutil` know them; all others have no stand-in."""

    def __init__(self, machine: Machine, patches: Patches):
        self.machine, self.patches = machine, patches
        self.paths: set[str] = set()
        self.empty: set[str] = set()  # those of them that a program opened
        self.lock = threading.Lock()

    def warn(self, file: str | os.PathLike, stacklevel: int, is_open: bool = False) -> None:
        """That it stays as it is, or is not there; or, where the program opened it, that it is left empty."""
        with self.lock:
            if not self.paths:
                for functions, stand_in in ((MOVES, self._move), (COPIES, self._copy), (REMOVALS, self._remove)):
                    for owner, name in functions:
                        self.patches.stand_in(owner, name, stand_in)
            self.paths.add(os.path.abspath(file))
            if is_open:
                self.empty.add(os.path.abspath(file))
        state = "is left empty" if is_open else "is not written"
        words = f"a dry run has no values to save: {os.fspath(file)} {state}"
        warnings.warn(words, stacklevel=stacklevel + 1)

    def _is_one(self, path) -> bool:
        return isinstance(path, (str, os.PathLike)) and self.machine.dry and os.path.abspath(path) in self.paths

    def _is_left_empty(self, path) -> bool:
        return os.path.abspath(path) in self.empty and os.path.isfile(path) and not os.path.getsize(path)

    def _move(self, original: Callable, src, dst, *args, **kwargs):
        empty = self._is_one(src) and self._is_left_empty(src)
        if not self._is_one(src) or (os.path.lexists(src) and not empty):
            return original(src, dst, *args, **kwargs)
        self.paths.add(os.path.abspath(dst))  # which stays as it is, too, or is new and empty
        if empty and os.path.lexists(dst):
            os.remove(src)
        elif empty:
            self.empty.add(os.path.abspath(dst))
            return original(src, dst, *args, **kwargs)

    def _copy(self, original: Callable, src, dst, *args, **kwargs):
        copy = os.path.join(dst, os.path.basename(src)) if os.path.isdir(dst) else dst
        keeps = self._is_one(src) and self._is_left_empty(src) and os.path.lexists(copy)
        if not keeps and (not self._is_one(src) or os.path.lexists(src)):
            return original(src, dst, *args, **kwargs)
        self.paths.add(os.path.abspath(copy))
        return copy

    def _remove(self, original: Callable, path, *args, **kwargs):
        if not self._is_one(path) or os.path.lexists(path):
            return original(path, *args, **kwargs)


# -- torch.save and torch.load: tensors come back to the GPU that they were on, and a dry run destroys no file.


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch.save, torch.load and safetensors' save_file, and answer where a storage is and where it goes."""
    unwritten = Unwritten(machine, patches)
    patches.replace_everywhere(torch.serialization, "save", standing_in(torch.save, _save, machine, unwritten))
    patches.replace_everywhere(torch.serialization, "load", standing_in(torch.load, _load, machine))
    when_imported("safetensors.torch", functools.partial(_install_safetensors, machine, unwritten, patches), patches)
    for kind in (torch.jit.RecursiveScriptModule, torch.jit.ScriptModule):  # scripted and traced ones
        for name in ("save", "save_to_buffer"):
            patches.stand_in(kind, name, _save_scripted)
    files = _Files(machine)
    package = (0, files.tag, files.restore)  # before PyTorch's own, which have 10 and more
    patches.undo(lambda: package in _compat.saving and _compat.saving.remove(package))
    torch.serialization.register_package(*package)
    patches.stand_in(_compat.pickling, "_rebuild_tensor", files.rebuild_tensor)


def _save_scripted(original, module, *args, **kwargs):
    """What torch.jit.save calls. C++ would write the CPU as the place of each tensor. Raises NotImplementedError for one on a GPU."""
    if any(gpu_of(tensor) is not None for tensor in [*module.parameters(), *module.buffers()]):
        raise NotImplementedError(
            "TorchScript's files of a model on a GPU are not modelled by virtual GPUs: save module.cpu(), and load it with map_location"
        )
    return original(module, *args, **kwargs)


class _Files:
    """What PyTorch asks about a storage that it writes or has read."""

    def __init__(self, machine: Machine):
        self.machine = machine

    def tag(self, storage) -> str | None:
        """ "cuda:1"; None for the CPU. Raises NoValues for one of a dry run."""
        if _made_dry(storage, self.machine):
            raise NoValues
        allocation = getattr(storage, ALLOCATION, None)
        return None if allocation is None or allocation.gpu is None else f"cuda:{allocation.gpu.index}"

    def restore(self, storage, location: str):
        """The storage on that GPU; None for other places. Raises PyTorch's RuntimeError where there is no such GPU."""
        if not location.startswith("cuda"):
            return None
        machine, index = self.machine, torch.device(location).index or 0
        if not machine.gpus:
            raise RuntimeError(
                "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are running on a "
                "CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your storages to the CPU."
            )
        if index >= len(machine.gpus):
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
                f"{len(machine.gpus)}. Please use torch.load with map_location to map your storages to an existing device."
            )
        gpu = machine.gpu(index)
        machine.charge_copy(None, gpu, storage.nbytes())
        return machine.place_storage(meta_storage(storage) if machine.dry else storage, gpu)

    def rebuild_tensor(self, original, storage, *geometry):
        """A dry run keeps what comes from a file, or from a loader's worker, with its values, as it does NumPy's arrays. What has none
        comes from a worker, or goes to a GPU: its storage is meta's, and the empty tensor that PyTorch would lay on it has values here,
        being small."""
        untyped = _compat.untyped(storage)
        without = self.machine.dry and _has_no_values(untyped)
        if not self.machine.dry or (getattr(untyped, ALLOCATION, None) is not None and not without):
            return original(storage, *geometry)
        with self.machine.untracked():
            if without:
                return torch.empty(0, dtype=storage.dtype, device="meta").set_(untyped, *geometry)
            return original(storage, *geometry)


def _save(machine: Machine, unwritten: Unwritten, original, obj, f, *args, **kwargs):
    """torch.save empties a file before it looks at what it is to write. Where tensors of a dry run may be among that, it writes to a
    temporary file first: once, since what is pickled may do something by that."""
    if not machine.some_dry and dry_runs.epoch == 1:
        return original(obj, f, *args, **kwargs)
    with tempfile.SpooledTemporaryFile(IN_MEMORY) as held:
        try:
            original(obj, held, *args, **kwargs)
        except NoValues:
            path = f if isinstance(f, (str, os.PathLike)) else _opened(f)
            if not machine.dry or path is None:
                raise
            _charge_copies(machine, obj)
            return unwritten.warn(path, stacklevel=3, is_open=path is not f)
        held.seek(0)
        with open(f, "wb") if isinstance(f, (str, os.PathLike)) else contextlib.nullcontext(f) as file:
            shutil.copyfileobj(held, file)


def _opened(file) -> str | None:
    """The path of a file that the program opened to write to, and in which nothing stands; None for what has no path, as BytesIO."""
    name = getattr(file, "name", None)
    if not isinstance(name, str) or not os.path.isfile(name) or file.tell():
        return None
    file.flush()
    return name if not os.path.getsize(name) else None


def _load(machine: Machine, original, f, map_location=None, *args, **kwargs):
    """torch.load. map_location="meta" is for the program's own shapes, in a dry run, too."""
    loaded = original(f, map_location, *args, **kwargs)
    if machine.dry and isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "meta":
        for tensor in _tensors_in(loaded):
            put_on_meta(tensor)
    return loaded


def _charge_copies(machine: Machine, obj) -> None:
    """What is saved comes to the CPU, storage by storage, which takes its time. PyTorch has not come so far."""
    storages = {}
    for tensor in _tensors_in(obj):
        if (gpu := gpu_of(tensor)) is not None:
            storage = tensor.untyped_storage()
            storages[_compat.address(storage)] = gpu, storage.nbytes()
    for gpu, nbytes in storages.values():
        machine.charge_copy(gpu, None, nbytes)


def _tensors_in(obj) -> Iterator[torch.Tensor]:
    """Of state_dicts, and of lists and modules of such."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, torch.nn.Module):
        yield from obj.state_dict().values()
    elif isinstance(obj, (Mapping, list, tuple)):
        for part in obj.values() if isinstance(obj, Mapping) else obj:
            yield from _tensors_in(part)


def _install_safetensors(machine: Machine, unwritten: Unwritten, patches: Patches, module) -> None:
    """It reads a tensor by its address, and transformers, accelerate and diffusers save by it when a training ends."""
    patches.stand_in_everywhere(module, "save_file", _save_file, machine, unwritten)


def _save_file(machine: Machine, unwritten: Unwritten, original, tensors, filename, *args, **kwargs):
    """As torch.save: what has no values leaves the file as it is. It comes to the CPU all the same, which takes its time."""
    if not machine.dry or not isinstance(tensors, dict):
        return original(tensors, filename, *args, **kwargs)
    held = {name: tensor.cpu() if isinstance(tensor, torch.Tensor) else tensor for name, tensor in tensors.items()}
    if any(_made_dry(tensor.untyped_storage(), machine) for tensor in _tensors_in(held)):
        return unwritten.warn(filename, stacklevel=3)
    return original(held, filename, *args, **kwargs)


IN_MEMORY = 64 << 20  # bytes; a larger file goes to the disk


class NoValues(RuntimeError):
    """What is to be saved has a tensor of a dry run."""

    def __init__(self):
        super().__init__(
            "this tensor comes from a dry run and has no values to save: switch saving off there, or make it outside dry_run()"
        )


def _made_dry(storage, machine: Machine) -> bool:
    """Outside a dry run PyTorch's own meta tensors are saved as such, and a GPU's tensor without values was made in one."""
    allocation = getattr(storage, ALLOCATION, None)
    if machine.dry and is_stale(storage):
        return True
    return _has_no_values(storage) and (machine.dry or (allocation is not None and allocation.gpu is not None))


def _has_no_values(storage) -> bool:
    return _compat.real_storage_device(storage).type == "meta"
