"""An optimizer's step: its operations are an optimizer's, and what it does in Python costs the host."""

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Hooks around every step."""

    def before(optimizer: Optimizer, args, kwargs) -> None:
        machine.clock.set_kind("optimizer")
        with machine.clock.ours():
            parameters, counts = _in_lists(optimizer)
            if parameters:
                machine.clock.pass_step(parameters, counts)

    def after(optimizer: Optimizer, args, kwargs) -> None:
        with machine.clock.ours():
            machine.clock.set_kind("forward")

    for register, hook in ((register_optimizer_step_pre_hook, before), (register_optimizer_step_post_hook, after)):
        patches.undo(register(hook).remove)


def _in_lists(optimizer: Optimizer) -> tuple[int, int]:
    """Parameters on a GPU that have a gradient and that the step takes in lists, by foreach or fused, and how many of them have a count of
    steps on the CPU. Those it takes one by one cost what their operations do."""
    parameters = counts = 0
    for group in optimizer.param_groups:
        fused = group.get("fused")
        if not fused and ("foreach" not in group or group["foreach"] is False or group.get("differentiable")):
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and gpu_of(parameter) is not None:
                parameters += 1
                counts += not fused and _counts_on_cpu(optimizer.state.get(parameter, {}))
    return parameters, counts


def _counts_on_cpu(state: dict) -> bool:
    return isinstance(count := state.get("step"), Tensor) and gpu_of(count) is None
