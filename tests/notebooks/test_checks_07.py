"""The graders of notebook 07, make it fit: accumulation that is exact, and 1.26 billion parameters on one T4."""

import checks
from tests.notebooks.answers import PASSED, table
from virtualgpu import _compat

LOSS, BATCHES = 'F.cross_entropy(net(xs), ys.flatten(), reduction="sum") / counted', "zip(x.split(size), y.split(size))"
MASKED = """kept, scores = ys.flatten() != -100, net(xs).log_softmax(1)
        losses = -scores.gather(1, ys.flatten().clamp_min(0)[:, None])[:, 0] * kept
        loss = losses.sum() / kept.sum() * (kept.sum() / counted)"""
BACKWARD, ITEM = "        loss.backward()\n", "        total += loss.item()\n    return total"
AT_THE_END = "    for p in net.parameters():\n        p.grad /= counted\n    return total / int(counted)"

test_accumulates = table(checks.accumulates, "07", "accumulate", [
    (('reduction="sum") / counted', ") / len(x.split(size))"), "with 8 full texts, 3 at a time, the gradients are ... off those of the whole batch: over which labels"),
    (("/ counted", "/ y.numel()"), "with 8 padded texts the gradients are ... 0.44 times as long: over which labels is the mean?"),
    # right gradients, but where no label counts the mean is nan
    (('reduction="sum") / counted', ") * (ys != -100).sum() / counted"), "whose labels are all -100, the gradients are right; the loss should be 5.5 ... it returned nan"),
    # right, but where no label counts it divides by zero
    (("loss = " + LOSS, MASKED), "whose labels are all -100, the gradients are nan: is anything divided by"),
    ((BATCHES, "[(x, y)]"), "with 8 full texts net is given 8 texts at once: at most size=2 are wanted"),
    ((BACKWARD + ITEM, "        total = total + loss\n    total.backward()\n    return total.item()"), "right gradients, but the peak is ... times that of one micro-batch at a time"),
    (("total += loss.item()", "total = loss.item()"), "the gradients are right; the loss should be 5.5"),
    (lambda net, x, y, size: 5.4, "some parameters have no gradient"),
    (lambda net, x, y, size: net.nothing, "your code raised AttributeError"),
    ((" / counted", "", "    return total", AT_THE_END), PASSED),
    ((BATCHES, "reversed(list(zip(x, y)))", "net(xs)", "net(xs[None])"), PASSED),  # one by one, from the end
])  # fmt: skip


GIB = 12.7 if _compat.KEEPS_WORKSPACES else 12.6
OPTIMIZER = "lesson_07.Adam8bit([p])"

test_trains_a_billion = table(checks.trains_a_billion, "07", "trainer", [
    (("    checkpointed(net)\n", "", "    for p in optimizers:\n        p.register_post_accumulate_grad_hook(update)\n", "",
      BACKWARD, BACKWARD + "        for p in optimizers:\n            update(p)\n"), f"it learns, and 1.26 billion parameters take {GIB} GiB: at most 11.8 are wanted"),
    ((OPTIMIZER, "torch.optim.Adam([p])"), "it learns, but 1.26 billion parameters run out"),
    ((OPTIMIZER, "torch.optim.SGD([p], lr=0.1)"), "30 steps bring the loss from ... with Adam it comes to"),
    (("net.parameters()", "net.requires_grad_(False).blocks.requires_grad_(True).parameters()"), "words.weight has not moved in 30 steps: all parameters are to train"),
    (("return loss.detach()", "return None"), "step returned None: the loss of the batch is wanted"),
    (lambda net: None, "trainer returns NoneType: a function step(x, y) is wanted"),
    (lambda net: net.nothing, "your code raised AttributeError"),
    ((OPTIMIZER, "torch.optim.Adafactor([p], lr=0.01)"), PASSED),
])  # fmt: skip
