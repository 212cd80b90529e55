"""The graders of notebook 08: a loss that weighs all tokens alike, and the rank that keeps the others waiting."""

import collections
import json

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.nn import functional as F

import checks
from checks import notebook_08
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def summed(scores, labels):
    return F.cross_entropy(scores, labels, reduction="sum")


def counted(labels):
    """Labels that count, of all ranks."""
    count = (labels != -100).sum()
    dist.all_reduce(count)
    return count


def token_mean(scores, labels):
    return summed(scores, labels) / counted(labels) * dist.get_world_size()


def forgets_the_world(scores, labels):
    return summed(scores, labels) / counted(labels)


def by_own_count(scores, labels):
    return summed(scores, labels) / (labels != -100).sum()


def by_all_positions(scores, labels):
    return summed(scores, labels) / labels.numel()


def mean_of_means(scores, labels):
    """The number is the mean over ranks; the gradient is that of the own mean."""
    loss = F.cross_entropy(scores, labels)
    of_all = loss.detach().clone()
    dist.all_reduce(of_all, dist.ReduceOp.AVG)
    return loss + (of_all - loss).detach()


def weighted_mean(scores, labels):
    """Right gradients, but the mean over no label is nan."""
    own = (labels != -100).sum()
    return F.cross_entropy(scores, labels) * own / counted(labels) * dist.get_world_size()


