"""What DDP, FSDP1, pipelines and sharded optimizers need beside the process group."""

import functools

import torch
from torch import distributed as dist
from torch import nn

from virtualgpu._compat import TorchDispatchMode, is_really_meta
from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed.process_group import with_numbers
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import gpu_of
from virtualgpu.torch_api.patches import Patches, standing_in, when_imported

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def install(machine: Machine, patches: Patches) -> None:
    """All of this file's stand-ins: those for DDP, and the others once a program has imported what they are for."""
    stand_in = functools.partial(patches.stand_in_everywhere, dist)
    stand_in("_compute_bucket_assignment_by_size", _compute_bucket_assignment_by_size)
    stand_in("_broadcast_coalesced", _broadcast_coalesced)
    stand_in("_verify_params_across_processes", _verify_params_across_processes, machine)
    patches.replace(dist, "Reducer", type("Reducer", (Reducer,), {"machine": machine}))
    patches.stand_in(dist.Logger, "set_runtime_stats_and_log", _log, machine)

    def move_states(module) -> None:
        patches.stand_in(module, _compat.MOVES_STATES, _move_states, machine)

    def pipelines(module) -> None:
        for name, label in LABELS.items():
            patches.stand_in(_compat.pipeline_stage(module), name, _annotated, machine, label)
        votes = _compat.pipeline_votes(module)
        if votes is not None:
            patches.stand_in(*votes, _vote, machine, module)

    def fsdp1(module) -> None:
        owner = module.FullyShardedDataParallel
        gathered = staticmethod(standing_in(owner.optim_state_dict, _gather, machine))
        patches.replace(owner, "optim_state_dict", gathered)

    def zero(module) -> None:
        patches.stand_in(module.ZeroRedundancyOptimizer, "consolidate_state_dict", _gather, machine)

    imported = {_compat.FSDP1: move_states, _compat.PIPELINE_SCHEDULES: pipelines, FSDP1: fsdp1, ZERO: zero}
    for name, function in imported.items():
        when_imported(name, function, patches)


# -- DistributedDataParallel's C++ half: its buckets lie on the GPUs of the parameters, from the constructor on.
#
# C++ takes all of them for the CPU's. A module on several GPUs has buckets of one GPU each; they stay in the order of the first
# iteration, which C++ would change afterwards without regard to GPUs.


def _log(machine: Machine, original, logger) -> None:
    """C++ has timers for the CPU's and CUDA's parameters alone, and warns every program of it: in a dry run they are meta's."""
    if not machine.dry:
        original(logger)


class Reducer(dist.Reducer):
    """What it allocates is the GPU's of its parameters."""

    machine: Machine

    def __init__(self, params, bucket_indices, limits, process_group, *args, **kwargs):
        params, bucket_indices = list(params), list(bucket_indices)
        self._group = process_group
        self._gpus = list(_by_gpu(params))
        buckets = [(sum(params[i].numel() for i in bucket), gpu_of(params[bucket[0]])) for bucket in bucket_indices]
        with self._on_first_gpu(), _InTurn(self.machine, buckets if len(self._gpus) > 1 else []):
            super().__init__(params, bucket_indices, limits, process_group, *args, **kwargs)

    def _rebuild_buckets(self):
        if len(self._gpus) > 1:
            return False
        with self._on_first_gpu():
            return super()._rebuild_buckets()

    def _set_static_graph(self):
        with self._on_first_gpu():  # C++ makes the map of used parameters anew
            super()._set_static_graph()

    def _run_allreduce_hook(self, bucket):
        """C++ hides the future that completes when it is asked, and whoever waits for it in the backward pass waits for ever."""
        return dist.all_reduce(bucket.buffer(), group=self._group, async_op=True).get_future()

    def _set_forward_pass_work_handle(self, work, use_static_world_size):
        # C++ asks it for its result at the end of the backward pass, if its Python object is still there
        self._joined = work
        super()._set_forward_pass_work_handle(work, use_static_world_size)

    def _on_first_gpu(self):
        return self.machine.local.made_on(self._gpus[0] if self._gpus else None)


class _InTurn(TorchDispatchMode):
    """Lets C++ make tensors of so many elements on the GPU beside them, each once, one after the other."""

    def __init__(self, machine: Machine, waiting: list[tuple[int, GPU]]):
        super().__init__()
        self.machine, self.waiting = machine, waiting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        if self.waiting and func is torch.ops.aten.empty.memory_format and list(size) == [self.waiting[0][0]]:
            with self.machine.local.made_on(self.waiting.pop(0)[1]):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _by_gpu(tensors) -> dict[GPU | None, list[int]]:
    """{GPU: the numbers of its tensors}, in the order of their first ones."""
    numbers: dict[GPU | None, list[int]] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault(gpu_of(tensor), []).append(number)
    return numbers


