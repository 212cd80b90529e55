"""DistributedDataParallel's C++ half: its buckets lie on the GPUs of the parameters, from the constructor on.

C++ takes all of them for the CPU's. A module on several GPUs has buckets of one GPU each; they stay in the order of the first
iteration, which C++ would change afterwards without regard to GPUs.
"""

import contextlib

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace dist.Reducer, what groups tensors for it, and what compares parameters, which in a dry run has no values."""
    real, assign, broadcast = dist.Reducer, dist._compute_bucket_assignment_by_size, dist._broadcast_coalesced

    class Reducer(real):
        """What it allocates is the GPU's of its parameters."""

        def __init__(self, params, bucket_indices, *args, **kwargs):
            params, bucket_indices = list(params), list(bucket_indices)
            self._gpus = list(_by_gpu(params))
            with (
                machine.local.made_on(self._gpus[0] if self._gpus else None),
                _buckets(machine, self._gpus, params, bucket_indices),
            ):
                super().__init__(params, bucket_indices, *args, **kwargs)

        def _rebuild_buckets(self):
            if len(self._gpus) > 1:
                return False
            with machine.local.made_on(self._gpus[0] if self._gpus else None):
                return super()._rebuild_buckets()

    def compute_bucket_assignment_by_size(tensors, bucket_size, expect_sparse_gradient=(), *args, **kwargs):
        """Buckets of one GPU each, in the order of their first tensors."""
        places, sparse, merged = _by_gpu(tensors), list(expect_sparse_gradient), []
        if len(places) < 2:
            return assign(tensors, bucket_size, sparse, *args, **kwargs)
        for numbers in places.values():
            of_gpu = [tensors[number] for number in numbers], bucket_size, [sparse[at] for at in numbers if sparse]
            for bucket, limit in zip(*assign(*of_gpu, *args, **kwargs), strict=True):
                merged.append(([numbers[at] for at in bucket], limit))
        merged.sort(key=lambda bucket: min(bucket[0]))
        return [bucket for bucket, _ in merged], [limit for _, limit in merged]

    def broadcast_coalesced(group, tensors, *args, **kwargs):
        """GPU after GPU."""
        for numbers in _by_gpu(tensors).values():
            broadcast(group, [tensors[number] for number in numbers], *args, **kwargs)

    patches.replace_everywhere(dist, "_compute_bucket_assignment_by_size", compute_bucket_assignment_by_size)
    patches.replace_everywhere(dist, "_broadcast_coalesced", broadcast_coalesced)
    patches.replace(dist, "Reducer", Reducer)
    verify = dist._verify_params_across_processes

    def verify_params(group, params, *args, **kwargs):
        params = list(params)
        if machine.dry:
            _as_it_would_verify(group, params)
            return
        gpu = gpu_of(params[0]) if params else None
        # What C++ sends is of the parameters' GPU, not of the current one, which may be another rank's
        with torch.cuda.device(None if gpu is None else gpu.device):
            verify(group, params, *args, **kwargs)

    patches.replace_everywhere(dist, "_verify_params_across_processes", verify_params)


def _by_gpu(tensors) -> dict[GPU | None, list[int]]:
    """{GPU: the numbers of its tensors}, in the order of their first ones."""
    places: dict[GPU | None, list[int]] = {}
    for number, tensor in enumerate(tensors):
        places.setdefault(gpu_of(tensor), []).append(number)
    return places


def _buckets(machine: Machine, gpus: list[GPU], params: list[torch.Tensor], bucket_indices: list[list[int]]):
    """with _buckets(...): those that C++ allocates, one after the other, lie on the GPUs of their parameters, where these are several."""
    if len(gpus) < 2:
        return contextlib.nullcontext()
    return _InTurn(
        machine, [(sum(params[at].numel() for at in bucket), gpu_of(params[bucket[0]])) for bucket in bucket_indices]
    )


class _InTurn(TorchDispatchMode):
    """Lets C++ make tensors of so many elements on the GPU beside them, each once."""

    def __init__(self, machine: Machine, waiting: list[tuple[int, GPU]]):
        super().__init__()
        self.machine, self.waiting = machine, waiting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        if self.waiting and func is torch.ops.aten.empty.memory_format and list(size) == [self.waiting[0][0]]:
            with self.machine.local.made_on(self.waiting.pop(0)[1]):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


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
