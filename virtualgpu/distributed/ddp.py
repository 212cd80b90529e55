"""DistributedDataParallel's C++ half: its buckets lie on the GPU of the parameters, from the constructor on."""

import torch
from torch import distributed as dist

from virtualgpu.engine.home import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.patches.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace dist.Reducer and `_verify_params_across_processes`, which in a dry run has no values to compare."""
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

    def verify_params(group, params, *args, **kwargs):
        if machine.dry:
            _as_it_would_verify(group, list(params))
        else:
            verify(group, params, *args, **kwargs)

    patches.replace_everywhere(dist, "_verify_params_across_processes", verify_params)


def _as_it_would_verify(group, params: list[torch.Tensor]) -> None:
    """In a dry run there are no values to compare (how many parameters each rank has, their sizes and strides): what it sends
    (torch/csrc/distributed/c10d/reducer.cpp, verify_params_across_processes), and that the host waits for it.
    """
    own = torch.empty(1, dtype=torch.int64, device=params[0].device)
    counts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(counts, own, group=group, async_op=True).wait()
    for count in counts:
        count.cpu()
    shapes = torch.empty(2 * sum(param.dim() for param in params), dtype=torch.int64, device=own.device)
    dist.broadcast(shapes, group=group, group_src=0, async_op=True).wait()
    torch.empty_like(shapes).copy_(shapes)
