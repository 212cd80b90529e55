"""What `--explain` makes of what was recorded: the parts of a step, what is tried, whose NVLink, its table; a loader."""

import itertools
import random
from types import SimpleNamespace

import pytest

from virtualgpu import environment
from virtualgpu.hardware import specs
from virtualgpu.run import launcher, results
from virtualgpu.run.explain import changes, watch
from virtualgpu.run.explain import cli as explain
from virtualgpu.run.explain.changes import Explained, Parts, kind_of, mean, parts
from virtualgpu.timing.trace import Span


def settings(gpus=2, like="T4", **more):
    return environment.Settings(launcher.find_cards(gpus, like, None), **more)


# -- Where a step went: each moment is in one part, and the parts add up to the step


def span(start, end, kind="forward", name="mm", issued=0.0):
    return Span(0, start, end, kind, name, issued=issued)


MIXED = [
    span(1, 3, issued=1),  # the host launched it only now
    span(3, 4, "optimizer", "add"),
    span(4, 6, "communication", "all_reduce"),
    span(5, 7, name="relu", issued=2),  # beside the collective
    span(8, 9, "copy", "copy from the host"),
    span(9, 10, name="convolution", issued=2),
]
KINDS = {"matrix products": 2, "optimizer": 1, "elementwise and others": 2, "convolutions": 1}
OUTSIDE = [span(0, 2), span(2, 4, "communication"), span(4, 6, issued=3), span(9, 12, issued=5)]
STEPS = [  # spans, when the host was in the loader, begin, end; what computed, what idled, what was hidden
    (MIXED, [(0.2, 0.7)], 0, 10, KINDS, {"loader": 0.5, "launches": 0.5, "communication": 1, "copies": 1, "other": 1}, 1),
    # waiting for other ranks is no communication
    (
        [span(0, 3, "waiting"), span(3, 4, "communication"), span(4, 6, issued=1)], [], 0, 6,
        {"matrix products": 2}, {"waiting": 3, "communication": 1}, 0,
    ),
    # what lies outside is cut off; what comes next was launched at 5, and begins at 9
    (OUTSIDE, [(0, 1), (7, 20)], 1, 8, {"matrix products": 3}, {"communication": 2, "loader": 1, "other": 1}, 0),
    ([span(0, 1)], [], 0, 3, {"matrix products": 1}, {"launches": 2}, 0),  # no next kernel: the host is waited for
    # a copy to another GPU is communication
    (
        [span(0, 1, "copy", "copy cuda:0 to cuda:1"), span(1, 2, issued=0.1)], [], 0, 2,
        {"matrix products": 1}, {"communication": 1}, 0,
    ),
]  # fmt: skip


@pytest.mark.parametrize("spans, loading, begin, end, computing, idle, hidden", STEPS)
def test_parts_of_a_step(spans, loading, begin, end, computing, idle, hidden):
    found = parts(spans, loading, begin, end)
    assert found.computing == pytest.approx(computing)
    assert {name: seconds for name, seconds in found.idle.items() if seconds} == pytest.approx(idle)
    assert found.hidden == pytest.approx(hidden) and found.step == end - begin
    others = sum(idle.get(name, 0) for name in ("communication", "waiting", "other"))
    assert found.work == pytest.approx(end - begin - others)


def test_the_parts_add_up_whatever_happened():
    draw = random.Random(1)
    for _ in range(200):
        spans, moment = [], 0.0
        for _ in range(draw.randrange(12)):
            start = moment + draw.random()
            moment = start + draw.random()
            spans.append(span(start, moment, issued=start * draw.random()))
        for kind in ("communication", "waiting", "copy") * 3:
            start = 10 * draw.random()
            spans.append(span(start, start + 2 * draw.random(), kind))
        loading = [(at, at + draw.random()) for at in range(0, 10, 2)]
        begin = 5 * draw.random()
        found = parts(spans, loading, begin, begin + 5)
        assert sum(found.computing.values()) + sum(found.idle.values()) == pytest.approx(found.step)
        assert min([*found.computing.values(), *found.idle.values(), found.hidden]) >= 0


