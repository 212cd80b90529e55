"""Each GPU has its own random numbers: a generator of the CPU's kind, so that one seed gives the numbers that the CPU would draw."""

import torch

from virtualgpu import _compat
from virtualgpu.engine.draws import GENERATORS
from virtualgpu.engine.machine import Machine
from virtualgpu.patches.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch.Generator; each card gets a default generator, seeded with torch.initial_seed()."""
    original = torch.Generator

    class Kind(type(original)):
        def __instancecheck__(cls, instance) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=Kind):
        """torch.Generator, also for device="cuda"."""

        def __new__(cls, device="cpu"):
            gpu = None if device is None else machine.gpu(device)
            self = super().__new__(cls, device="cpu")
            self._gpu = None if gpu is None else gpu.device
            if gpu is not None:
                GENERATORS[self._cdata] = self
            return self

        @property
        def device(self) -> torch.device:
            return self._gpu or torch.device("cpu")

        def set_state(self, new_state):
            """A state that came over a GPU has no values in a dry run, nor has what is drawn there: this one goes on."""
            return self if _compat.is_really_meta(new_state) else super().set_state(new_state)

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    patches.replace(torch, "Generator", Generator)
    made = []
    for index in range(len(machine.specs)):
        generator = original.__new__(Generator, device="cpu")
        generator._gpu = torch.device("cuda", index)
        GENERATORS[generator._cdata] = generator
        generator.manual_seed(torch.initial_seed())
        made.append(generator)
    patches.set(torch.cuda, "default_generators", tuple(made))
    patches.add(torch._C, "_accelerator_getDefaultGenerator", lambda device: made[device])