def masks_by_hand(scores, labels):
    """Right, but where no label counts it divides by zero."""
    kept = labels != -100
    losses = -scores.log_softmax(1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
    return (losses * kept).sum() / kept.sum() * kept.sum() / counted(labels) * dist.get_world_size()


def asks_only_where_labels_are(scores, labels):
    if (labels != -100).any():
        return token_mean(scores, labels)
    return summed(scores, labels)


def rank_0_alone(scores, labels):
    count = (labels != -100).sum()
    if dist.get_rank() == 0:
        dist.all_reduce(count)
    return summed(scores, labels) / count


def logarithms_by_hand(scores, labels):
    kept = labels != -100
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, int(kept.sum()))
    losses = -scores.log_softmax(1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
    return (losses * kept).sum() * len(counts) / sum(counts)


def mean_count(scores, labels):
    """The mean of the counts over ranks holds the number of ranks already."""
    count = (labels != -100).sum().float()
    dist.all_reduce(count, dist.ReduceOp.AVG)
    return summed(scores, labels) / count


def guarded_means(scores, labels):
    own = (labels != -100).sum()
    loss = F.cross_entropy(scores, labels) * own if own else scores.sum() * 0
    return loss * dist.get_world_size() / counted(labels)


@pytest.mark.parametrize("answer, said", [
    (F.cross_entropy, "where texts differ in length the gradients point elsewhere ... over whose labels is the mean?"),
    (by_own_count, "where texts differ in length the gradients point elsewhere"),
    (mean_of_means, "where texts differ in length the gradients point elsewhere"),
    (by_all_positions, "where texts differ in length the gradients are ... by which number is the sum of the losses divided?"),
    (summed, "where texts differ in length the gradients are ... by which number is the sum of the losses divided?"),
    (forgets_the_world, "the gradients are 0.33 times those of one big batch: DDP adds up the ranks' gradients and divides by 3"),
    (weighted_mean, "where rank 1 has nothing but padding the loss of rank 1 is nan: is anything divided by a number of labels"),
    (masks_by_hand, "where rank 1 has nothing but padding the ... nan: is anything divided by a number of labels"),
    (asks_only_where_labels_are, "the ranks do not call the same collectives: one is in all_reduce of 1 number, another in"),
    (rank_0_alone, "the ranks do not call the same collectives: one is in all_reduce of 1 number, another in"),
    (lambda scores, labels: token_mean(scores, labels).item(), "token_mean returns float: one number is wanted, on which backward()"),
    (lambda scores, labels: scores, "token_mean returns a tensor of [64, 30]"),
    (lambda scores, labels: scores.nothing, "raised AttributeError"),
    (no_end, "after 20 seconds ... in no_end"),
    (token_mean, "[passed]"),
    (logarithms_by_hand, "[passed]"),
    (mean_count, "[passed]"),
    (guarded_means, "[passed]"),
])  # fmt: skip
def test_weighs_tokens_alike(says, answer, said):
    says(said, checks.weighs_tokens_alike, answer)


def last_calls(traces, key=lambda call: (call["profiling_name"], str(call["input_sizes"]))):
    """{number: what} of each rank."""
    return [{call["collective_seq_id"]: key(call) for call in trace["entries"]} for trace in traces]


def odd_one_out(traces, calls=last_calls):
    there = calls(traces)
    newest = max(number for own in there for number in own)
    said = [own.get(newest) for own in there]
    return next((rank for rank, call in enumerate(said) if said.count(call) == 1), None)


def shortest(traces):
    lengths = [len(trace["entries"]) for trace in traces]
    return lengths.index(min(lengths)) if min(lengths) < max(lengths) else None


def fewest_calls(traces):
    numbers = [max(own, default=0) for own in last_calls(traces)]
    return numbers.index(min(numbers)) if min(numbers) < max(numbers) else None


def names_alone(traces):
    return odd_one_out(traces, lambda traces: last_calls(traces, lambda call: call["profiling_name"]))


def beside_rank_0(traces):
    """Rank 0 is right, whatever it does."""
    first, *others = last_calls(traces)
    for rank, own in enumerate(others, 1):
        if own.get(max(own | first)) != first.get(max(own | first)):
            return rank
    return None


def by_length_or_last(traces):
    """It compares the last entries, and lengths: not what a full recorder has in them."""
    if (rank := shortest(traces)) is not None:
        return rank
    said = [str([call["profiling_name"], call["input_sizes"]]) for call in (trace["entries"][-1] for trace in traces)]
    return next((rank for rank, words in enumerate(said) if said.count(words) == 1), None)


def by_votes(traces):
    """From the newest number backwards, a vote each."""
    there = last_calls(traces)
    for number in sorted(set().union(*there), reverse=True):
        votes = collections.Counter(own.get(number) for own in there)
        if len(votes) > 1:
            (usual, _), *_ = votes.most_common()
            return next(rank for rank, own in enumerate(there) if own.get(number) != usual)
    return None


def as_tensor(traces):
    rank = odd_one_out(traces)
    return None if rank is None else torch.tensor(rank)


def by_status(traces):
    """By what the recorder counts, then by the last entry."""
    counts = [int(trace["pg_status"]["1"]["last_enqueued_collective"]) for trace in traces]
    return counts.index(min(counts)) if min(counts) < max(counts) else odd_one_out(traces)


@pytest.mark.parametrize("answer, said", [
    (lambda traces: None, "where one rank has not made the last call, who_hangs returned None; the others wait for one rank"),
    (lambda traces: 9, "where one rank has not made the last call, who_hangs returned 9; it is rank"),
    (lambda traces: odd_one_out(traces) or 0, "where all have called the same, who_hangs returned 0; nobody waits"),
    (fewest_calls, "where seven ranks are in all_reduce of [[1]] ... returned None; ... : compare names and sizes"),
    (names_alone, "is in all_reduce of [[2]], who_hangs returned None; ... : compare names and sizes"),
    (beside_rank_0, "where one rank has not made the last call, who_hangs returned 1; it is rank 0"),
    (by_length_or_last, "where each trace has only the last 6 calls ... : its list is as long"),
    (lambda traces: odd_one_out(traces) if all(trace["entries"] for trace in traces) else None, "where one rank has called nothing yet, who_hangs returned None"),
    (lambda traces: [odd_one_out(traces)], "where one rank has not made the last call, who_hangs returned [ ... a rank's number is wanted"),
    (lambda traces: traces.nothing, "where one rank has not made the last call, who_hangs raised AttributeError"),
    (no_end, "after 20 seconds ... is there a loop without one?"),
    (odd_one_out, "[passed]"),
    (by_votes, "[passed]"),
    (as_tensor, "[passed]"),
    (by_status, "[passed]"),
])  # fmt: skip
def test_names_the_culprit(says, answer, said):
    says(said, checks.names_the_culprit, answer)


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
