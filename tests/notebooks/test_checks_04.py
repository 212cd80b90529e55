"""The graders of notebook 04: averaging by hand, and talking beside backward. Numbers are drawn anew each time."""

import torch
import torch.distributed as dist

import checks
from tests.notebooks.answers import PASSED, table
from tests.processes import no_end


def in_one_message(model):
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat, dist.ReduceOp.AVG)
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.grad = part.view_as(parameter)


SUM, DIVIDE = "dist.all_reduce(parameter.grad)", "parameter.grad /= dist.get_world_size()"

test_averages = table(checks.averages, "04", "average_gradients", [
    (("dist.get_world_size()", "2"), "1.50 times as long as DDP's"),  # right on two ranks alone
    ((SUM, "dist.all_reduce(parameter.grad / 3)", DIVIDE, "pass"), "are as backward left them: was a copy averaged"),
    (lambda model: model.zero_grad(), "0.00 times as long as DDP's"),
    (no_end, "after 20 seconds rank 0 stands in ... in no_end ... ?"),
    (in_one_message, PASSED),
])  # fmt: skip

REDUCE = "works.append(dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, async_op=True))"
AT_ONCE = "dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)"
SUMMED = REDUCE.replace("AVG", "SUM")
WAIT = "while works:\n            works.pop().wait()"
HOOK = "parameter.register_post_accumulate_grad_hook(send)"
ON_A_STREAM = (
    f"stream.wait_stream(torch.cuda.current_stream())\n        with torch.cuda.stream(stream):\n            {AT_ONCE}"
)

test_talks_early = table(checks.talks_early, "04", "talk_early", [
    ((HOOK, "pass", WAIT, f"for parameter in model.parameters():\n            {AT_ONCE}"), "only 0% of the talking is beside backward's computing"),
    ((REDUCE, SUMMED), "in step 0, on rank 0 a gradient is 3.00 times as long as DDP's: is a sum left undivided"),
    (("return finish", "return lambda: None"), "a work that all_reduce(..., async_op=True) returned was never waited for"),
    (lambda model: None, "talk_early should return a function, which is called after backward"),
    ((REDUCE, SUMMED, WAIT, WAIT + "\n        for p in model.parameters():\n            p.grad /= dist.get_world_size()"), PASSED),
    (("works = []", "stream = torch.cuda.Stream()", REDUCE, ON_A_STREAM, WAIT, "torch.cuda.current_stream().wait_stream(stream)"), PASSED),
])  # fmt: skip
