"""torch.distributions in a dry run: what arguments and samples are is not checked, since a check of numbers that are not known fails."""

from torch.distributions import Distribution

from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace Distribution.__init__."""
    patches.stand_in(Distribution, "__init__", _begin, machine)


def _begin(machine: Machine, original, distribution, *args, **kwargs) -> None:
    if machine.dry:
        args, kwargs = args[:2], {**kwargs, "validate_args": False}  # batch_shape, event_shape
    original(distribution, *args, **kwargs)
