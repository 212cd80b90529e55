"""DistributedDataParallel's C++ half: its buckets lie on the GPU of the parameters, from the constructor on."""

from torch import distributed as dist

from virtualgpu.engine.home import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.patches.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    real = dist.Reducer

    class Reducer(real):
        """What it allocates is the GPU's of its parameters."""

        def __init__(self, params, *args, **kwargs):
            params = list(params)
            self._gpu = gpu_of(params[0]) if params else None
            with machine.made_on(self._gpu):
                super().__init__(params, *args, **kwargs)

        def _rebuild_buckets(self):
            with machine.made_on(self._gpu):
                return super()._rebuild_buckets()

    patches.replace(dist, "Reducer", Reducer)
    verify = dist._verify_params_across_processes

    def verify_params(*args, **kwargs):
        if not machine.dry:  # it reads values
            verify(*args, **kwargs)

    patches.replace_everywhere(dist, "_verify_params_across_processes", verify_params)
