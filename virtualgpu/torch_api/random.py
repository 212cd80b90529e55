"""Each GPU has its own random numbers: a generator of the CPU's kind, so that one seed gives the numbers that the CPU would draw."""

import torch

from virtualgpu import _compat
from virtualgpu.engine.draws import GENERATORS
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


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
            return cls._of(None if gpu is None else gpu.device)

        @classmethod
        def _of(cls, gpu: torch.device | None):
            self = super().__new__(cls, device="cpu")
            self._gpu = gpu
            if gpu is not None:
                GENERATORS[_compat.address(self)] = self
            return self

        @property
        def device(self) -> torch.device:
            return self._gpu or torch.device("cpu")

        def set_state(self, new_state):
            """A state that came over a GPU has no values in a dry run, nor has what is drawn there: this one goes on."""
            return self if _compat.is_really_meta(new_state) else super().set_state(new_state)

        def clone_state(self):
            """Another generator of the same device that goes on as this one does."""
            return type(self)._of(self._gpu).set_state(self.get_state())

        def __reduce__(self):
            """For copies and pickles, as PyTorch's own, which knows the device of C++ alone."""
            kind, _, state = super().__reduce__()
            return kind, (self.device,), state

        def _refused(self, *args):
            raise NotImplementedError(
                "CUDA graphs are not modelled by virtual GPUs, nor are generators that share a state for them"
            )

        graphsafe_get_state = graphsafe_set_state = _refused

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    patches.replace(torch, "Generator", Generator)
    made = []
    for index in range(len(machine.specs)):
        generator = Generator._of(torch.device("cuda", index))
        generator.manual_seed(torch.initial_seed())
        made.append(generator)
    patches.set(torch.cuda, "default_generators", tuple(made))
    patches.add(_compat.C, "_accelerator_getDefaultGenerator", lambda device: made[device])
