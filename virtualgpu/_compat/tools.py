"""What PyTorch has beside tensors: files, TorchScript, loaders, the profiler, the compiler."""

import importlib

import torch
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction  # noqa: F401
from torch.profiler import profiler as _profiler

KinetoProfile = _profiler._KinetoProfile  # the base of torch.profiler.profile
pickling = torch._utils  # its _rebuild_tensor: of files, and of what another process sends
WORKER_LOOP = "_worker_loop"  # of loader_workers()
saving = torch.serialization._package_registry  # [(priority, tag, restore)] of torch.save and torch.load


def register_as_builtin(function, name: str):
    """TorchScript knows PyTorch's functions by identity: let it know one that stands in for another. Returns what undoes it."""
    table = torch.jit._builtins._get_builtin_table()
    torch.jit._builtins._register_builtin(function, name)
    return lambda: table.pop(id(function), None)


def builtin_name(function) -> str | None:
    """TorchScript's name for a function of PyTorch ("aten::ones"), or None."""
    return torch.jit._builtins._find_builtin(function)


def loader_iterator() -> type:
    """The class of what iter() of a DataLoader gives. A function, for not every program imports torch.utils.data."""
    return importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter


def fetchers() -> list[type]:
    """The classes whose fetch(index) makes one batch of a DataLoader, in a worker or not."""
    fetch = importlib.import_module("torch.utils.data._utils.fetch")
    return [fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher]


def loader_workers():
    """The module whose WORKER_LOOP is all that a DataLoader's worker does."""
    return importlib.import_module("torch.utils.data._utils.worker")


def in_loader_worker() -> bool:
    """Is this process one of a DataLoader's workers?"""
    return importlib.import_module("torch.utils.data").get_worker_info() is not None
