"""DTensor's random numbers: shards draw different ones, replicas the same, and all ranks' generators stay together.

PyTorch moves the offset of CUDA's counter-based generators by the size of each shard. The generators here are the CPU's, which have
none: for each operation all ranks draw one seed from their generators, which one torch.manual_seed made alike, and each shard
draws its numbers from that seed and its place. Importing this imports DTensor, which takes a second.
"""

import contextlib

import torch

from virtualgpu._compat import distributed as _compat
from virtualgpu.engine.eager import Plain
from virtualgpu.torch_api.patches import Patches

SPREAD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, as splitmix64 spreads seeds


dispatch, random, RNGStateTracker = _compat.dtensor_random()


class Tracker(RNGStateTracker):
    """Stands in for OffsetBasedRNGTracker."""

    def __init__(self, device_mesh, run_state_sync: bool = True):
        super().__init__(torch.device(device_mesh.device_type, torch.cuda.current_device()))

    def _distribute_region(self, spec, generator=None):
        return drawn_by(shard_of(spec), generator)

    def _compute_rng_offsets(self, spec) -> tuple[int, int]:
        return shard_of(spec), 0  # for run_op below


def install(patches: Patches) -> None:
    """Replace OffsetBasedRNGTracker and, in versions that have it, run_dtensor_rng_op. Called again, there is nothing to do."""
    if random.OffsetBasedRNGTracker is Tracker:
        return
    patches.replace(random, "OffsetBasedRNGTracker", Tracker)
    patches.set(random, "_rng_tracker", None)
    if hasattr(dispatch, "run_dtensor_rng_op"):
        patches.replace(dispatch, "run_dtensor_rng_op", run_op)


def run_op(shard: int, _end: int, op, *args, **kwargs):
    """One operation draws for a shard."""
    with drawn_by(shard):
        return op(*args, **kwargs)


def shard_of(spec) -> int:
    """Which shard of the tensor this rank has, counted over the mesh's dimensions; the same for replicas."""
    shard = 0
    for dim, (placement, coordinate) in enumerate(zip(spec.placements, spec.mesh.get_coordinate(), strict=True)):
        if placement.is_shard():
            shard = shard * spec.mesh.size(dim) + coordinate
    return shard


@contextlib.contextmanager
def drawn_by(shard: int, generator: torch.Generator | None = None):
    """In this block the generator, the current GPU's unless given, draws for one shard; afterwards it is one draw further, on every rank."""
    generator = generator or torch.cuda.default_generators[torch.cuda.current_device()]
    draws = torch.Generator("cpu")
    draws.set_state(Plain.get_state(generator))
    seed = int(torch.randint(1 << 62, (), generator=draws, device="cpu"))
    after = draws.get_state()
    generator.manual_seed((seed + shard * SPREAD) % (1 << 63))
    try:
        yield
    finally:
        Plain.set_state(generator, after)
