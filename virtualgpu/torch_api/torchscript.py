"""torch.jit.save and torch.jit.load: a module comes back to the GPU that it was on.

PyTorch writes a storage's own device into the file, here the CPU. So which GPUs they were goes into an extra file beside it.
"""

import io
import os
import zipfile

import torch

from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches

GPUS = "virtual_gpus"  # the extra file: "cuda:0", or several


def install(machine: Machine, patches: Patches) -> None:
    """Replace a ScriptModule's save and save_to_buffer, which torch.jit.save calls, and torch.jit.load."""
    for kind in (torch.jit.RecursiveScriptModule, torch.jit.ScriptModule):  # scripted and traced ones
        for name in ("save", "save_to_buffer"):
            patches.stand_in(kind, name, _save, machine)
    patches.stand_in_everywhere(torch.jit, "load", _load)


def _save(machine: Machine, original, module, *args, _extra_files=None, **kwargs):
    """Raises RuntimeError in a dry run, whose tensors have no values to write."""
    tensors = [*module.parameters(), *module.buffers()]
    places = sorted({"cpu" if (gpu := gpu_of(tensor)) is None else f"cuda:{gpu.index}" for tensor in tensors})
    if places == ["cpu"] or not places:
        return original(module, *args, _extra_files=_extra_files or {}, **kwargs)
    if machine.dry:
        raise RuntimeError(
            "a dry run's tensors have no values to save: save the TorchScript module in a run with numbers"
        )
    return original(module, *args, _extra_files=(_extra_files or {}) | {GPUS: " ".join(places)}, **kwargs)


def _load(original, f, map_location=None, *args, **kwargs):
    """Raises RuntimeError for a module of several devices without map_location, or of a GPU that is not there."""
    if map_location is None:
        if not isinstance(f, (str, os.PathLike)):
            f = io.BytesIO(f.read())
        map_location = _saved_on(f)
    return original(f, map_location, *args, **kwargs)


def _saved_on(f) -> str | None:
    """The GPU whose module is in that file; None for the CPU's, and for what is no such file, which PyTorch then says."""
    try:
        with zipfile.ZipFile(f) as archive:
            inside = [name for name in archive.namelist() if name.endswith(f"/extra/{GPUS}")]
            places = archive.read(inside[0]).decode().split() if inside else []
    except (OSError, zipfile.BadZipFile):
        return None
    finally:
        if isinstance(f, io.BytesIO):
            f.seek(0)
    if len(places) > 1:
        raise RuntimeError(
            f"this TorchScript module was saved on {', '.join(places)}; virtual GPUs can load it to one device only: pass map_location"
        )
    if places and int(places[0].removeprefix("cuda:")) >= torch.cuda.device_count():
        raise RuntimeError(
            f"this TorchScript module was saved on {places[0]}, and there are {torch.cuda.device_count()} GPUs: pass map_location"
        )
    return places[0] if places else None
