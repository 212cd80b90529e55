"""torch.distributed.pipelining: the kernels of each pass of a micro-batch carry its name, whatever the schedule.

The schedules of several stages a rank annotate their work, GPipe does by another name, and 1F1B does not. Here a stage's own methods
do it, by the names of the first: "PP:2F3" is stage 2's forward pass of micro-batch 3, B its backward pass, I and W the halves of
that, the input's gradients and the weights'.

Before their first step stages agree on how to learn shapes, by a vote whose value counts in a dry run, too.
"""

import functools

import torch

from virtualgpu.distributed import _compat
from virtualgpu.distributed.objects import with_numbers
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.imports import when_imported
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Name the passes, and give the stages' vote numbers, once torch.distributed.pipelining is imported."""

    def then(module) -> None:
        _annotate(machine, patches, module)
        votes = _compat.pipeline_votes(module)
        if votes is not None:
            patches.replace(*votes, _vote(machine, module, with_numbers(machine, getattr(*votes))))

    when_imported(_compat.PIPELINE_SCHEDULES, then, patches)


def _vote(machine: Machine, module, original):
    @functools.wraps(original)
    def method(schedule, stages, has_backward, *args, **kwargs):
        passed_along = machine.single_rank is not None and original.__name__ == _compat.PASSED_ALONG
        if not (passed_along and _compat.vote_for_all(module, stages, has_backward)):  # else nobody would send it
            original(schedule, stages, has_backward, *args, **kwargs)

    return method


def _annotate(machine: Machine, patches: Patches, module) -> None:
    base = _compat.pipeline_stage(module)

    def annotated(name: str, action):
        original = getattr(base, name)

        @functools.wraps(original)
        def method(stage, *args, **kwargs):
            way, number = action(*args, **kwargs)
            before = machine.clock.local.kind
            if way != "F":  # also what is done outside autograd: += of the weights' gradients
                machine.clock.set_kind("backward")
            try:
                with torch.profiler.record_function(f"PP:{stage.stage_index}{way}{number}"):
                    return original(stage, *args, **kwargs)
            finally:
                machine.clock.set_kind(before)

        patches.replace(base, name, method)

    annotated("forward_one_chunk", lambda number, *args, **kwargs: ("F", number))
    annotated("backward_one_chunk", _backward)
    annotated("backward_weight_one_chunk", lambda number, *args, **kwargs: ("W", number))
    annotated("scale_grads", lambda factor: ("REDUCE_GRAD", ""))


def _backward(bwd_chunk_id, loss=None, full_backward=True, *args, **kwargs):
    return "B" if full_backward else "I", bwd_chunk_id
