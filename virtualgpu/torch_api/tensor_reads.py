"""How tensors are read: as an array, a list, text, or by their address. The host waits for the GPU; a dry run has nan or 0."""

import math
import re
import sys

import torch

from virtualgpu import _compat
from virtualgpu.engine import values
from virtualgpu.engine.allocation import gpu_of, storage_of
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.on_meta import is_on_meta
from virtualgpu.errors import without_values
from virtualgpu.torch_api.tensor_moves import CPU, takes_itself_apart


class Reads:
    """The methods of Tensor that give its numbers to Python."""

    machine: Machine

    def numpy(self, original, tensor, *, force=False):
        """Tensor.numpy. Raises PyTorch's TypeError on a GPU. In a dry run, nan or 0 for what has no numbers."""
        if force:
            tensor = tensor.detach().cpu()
        if (gpu := gpu_of(tensor)) is not None:
            raise TypeError(
                f"can't convert {gpu.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return original(self._with_values(tensor), force=force)

    def __array__(self, original, tensor, dtype=None):
        return tensor.numpy() if dtype is None else tensor.numpy().astype(dtype, copy=False)

    def data_ptr(self, original, tensor):
        """On a GPU, an address of its memory; only code for that GPU could follow it. In a dry run, tensors on the CPU have none."""
        allocation = getattr(storage_of(tensor), "_virtual_allocation", None)
        if allocation is None or allocation.gpu is None:
            if self.machine.dry and _compat.is_really_meta(tensor) and tensor.device == CPU and not _asked_by_pytorch():
                raise RuntimeError(
                    "data_ptr: a dry run gives tensors on the CPU no memory, so no address tells one from another: "
                    'put them on a GPU before, model.to("cuda")'
                )
            return original(tensor)
        if (
            allocation.block is None or not tensor.numel() or hasattr(tensor, "__tensor_flatten__")
        ):  # a DTensor has none
            return 0
        return allocation.block.address + tensor.storage_offset() * tensor.element_size()

    def tolist(self, original, tensor):
        """Tensor.tolist: the host waits for the current stream. In a dry run, nan or 0 for what has no numbers."""
        if (gpu := gpu_of(tensor)) is not None:
            self._wait(tensor, gpu)
        with self.machine.untracked():
            return original(self._with_values(tensor))

    def __repr__(self, original, tensor, *, tensor_contents=None):
        if takes_itself_apart(tensor):
            return original(tensor, tensor_contents=tensor_contents)
        gpu = gpu_of(tensor)
        if _compat.is_really_meta(tensor) and (self.machine.dry or gpu is not None) and not is_on_meta(tensor):
            with self.machine.untracked():
                known = values.known_of(tensor) if self.machine.dry else None
            where = f"device='{gpu.device}', " if gpu else ""
            if known is None:
                return f"tensor(..., {where}size={tuple(tensor.shape)}, dtype={tensor.dtype})"
        if gpu is not None:
            self._wait(tensor, gpu)
        with self.machine.untracked():
            shown = self._with_values(tensor)
            if tensor.requires_grad and shown is not tensor:
                shown = shown.detach().requires_grad_()
            text = original(shown, tensor_contents=tensor_contents)
        if gpu is None:
            return text
        end = re.search(r"(, (size|dtype|requires_grad|grad_fn|layout|tangent|nnz)=[^\n]*)?\)$", text)
        return text if end is None else f"{text[: end.start()]}, device='{gpu.device}'{text[end.start() :]}"

    def _wait(self, tensor: torch.Tensor, gpu: GPU) -> None:
        """The host waits for the current stream, and this process for the tensor's numbers."""
        if self.machine.forked:
            self.machine.own(gpu)
        self.machine.clock.wait_for(self.machine.clock.current(gpu.index))
        if self.machine.in_flight.parts:
            self.machine.in_flight.let_finish([tensor])

    def _with_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """In a dry run few have some; for the others nan, or zero. Raises RuntimeError for what was made in one, outside it."""
        if not _compat.is_really_meta(tensor):
            if not (self.machine.some_dry and self.machine.dry and values.is_unknown(tensor)):
                return tensor
        elif not self.machine.dry or is_on_meta(tensor):
            if gpu_of(tensor) is not None:
                raise without_values()
            return tensor
        with self.machine.untracked():
            known = values.values_of(tensor)
        if known is None or values.lacks_some(known):
            self.machine.warn_of_nan(values.why_unknown([tensor]))
        if known is not None:
            return known
        nothing = math.nan if tensor.is_floating_point() or tensor.is_complex() else 0
        with self.machine.untracked():
            return torch.full(tuple(tensor.shape), nothing, dtype=tensor.dtype, device="cpu")


def _asked_by_pytorch() -> bool:
    """PyTorch itself knows that an address may be 0."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("virtualgpu."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith("torch.")
