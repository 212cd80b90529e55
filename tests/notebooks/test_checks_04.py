"""The graders of notebook 04: averaging by hand, and talking beside backward. Numbers are drawn anew each time."""

import pytest
import torch
import torch.distributed as dist

import checks
import virtualgpu
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def average(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def each_gradient(change):
    def average_gradients(model):
        for parameter in model.parameters():
            change(parameter)

    return average_gradients


def alike_but_not_averaged(model):
    """A cheat: the ranks agree, with one rank's numbers."""
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, src=0)


def halve(parameter):
    """Right on two ranks alone."""
    dist.all_reduce(parameter.grad)
    parameter.grad /= 2


def in_one_message(model):
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat, dist.ReduceOp.AVG)
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.grad = part.view_as(parameter)


def gathered(parameter):
    grads = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(grads, parameter.grad)
    parameter.grad.copy_(torch.stack(grads).mean(0))


def by_one_rank(parameter):
    dist.reduce(parameter.grad, dst=0)
    parameter.grad /= dist.get_world_size() if dist.get_rank() == 0 else 1
    dist.broadcast(parameter.grad, src=0)


@pytest.mark.parametrize("average_gradients, said", [
    (each_gradient(halve), "1.50 times as long as DDP's"),
    (each_gradient(lambda parameter: dist.all_reduce(parameter.grad)), "3.00 times as long as DDP's"),
    (each_gradient(lambda parameter: dist.all_reduce(parameter.grad / 3)), "are as backward left them: was a copy averaged"),
    (alike_but_not_averaged, "times as long as DDP's"),
    (lambda model: model.zero_grad(), "0.00 times as long as DDP's"),
    (lambda model: undefined, "raised NameError"),  # noqa: F821
    (no_end, "after 20 seconds rank 0 stands in ... in no_end ... ?"),
    (each_gradient(average), "[passed]"),
    (in_one_message, "[passed]"),
    (each_gradient(gathered), "[passed]"),
    (each_gradient(by_one_rank), "[passed]"),
])  # fmt: skip
def test_averages(says, average_gradients, said):
    says(said, checks.averages, average_gradients)


def late(model):
    def finish():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    return finish


def early(model, average=dist.ReduceOp.AVG, forgotten=(), halved=False):
    works = []

    def send(parameter):
        if halved:
            parameter.grad /= 2
            return works.append(dist.all_reduce(parameter.grad, async_op=True))
        works.append(dist.all_reduce(parameter.grad, average, async_op=True))

    for parameter in [*model.parameters()][len(forgotten) :]:
        parameter.register_post_accumulate_grad_hook(send)

    def finish():
        while works:
            works.pop().wait()

    return finish


def waits_in_the_hook(model):
    """A cheat that sends early, and waits at once."""

    def send(parameter):
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        torch.cuda.synchronize()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    return lambda: None


def never_waits(model):
    early(model)
    return lambda: None


def divides_at_the_end(model):
    finish = early(model, dist.ReduceOp.SUM)

    def divided():
        finish()
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()

    return divided


def divides_first(model):
    works = []

    def send(parameter):
        parameter.grad /= dist.get_world_size()
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    return lambda: [works.pop().wait() for _ in range(len(works))]


def on_a_stream_of_its_own(model):
    """And without async_op."""
    stream = torch.cuda.Stream()

    def send(parameter):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    return lambda: torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("talk_early, said", [
    (late, "only 0% of the talking is beside backward's computing"),
    (waits_in_the_hook, "of the talking is beside backward's computing"),
    (lambda model: early(model, dist.ReduceOp.SUM), "in step 0, on rank 0 a gradient is 3.00 times as long as DDP's: is a sum left undivided"),
    (never_waits, "a work that all_reduce(..., async_op=True) returned was never waited for"),
    (lambda model: early(model, forgotten=("the first",)), "in step 0, on rank 0 a gradient is"),
    (lambda model: early(model, halved=True), "in step 0, on rank 0 a gradient is 1.50 times as long"),
    (lambda model: None, "talk_early should return a function, which is called after backward"),
    (early, "[passed]"),
    (divides_at_the_end, "[passed]"),
    (divides_first, "[passed]"),
    (on_a_stream_of_its_own, "[passed]"),
])  # fmt: skip
def test_talks_early(says, talk_early, said):
    says(said, checks.talks_early, talk_early)


def test_the_notebooks_gpus_stay_as_they_are(says):
    virtualgpu.gpus(4)
    x = torch.ones(3, device="cuda:3")
    says("[passed]", checks.averages, each_gradient(average))
    assert torch.cuda.device_count() == 4 and x.sum().item() == 3
