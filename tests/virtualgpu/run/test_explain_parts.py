"""Where a step went, by hand: each moment is in one part, and the parts add up to the step."""

import random

import pytest

from virtualgpu.run.explain.changes import COMMUNICATION, COPIES, LAUNCHES, LOADER, OTHER, WAITING, kind_of, mean, parts
from virtualgpu.timing.trace import Span


def span(start, end, kind="forward", name="mm", issued=0.0):
    return Span(0, start, end, kind, name, issued=issued)


def near(**seconds):
    return {name: pytest.approx(value) for name, value in seconds.items()}


def test_kernels_and_what_is_between_them():
    found = parts(
        [
            span(1, 3, issued=1),  # the host launched it only now
            span(3, 4, "optimizer", "add"),
            span(4, 6, "communication", "all_reduce"),
            span(5, 7, name="relu", issued=2),  # beside the collective
            span(8, 9, "copy", "copy from the host"),
            span(9, 10, name="convolution", issued=2),
        ],
        loading=[(0.2, 0.7)],
        begin=0,
        end=10,
    )
    assert found.step == 10
    assert found.computing == near(
        **{"matrix products": 2, "optimizer": 1, "elementwise and others": 2, "convolutions": 1}
    )
    assert {name: seconds for name, seconds in found.idle.items() if seconds} == near(
        loader=0.5, launches=0.5, communication=1, copies=1, other=1
    )
    assert found.hidden == pytest.approx(1)
    assert found.work == pytest.approx(10 - 1 - 1)


def test_waiting_is_not_communication():
    found = parts([span(0, 3, "waiting"), span(3, 4, "communication"), span(4, 6, issued=1)], [], 0, 6)
    assert (found.idle[WAITING], found.idle[COMMUNICATION], found.idle[LAUNCHES]) == (3, 1, 0)
    assert found.work == 2


def test_what_lies_outside_is_cut_off():
    spans = [span(0, 2), span(2, 4, "communication"), span(4, 6, issued=3), span(9, 12, issued=5)]
    found = parts(spans, [(0, 1), (7, 20)], 1, 8)
    assert found.computing == near(**{"matrix products": 3}) and found.idle[COMMUNICATION] == 2
    assert found.idle[LOADER] == 1 and found.idle[OTHER] == 1, "what comes next was launched at 5, and begins at 9"
    assert sum(found.computing.values()) + sum(found.idle.values()) == found.step == 7


def test_an_end_without_a_next_kernel_waits_for_the_host():
    found = parts([span(0, 1)], [], 0, 3)
    assert found.idle[LAUNCHES] == 2


def test_a_copy_to_another_gpu_is_communication():
    found = parts([span(0, 1, "copy", "copy cuda:0 to cuda:1"), span(1, 2, issued=0.1)], [], 0, 2)
    assert found.idle[COMMUNICATION] == 1 and found.idle[COPIES] == 0


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
    one, two = parts([span(0, 2)], [], 0, 2), parts([span(0, 1, name="relu")], [(1, 4)], 0, 4)
    both = mean([one, two])
    assert both.step == 3 and both.computing == {"matrix products": 1, "elementwise and others": 0.5}
    assert both.idle[LOADER] == 1.5
