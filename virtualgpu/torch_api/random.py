"""Each GPU has its own random numbers: a generator of the CPU's kind, so that one seed gives the numbers that the CPU would draw."""

import torch

from virtualgpu import _compat
from virtualgpu.engine.draws import GENERATORS
from virtualgpu.engine.machine import Machine
from virtualgpu.errors import no_device
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch.Generator; each card gets a default generator, seeded with torch.initial_seed()."""
    kind = Kind("Generator", (Generator,), {"machine": machine, "__module__": "torch", "__doc__": Generator.__doc__})
    patches.replace(torch, "Generator", kind)
    defaults = tuple(kind.on(torch.device("cuda", index)) for index in range(len(machine.specs)))
    for generator in defaults:
        generator.manual_seed(torch.initial_seed())
    patches.set(torch.cuda, "default_generators", defaults)
    patches.add(_compat.C, "_accelerator_getDefaultGenerator", lambda device: defaults[device])


class Kind(type(torch.Generator)):
    """isinstance(generator, torch.Generator) is true of PyTorch's own, too."""

    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, Plain)


Plain = torch.Generator


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
        """A state that came over a GPU has no values in a dry run, nor has what is drawn there: this one goes on."""
        return self if _compat.is_really_meta(new_state) else super().set_state(new_state)

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
