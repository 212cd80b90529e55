"""The graders of notebook 11: the loop that works through a pipeline's order, with small messages and with large ones."""

from torch.utils.checkpoint import checkpoint

import checks
from tests.notebooks.answers import PASSED, table

SEND_ON, SEND_BACK = "dist.send(out.detach(), rank + 1)", "dist.send(x.grad, rank - 1)"
GPIPE = "with 3 stages, 4 micro-batches and the order of GPipe, "
ASYNCHRONOUSLY = ("kept, most = {}, 0", "kept, most, sent = {}, 0, []", SEND_ON, "sent.append((dist.isend(out.detach(), rank + 1), x))", SEND_BACK,
                  "sent.append((dist.isend(x.grad, rank - 1), x))", "return most", "for work, _ in sent:\n        work.wait()\n    return most")  # fmt: skip
# a communicator for each direction: its own streams
TWO_GROUPS = (*ASYNCHRONOUSLY, "sent = {}, 0, []", "sent, down, up = {}, 0, [], dist.new_group(), dist.new_group()", "rank + 1), x", "rank + 1, down), x",
              "rank - 1), x", "rank - 1, up), x", "dist.recv(x, rank - 1)", "dist.recv(x, rank - 1, down)",
              "dist.recv(gradient, rank + 1)", "dist.recv(gradient, rank + 1, up)")  # fmt: skip

test_runs_in_order = table(checks.runs_in_order, "11", "run", [
    (lambda *args: 0, GPIPE + "rank 0 does nothing; its order says F F F F B B B B"),
    (("for work in order:", 'for work in sorted(order, key=lambda work: work[0] == "B"):'), "and the order of 1F1B, rank 0 does F F F F B B B B; its order says F F F B F B B B"),
    ((" / len(inputs)", ""), GPIPE + "rank 0 has gradients 4 times one GPU's: the loss is the mean over the whole batch"),
    (("part(x)", "part(x.detach())"), GPIPE + "rank 2 sends None: what it receives has a .grad only where requires_grad_() was called"),
    ((SEND_ON, SEND_ON.replace("out.detach()", "torch.ones_like(out)"), "(x.grad", "(torch.ones_like(x)"), GPIPE + "rank 0 has other gradients than one GPU: they differ by "),
    ((SEND_BACK, "pass"), "after 20 seconds rank 0 ... which message does each of them wait for"),
    (("return most", "return None"), GPIPE + "rank 0 returns None; it held 4 micro-batches at most"),
    (ASYNCHRONOUSLY, PASSED),
    (("part(x)", "checkpoint(part, x, use_reentrant=False)"), PASSED),
], checkpoint=checkpoint)  # fmt: skip

test_runs_large = table(checks.runs_large, "11", "run", [
    ((), "[not yet] with 3 stages, 4 micro-batches of 2 MiB and the order of 1F1B, both ranks send first, and NCCL would hang"),
    (TWO_GROUPS, PASSED),
])  # fmt: skip