def _compute_bucket_assignment_by_size(original, tensors, bucket_size, expect_sparse_gradient=(), *args, **kwargs):
    """Buckets of one GPU each, in the order of their first tensors."""
    gpus, sparse, buckets = _by_gpu(tensors), list(expect_sparse_gradient), []
    if len(gpus) < 2:
        return original(tensors, bucket_size, sparse, *args, **kwargs)
    for numbers in gpus.values():
        its_tensors, its_sparse = [tensors[i] for i in numbers], [sparse[i] for i in numbers if sparse]
        for bucket, limit in zip(*original(its_tensors, bucket_size, its_sparse, *args, **kwargs), strict=True):
            buckets.append(([numbers[i] for i in bucket], limit))
    buckets.sort(key=lambda bucket: min(bucket[0]))
    return [bucket for bucket, _ in buckets], [limit for _, limit in buckets]


def _broadcast_coalesced(original, group, tensors, *args, **kwargs) -> None:
    """GPU after GPU."""
    for numbers in _by_gpu(tensors).values():
        original(group, [tensors[i] for i in numbers], *args, **kwargs)


def _verify_params_across_processes(machine: Machine, original, group, params, *args, **kwargs) -> None:
    """What C++ sends is of the parameters' GPU, not of the current one, which may be another rank's.

    In a dry run there are no values to compare (how many parameters each rank has, their sizes and strides): what it sends
    (torch/csrc/distributed/c10d/reducer.cpp, verify_params_across_processes), and that the host waits for it.
    """
    params = list(params)
    if not machine.dry:
        gpu = gpu_of(params[0]) if params else None
        with torch.cuda.device(None if gpu is None else gpu.device):
            original(group, params, *args, **kwargs)
        return
    count = torch.empty(1, dtype=torch.int64, device=params[0].device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group, async_op=True).wait()
    for one in counts:
        one[0].cpu()  # read one by one, as C++ does
    shapes = torch.empty(2 * sum(param.dim() for param in params), dtype=torch.int64, device=count.device)
    dist.broadcast(shapes, group=group, group_src=0, async_op=True).wait()
    torch.empty_like(shapes).copy_(shapes)


# -- FullyShardedDataParallel (FSDP1), once a program has imported it, in a dry run: what has values goes to its GPU as well.
#
# Such as BatchNorm's count of batches. FSDP1 moves a module's states by `state.data = state.to(device)`, which PyTorch refuses between a
# tensor with values and one without, so those are swapped.


def _move_states(machine: Machine, original, params, buffers, device) -> None:
    for state in (*params, *buffers) if machine.dry and device is not None else ():
        with torch.no_grad():
            there = state.to(device)
            if is_really_meta(there) and not is_really_meta(state):
                there = nn.Parameter(there, state.requires_grad) if isinstance(state, nn.Parameter) else there
                torch.utils.swap_tensors(state, there)
    original(params, buffers, device)


# -- torch.distributed.pipelining, once a program has imported it: the kernels of each pass of a micro-batch carry its name, whatever the schedule.
#
# The schedules of several stages a rank annotate their work, GPipe does by another name, and 1F1B does not. Here a stage's own methods do
# it, by the names of the first: "PP:2F3" is stage 2's forward pass of micro-batch 3, B its backward pass, I and W the halves of that, the
# input's gradients and the weights'. Before their first step stages agree on how to learn shapes, by a vote whose value counts in a dry
# run, too.


def _backward_label(bwd_chunk_id, loss=None, full_backward=True, *args, **kwargs) -> str:
    return f"{'B' if full_backward else 'I'}{bwd_chunk_id}"


LABELS = {  # of a stage's methods, by their arguments
    "forward_one_chunk": lambda number, *args, **kwargs: f"F{number}",
    "backward_one_chunk": _backward_label,
    "backward_weight_one_chunk": lambda number, *args, **kwargs: f"W{number}",
    "scale_grads": lambda factor: "REDUCE_GRAD",
}


def _annotated(machine: Machine, label, original, stage, *args, **kwargs):
    text, before = label(*args, **kwargs), machine.clock.local.kind
    if not text.startswith("F"):  # also what is done outside autograd: += of the weights' gradients
        machine.clock.set_kind("backward")
    try:
        with torch.profiler.record_function(f"PP:{stage.stage_index}{text}"):
            return original(stage, *args, **kwargs)
    finally:
        machine.clock.set_kind(before)


def _vote(machine: Machine, module, original, schedule, stages, has_backward, *args, **kwargs) -> None:
    is_passed_along = machine.single_rank is not None and original.__name__ == _compat.PASSED_ALONG
    if not (is_passed_along and _compat.vote_for_all(module, stages, has_backward)):  # else nobody would send it
        with_numbers(machine, original, schedule, stages, has_backward, *args, **kwargs)


# -- An optimizer's state gathered from all ranks: a rank that is played alone has nobody to give it theirs, and says so.


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
