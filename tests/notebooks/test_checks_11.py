"""The graders of notebook 11: the loop that works through a pipeline's order, with small messages and with large ones."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import checks
from tests.notebooks.answers import PASSED, solution, table
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")

ORDER, KEPT = "for work in order:", "kept, most = {}, 0"
SEND_ON, SEND_BACK = "dist.send(out.detach(), rank + 1)", "dist.send(x.grad, rank - 1)"
TAKE, TAKE_BACK = "dist.recv(x, rank - 1)", "dist.recv(gradient, rank + 1)"
WAIT = "for work, _ in sent:\n        work.wait()\n    return most"
ALWAYS_GPIPE = ORDER, 'for work in sorted(order, key=lambda work: work[0] == "B"):'
ASYNCHRONOUSLY = (KEPT, "kept, most, sent = {}, 0, []", SEND_ON, "sent.append((dist.isend(out.detach(), rank + 1), x))",
                  SEND_BACK, "sent.append((dist.isend(x.grad, rank - 1), x))", "return most", WAIT)  # fmt: skip
# a communicator for each direction: its own streams
TWO_GROUPS = (*ASYNCHRONOUSLY, "sent = {}, 0, []", "sent, down, up = {}, 0, [], dist.new_group(), dist.new_group()", "rank + 1), x", "rank + 1, down), x",
              "rank - 1), x", "rank - 1, up), x", TAKE, "dist.recv(x, rank - 1, down)", TAKE_BACK, "dist.recv(gradient, rank + 1, up)")  # fmt: skip
ADDED_BY_HAND = """found = torch.autograd.grad(out, [*part.parameters(), *([x] if rank else [])], gradient)
            for parameter, more in zip(part.parameters(), found):
                parameter.grad = more if parameter.grad is None else parameter.grad + more"""
GPIPE = "with 3 stages, 4 micro-batches and the order of GPipe, "


def each_rank_alone(order, part, inputs, targets):
    for i, x in enumerate(inputs):
        (F.mse_loss(part(x), targets[i]) / len(inputs)).backward()
    return 1


test_runs_in_order = table(checks.runs_in_order, "11", "run", [
    (lambda *args: 0, GPIPE + "rank 0 does nothing; its order says F F F F B B B B"),
    (ALWAYS_GPIPE, "and the order of 1F1B, rank 0 does F F F F B B B B; its order says F F F B F B B B"),
    ((ORDER, 'for work in [f"{kind}{i}" for i in range(len(inputs)) for kind in "FB"]:'), GPIPE + "rank 0 does F B F B F B F B; its order says F F F F B B B B"),
    ((" / len(inputs)", ""), GPIPE + "rank 0 has gradients 4 times one GPU's: the loss is the mean over the whole batch"),
    (each_rank_alone, GPIPE + "rank 0 does F B F B"),
    (("part(x)", "part(x.detach())"), GPIPE + "rank 2 sends None: what it receives has a .grad only where requires_grad_() was called"),
    ((SEND_ON, SEND_ON.replace("out.detach()", "torch.ones_like(out)"), "(x.grad", "(torch.ones_like(x)"), GPIPE + "rank 0 has other gradients than one GPU: they differ by "),
    ((SEND_BACK, "pass"), "after 20 seconds rank 0 ... which message does each of them wait for"),
    (("return most", "return None"), GPIPE + "rank 0 returns None; it held 4 micro-batches at most"),
    (("return most", "return len(kept)"), GPIPE + "rank 0 returns 0; it held 4"),
    (no_end, "after 20 seconds rank 0 ... in no_end"),
    (lambda *args: 1 / 0, "raised ZeroDivisionError"),
    (TWO_GROUPS, PASSED),
    (ASYNCHRONOUSLY, PASSED),
    (("part(x)", "checkpoint(part, x, use_reentrant=False)"), PASSED),
    (("out.backward(gradient)", ADDED_BY_HAND, "(x.grad", "(found[-1]", "return most", "return torch.tensor(most)"), PASSED),
], checkpoint=checkpoint, torch=torch)  # fmt: skip

test_runs_large = table(checks.runs_large, "11", "run", [
    ((), "[not yet] with 3 stages, 4 micro-batches of 2 MiB and the order of 1F1B, both ranks send first, and NCCL would hang"),
    (ASYNCHRONOUSLY, "of 2 MiB and the order of 1F1B, both ranks send first, and NCCL would hang"),
    (lambda *args: 0, "4 micro-batches of 2 MiB and the order of GPipe, rank 0 does nothing"),
    (ALWAYS_GPIPE, "and the order of 1F1B, rank 0 does F F F F B B B B"),
    ((" / len(inputs)", ""), "gradients 4 times one GPU's"),
    (TWO_GROUPS, PASSED),
])  # fmt: skip


def test_what_is_right_for_large_messages_is_for_small_ones(says):
    says(PASSED, checks.runs_in_order, *solution("11", "run_large"))
