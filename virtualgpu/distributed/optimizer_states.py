"""An optimizer's state gathered from all ranks: a rank that is played alone has nobody to give it theirs, and says so."""

import functools

from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.imports import when_imported
from virtualgpu.torch_api.registry import Patches, standing_in

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def install(machine: Machine, patches: Patches) -> None:
    """Once a program has imported FSDP1 or ZeroRedundancyOptimizer."""
    when_imported(FSDP1, functools.partial(_install_fsdp1, machine, patches), patches)
    when_imported(ZERO, functools.partial(_install_zero, machine, patches), patches)


def _install_fsdp1(machine: Machine, patches: Patches, module) -> None:
    owner = module.FullyShardedDataParallel
    gathered = staticmethod(standing_in(owner.optim_state_dict, _gather, machine))
    patches.replace(owner, "optim_state_dict", gathered)


def _install_zero(machine: Machine, patches: Patches, module) -> None:
    patches.stand_in(module.ZeroRedundancyOptimizer, "consolidate_state_dict", _gather, machine)


def _gather(machine: Machine, original, *args, **kwargs):
    try:
        return original(*args, **kwargs)
    except (RuntimeError, EOFError) as error:
        if machine.single_rank is None or machine.single_rank.world_size == 1:
            raise
        raise NotImplementedError(
            f"{original.__qualname__} gathers what other ranks hold, and this process plays rank {machine.single_rank.rank} alone. "
            "Save each rank's own state (optimizer.state), or start all ranks"
        ) from error
