"""The graders of notebook 08: a loss that weighs all tokens alike, and the rank that keeps the others waiting."""

import json

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.nn import functional as F

import checks
from checks import notebook_08
from tests.notebooks.answers import PASSED, table

COUNT, LOSS = "    dist.all_reduce(count)", 'F.cross_entropy(scores, labels, reduction="sum")'
WORLD = " * dist.get_world_size()"
OWN = "    own = count.clone()\n" + COUNT
RETURNED = "total / count" + WORLD
LOGARITHMS = "(-scores.log_softmax(1).gather(1, labels.clamp_min(0)[:, None])[:, 0] * (labels != -100)).sum()"

test_weighs_tokens_alike = table(checks.weighs_tokens_alike, "08", "token_mean", [
    (F.cross_entropy, "where texts differ in length the gradients point elsewhere ... over whose labels is the mean?"),
    ((RETURNED, "total"), "where texts differ in length the gradients are ... by which number is the sum of the losses divided?"),
    ((WORLD, ""), "the gradients are 0.33 times those of one big batch: DDP adds up the ranks' gradients and divides by 3"),
    # right gradients, but the mean over no label is nan
    ((COUNT, OWN, LOSS, "F.cross_entropy(scores, labels) * own"), "where rank 1 has nothing but padding the loss of rank 1 is nan: is anything divided by a number of labels"),
    ((COUNT, OWN, LOSS, LOGARITHMS + " / own * own"), "where rank 1 has nothing but padding the ... nan: is anything divided by a number of labels"),
    ((COUNT, "    if count:\n    " + COUNT), "the ranks do not call the same collectives: one is in all_reduce of 1 number, another in"),
    ((RETURNED, f"({RETURNED}).item()"), "token_mean returns float: one number is wanted, on which backward()"),
    (lambda scores, labels: scores, "token_mean returns a tensor of [64, 30]"),
    ((".sum()\n", ".sum().float()\n", COUNT, "    dist.all_reduce(count, dist.ReduceOp.AVG)", WORLD, ""), PASSED),  # the mean holds the number of ranks already
    ((COUNT, OWN, LOSS, "F.cross_entropy(scores, labels) * own if own else scores.sum() * 0"), PASSED),
])  # fmt: skip

CALL, ALL = '(call["profiling_name"], call["input_sizes"])', "[own.get(newest) for own in calls]"
ODD, RANK = "        if there.count(call) == 1:", "            return rank"
EARLIER = "    newest = "


def first(code: str) -> tuple[str, str]:
    return EARLIER, code + EARLIER


LENGTHS = '    lengths = [len(trace["entries"]) for trace in traces]\n    if len({*lengths}) > 1:\n        return lengths.index(min(lengths))\n'
LAST = "where one rank has not made the last call, who_hangs "

test_names_the_culprit = table(checks.names_the_culprit, "08", "who_hangs", [
    (lambda traces: None, LAST + "returned None; the others wait for one rank"),
    ((RANK, RANK + "\n    return 0"), "where all have called the same, who_hangs returned 0; nobody waits"),
    ((ALL, "[max(own, default=0) for own in calls]"), "where seven ranks are in all_reduce of [[1]] ... returned None; ... : compare names and sizes"),
    ((CALL, 'call["profiling_name"]'), "is in all_reduce of [[2]], who_hangs returned None; ... : compare names and sizes"),
    ((ODD, "        if call != there[0]:"), LAST + "returned 1; it is rank 0"),  # rank 0 is right, whatever it does
    # not what a full recorder has
    ((*first(LENGTHS), ALL, "[[*own.values()][-1:] for own in calls]"), "where each trace has only the last 6 calls ... : its list is as long"),
    (first("    if not all(calls):\n        return None\n"), "where one rank has called nothing yet, who_hangs returned None"),
    ((RANK, "            return [rank]"), LAST + "returned [ ... a rank's number is wanted"),
    (lambda traces: traces.nothing, LAST + "raised AttributeError"),
    ((RANK, "            return torch.tensor(rank)"), PASSED),
], torch=torch)  # fmt: skip


def test_traces_are_as_the_recorder_writes_them():
    """The fields of a trace and of its entries, of PyTorch's own recorder for gloo."""
    group = dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(8), group=group)
        real = json.loads(_dump_fr_trace_json())
    finally:
        dist.destroy_process_group()
    ours = notebook_08._trace([("all_reduce", [[8]])])
    entry, own = real["entries"][-1], ours["entries"][-1]
    assert real.keys() <= ours.keys()
    assert entry.keys() <= own.keys()
    assert {key: type(value) for key, value in entry.items()} == {key: type(own[key]) for key in entry}
    for key in "profiling_name", "input_sizes", "output_sizes", "input_dtypes", "state":
        assert entry[key] == own[key]
