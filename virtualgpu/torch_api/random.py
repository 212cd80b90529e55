"""Each GPU has its own random numbers: a generator of the CPU's kind, so that one seed gives the numbers that the CPU would draw."""

from typing import Any

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.rng import GENERATORS, Plain
from virtualgpu.engine.storage import gpu_of
from virtualgpu.errors import no_device
from virtualgpu.torch_api.patches import Patches, standing_in


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch.Generator; each card gets a default generator, seeded with torch.initial_seed()."""
    kind = Kind("Generator", (Generator,), {"machine": machine, "__module__": "torch", "__doc__": Generator.__doc__})
    patches.replace(torch, "Generator", kind)
    defaults = tuple(kind.on(torch.device("cuda", index)) for index in range(len(machine.specs)))
    for generator in defaults:
        generator.manual_seed(torch.initial_seed())
    patches.set(torch.cuda, "default_generators", defaults)
    set_state = standing_in(torch.random.set_rng_state, _set_rng_state)
    patches.replace_everywhere(torch.random, "set_rng_state", set_state)
    patches.add(_compat.C, "_accelerator_getDefaultGenerator", lambda device: defaults[device])


def _set_rng_state(original, new_state):
    _check_place(new_state)
    return original(new_state)


def _check_place(state) -> None:
    if isinstance(state, torch.Tensor) and gpu_of(state) is not None:
        raise TypeError("RNG state must be a torch.ByteTensor")


GeneratorMeta: Any = type(torch.Generator)


class Kind(GeneratorMeta):
    """isinstance(generator, torch.Generator) is true of PyTorch's own, too."""

    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, Plain)


PHILOX = 16  # bytes of a real GPU's state: seed and offset (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp)


class Generator(Plain, metaclass=Kind):
    """torch.Generator, also for device="cuda"."""

    machine: Machine

    def __new__(cls, device="cpu") -> "Generator":
        """On a device of `machine`, which `install` sets."""
        if device is not None and torch.device(device).type == "cuda" and not cls.machine.look():
            raise no_device()
        gpu = None if device is None else cls.machine.gpu(device)
        return cls.on(None if gpu is None else gpu.device)

    @classmethod
    def on(cls, device: torch.device | None) -> "Generator":
        """One of a GPU; None: of the CPU."""
        self = super().__new__(cls, device="cpu")
        self._gpu = device
        if device is not None:
            GENERATORS[_compat.address(self)] = self
        return self

    @property
    def device(self) -> torch.device:
        """The GPU's, or the CPU."""
        return self._gpu or torch.device("cpu")

    def set_state(self, new_state):
        """A state without values, of a dry run: this one goes on. Raises TypeError for one that lies on a GPU, RuntimeError for one of the
        other kind of device."""
        _check_place(new_state)
        if _compat.is_really_meta(new_state):
            return self
        if self._gpu is None or new_state.dtype is not torch.uint8:
            return super().set_state(new_state)
        if new_state.numel() == PHILOX:
            raise RuntimeError(
                "RNG state is wrong size: these 16 bytes are the seed and the offset of a real GPU's generator, and virtual GPUs draw as the "
                "CPU does: seed this run with torch.cuda.manual_seed instead"
            )
        with self.machine.untracked():
            own = new_state.flatten()[:-PHILOX].clone()
            if new_state.numel() != super().get_state().numel() + PHILOX:
                raise RuntimeError("RNG state is wrong size")
        return super().set_state(own)

    def get_state(self):
        """[bytes] uint8 on the CPU: what the CPU's would be and, on a GPU, 16 zeros that tell them apart."""
        state = super().get_state()
        if self._gpu is None:
            return state
        with self.machine.untracked():
            return torch.cat([state, torch.zeros(PHILOX, dtype=torch.uint8, device="cpu")])

    def clone_state(self):
        """Another generator of the same device that goes on as this one does."""
        return type(self).on(self._gpu).set_state(self.get_state())

    def __reduce__(self):
        """For copies and pickles, as PyTorch's own, which knows the device of C++ alone."""
        kind, _, state = super().__reduce__()
        return kind, (self.device,), state

    def graphsafe_get_state(self, *args):
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "CUDA graphs are not modelled by virtual GPUs, nor are generators that share a state for them: use get_state() and set_state()"
        )

    graphsafe_set_state = graphsafe_get_state

    def get_offset(self, *args):
        """The CPU's has none. Raises NotImplementedError for a GPU's."""
        if self._gpu is None:
            return super().get_offset(*args)
        raise NotImplementedError(
            "how many numbers a GPU's generator has drawn is not modelled by virtual GPUs, which draw as the CPU does: "
            "keep and restore it by get_state() and set_state()"
        )

    def set_offset(self, *args):
        """As `get_offset`."""
        return super().set_offset(*args) if self._gpu is None else self.get_offset()
