"""torch.distributed.pipelining, once a program has imported it: the kernels of each pass of a micro-batch carry its name, whatever the schedule.

The schedules of several stages a rank annotate their work, GPipe does by another name, and 1F1B does not. Here a stage's own methods do
it, by the names of the first: "PP:2F3" is stage 2's forward pass of micro-batch 3, B its backward pass, I and W the halves of that, the
input's gradients and the weights'. Before their first step stages agree on how to learn shapes, by a vote whose value counts in a dry
run, too.
"""

import functools

import torch

from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed.objects import with_numbers
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.imports import when_imported
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """What is to be done when a program imports it."""
    when_imported(_compat.PIPELINE_SCHEDULES, functools.partial(_install, machine, patches), patches)


def _install(machine: Machine, patches: Patches, module) -> None:
    stage = _compat.pipeline_stage(module)
    for name, label in LABELS.items():
        patches.stand_in(stage, name, _annotated, machine, label)
    votes = _compat.pipeline_votes(module)
    if votes is not None:
        patches.stand_in(*votes, _vote, machine, module)


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