@pytest.mark.parametrize(
    "name, kind",
    [
        ("addmm", "matrix products"),
        ("convolution_backward", "convolutions"),
        ("_scaled_dot_product_flash_attention", "attention"),
        ("native_layer_norm_backward", "normalization"),
        ("linalg_vector_norm", "elementwise and others"),
        ("_log_softmax", "softmax and loss"),
        ("_to_copy", "casts and copies"),
        ("embedding_dense_backward", "embedding and indexing"),
        ("_cudnn_rnn", "recurrent layers"),
        ("add.Tensor", "elementwise and others"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kind_of(span(0, 1, name=name)) == kind
    assert kind_of(span(0, 1, "optimizer", name)) == "optimizer"


def test_a_mean_of_steps():
    both = mean([parts([span(0, 2)], [], 0, 2), parts([span(0, 1, name="relu")], [(1, 4)], 0, 4)])
    assert both.step == 3 and both.computing == {"matrix products": 1, "elementwise and others": 0.5}
    assert both.idle["loader"] == 1.5


# -- What is tried


def of(step, rank=0, computing=0.0, more=(), **idle):
    idle = {"communication": 0.0, "waiting": 0.0, **idle}
    steps = {"0": [Parts(step, {"matrix products": computing}, idle, 0.0)] * 2}
    return Explained(rank, steps, None, False, True, False, None)._replace(**dict(more))


BOUND, LINKS = "no communication", ["no communication", "NVLink"]


@pytest.mark.parametrize(
    "explained, names",
    [
        ([of(1.0, computing=1.0)], []),
        ([of(1.0, computing=1.0, more={"half": False})], ["half precision"]),
        ([of(1.0, computing=0.985, launches=0.015)], []),
        ([of(1.0, launches=1.0)], ["no launches"]),
        ([of(1.0, loader=0.5, copies=0.5)], ["no loader"]),
        ([of(1.0, communication=0.5)], LINKS),
        ([of(1.0, communication=0.5, more={"bucket_cap": 1.0})], [*LINKS, "larger buckets"]),
        ([of(1.0, communication=0.5, more={"compressible": True})], [*LINKS, "half gradients"]),
        ([of(1.0, waiting=0.5, computing=0.5), of(1.0, 1, computing=1.0)], ["equal ranks"]),
    ],
)
def test_what_is_tried(explained, names):
    assert [change.name for change in changes.candidates(explained, settings())] == names


def test_where_there_is_nvlink_no_link_is_tried():
    tries = changes.candidates([of(1.0, communication=0.5)], settings(like="V100"))
    assert [change.name for change in tries] == [BOUND]


def test_equal_work_is_the_mean_of_the_ranks():
    one, two = of(3.0, waiting=2.0, computing=1.0), of(3.0, 1, computing=3.0)
    assert changes._factors([one, two]) == {"0": [2.0] * 4, "1": [pytest.approx(2 / 3)] * 4}


@pytest.mark.parametrize(
    "like, gpus, message",
    [
        ("T4", 2, "NVLink as a V100 has it (this card takes none)"),
        ("RTX 3090", 2, "NVLink (the bridge of two such cards)"),
        ("RTX 3090", 4, "NVLink as an A100 has it (its bridge joins two)"),
        ("RTX 5090", 2, "NVLink as a B200 has it (this card takes none)"),
    ],
)
def test_whose_nvlink(like, gpus, message):
    spec, sentence = changes.nvlinked(specs.find_spec(like), gpus)
    assert sentence == message and spec.nvlink and spec.peer_access
    with pytest.raises(ValueError, match="has NVLink"):
        changes.nvlinked(spec, gpus)


@pytest.mark.parametrize(
    "gpus, more, joined",
    [
        (4, {}, 4),
        (4, {"gpus_per_node": 2}, 2),
        (1, {"single_rank": (2, 0, 8)}, 2),  # one rank plays alone
        (1, {"single_rank": (64, 9, 8)}, 8),
    ],
)
def test_nvlink_joins_the_gpus_of_a_node(gpus, more, joined):
    tries = changes.candidates([of(1.0, communication=0.5)], settings(gpus, "RTX 3090", **more))
    (change,) = (one for one in tries if one.name == "NVLink")
    assert change.setting["link"] == joined and ("two such cards" in change.words) == (joined == 2)


@pytest.mark.parametrize("here", [1, 2])
def test_a_bridge_is_the_card_with_the_bridge(here):
    """Also where one rank of the two plays alone."""
    bridged = watch.cards({"link": 2}, [specs.find_spec("TITAN RTX")] * here)
    assert [card.peer for card in bridged] == [specs.find_spec("TITAN RTX NVLink").peer] * here
    assert watch.cards({"link": 4}, [specs.find_spec("TITAN RTX")])[0].peer == specs.find_spec("V100").peer


def test_what_a_full_disk_left_out_is_not_laid_at_the_programs_door(monkeypatch):
    """Python ends with 120 where what it printed cannot be kept."""

    def full(*args):
        raise OSError(28, "No space left on device")

    def failed(status):
        ended = SimpleNamespace(output_of=lambda *args: (status, ""))
        return explain.once(ended, settings(1), ["a.py"]).failed

    assert failed(0).startswith("the program ended after 0 steps of an optimizer")
    monkeypatch.setattr(results, "leave", full)
    for status in (0, 120):
        assert failed(status).startswith("its figures could not be written: No space left on device in ")
        assert "TMPDIR" in failed(status)


# -- The table


def test_what_is_not_known_is_said():
    change = changes.Change("half precision", "In half precision", changes.COMPUTING)
    found = explain.Explanation(1.0, (), (explain.Tried(change, None, "out of memory: 1 GiB"),))
    message = "Not known: half precision, for the run with it failed (out of memory"
    assert explain.sentences(found)[-1].startswith(message)


def test_many_ranks_are_three_columns():
    ranks = [of(1.0, rank, computing=0.1 * rank, waiting=1 - 0.1 * rank) for rank in range(1, 9)]
    rows = tuple(explain.Row(one.rank, 0, one.gpus["0"][0]) for one in ranks)
    table = explain.lines(explain.Explanation(1.0, rows), "8 x T4")
    assert "rank 1, least work" in table[1] and "rank 8, most work" in table[1] and "mean of 8" in table[1]
    assert table[2].split()[:2] == ["computing", "100"] and table[2].split()[-4:] == ["450", "ms", "45", "%"]


# -- A loader's workers on the simulated clock: they load beside the step, as many batches ahead as PyTorch asks for


@pytest.mark.parametrize(
    "workers, ahead, batch, step, first, later",
    [
        *[(n, 2 * n, 0.02 * n, 0.01, 0.02 * n * (1 + 1 / n) + 0.01, 0.02) for n in (1, 2, 8)],  # they set the pace
        (2, 4, 0.03, 0.02, None, 0.02),  # they keep up, and cost nothing after the first batch
    ],
)
def test_workers_of_a_loader(workers, ahead, batch, step, first, later):
    queue, now, ends = watch._Workers(workers, ahead, 0.0), 0.0, []
    for _ in range(40):
        now = max(now, queue.ready(now, batch)) + step
        ends.append(now)
    assert first is None or ends[0] == pytest.approx(first, rel=0.5)
    assert [end - start for start, end in itertools.pairwise(ends[2:])] == pytest.approx([later] * 37)


def test_no_batch_is_loaded_before_it_is_asked_for():
    """Of one batch ahead, a worker begins with the next when this one is taken: it cannot be there sooner than that."""
    queue = watch._Workers(4, 1, 0.0)
    first = queue.ready(0.0, 1.0)
    assert queue.ready(first + 5.0, 1.0) == pytest.approx(first + 1.0)
