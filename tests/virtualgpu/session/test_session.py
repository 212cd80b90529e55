"""On and off at any moment: atomic, from any thread, with other modes, and whoever else patches PyTorch."""

import concurrent.futures
import gc
import signal
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import virtualgpu
from tests import forks
from virtualgpu import session
from virtualgpu.engine.machine import dry_runs
from virtualgpu.hardware.specs import find_specs

ONE = torch.device("cuda:1")


def in_thread(work):
    """What `work` returned or raised in a thread of its own."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return found[0]


def pristine():
    """Nothing of ours is on in this thread, and PyTorch's own functions are back."""
    assert virtualgpu.machine() is None and _get_current_dispatch_mode_stack() == []
    x = torch.ones(2)
    assert x.device.type == "cpu" and "device" not in vars(torch.Tensor)
    assert all(getattr(torch.Tensor, name) is vars(torch._C.TensorBase)[name] for name in ("to", "cuda", "numpy"))


def mismatch():
    torch.ones(2, device="cuda:1") + torch.ones(2, device="cuda:0")


# -- made whole or not at all


def test_a_failure_while_turning_on_leaves_nothing():
    attention, before = torch.nn.functional.scaled_dot_product_attention, torch.Tensor.to
    del torch.nn.functional.scaled_dot_product_attention  # a name that a later version of PyTorch has not
    try:
        with pytest.raises(AttributeError, match="scaled_dot_product_attention"):
            virtualgpu.gpus(2)
        pristine()
        assert torch.Tensor.to is before
    finally:
        torch.nn.functional.scaled_dot_product_attention = attention
    virtualgpu.gpus(2)
    assert torch.ones(1, device="cuda:1").device == ONE
    virtualgpu.reset()
    pristine()


INTERRUPTED = """
import sys
import torch, virtualgpu
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
virtualgpu.gpus(2); virtualgpu.reset()  # all is imported now

watched = [torch, torch.Tensor, torch.cuda, torch._C, torch.nn.functional, torch.UntypedStorage, torch.optim.Optimizer]
def look():
    return [dict(vars(owner)) for owner in watched]
before, lines, tried, left = look(), 0, 0, []
calls = {"gpus(2)": lambda: virtualgpu.gpus(2), "reset()": virtualgpu.reset}
def count(frame, event, arg):
    global lines
    lines += "virtual" in frame.f_code.co_filename
    if at is not None and lines == at:
        raise KeyboardInterrupt
    return count
def once(call, moment):
    global at, lines
    at, lines = moment, 0
    if call == "reset()":
        virtualgpu.gpus(2)
    sys.settrace(count)
    try:
        calls[call]()
    finally:
        sys.settrace(None)
for call in calls:
    once(call, None)
    total = lines
    virtualgpu.reset()
    for moment in range(1, total, max(1, total // 40)):
        try:
            once(call, moment)
        except KeyboardInterrupt:
            tried += 1
        virtualgpu.reset()
        changed = [name for one, two in zip(before, look()) for name in {**one, **two} if one.get(name) is not two.get(name)]
        changed = [name for name in changed if not name.startswith("__")]
        if changed or _get_current_dispatch_mode_stack() or virtualgpu.machine():
            left.append((call, moment, changed[:5]))
virtualgpu.gpus(2)
print(tried, left, (torch.ones(2, device="cuda:1") + 1).device)
"""


def test_ctrl_c_while_turning_on_or_off_leaves_nothing():
    """At forty places of either; a reset() afterwards finishes the work."""
    done = forks.run("-c", INTERRUPTED, timeout=300)
    last = done.stdout.splitlines()[-1:]
    assert last and last[0].endswith("[] cuda:1"), done.stdout + done.stderr[-2000:]
    assert int(last[0].split()[0]) >= 60


# -- threads


def test_turned_on_in_a_thread_and_off_in_another():
    assert in_thread(lambda: virtualgpu.gpus(2)) == [torch.device("cuda:0"), ONE]
    assert torch.ones(2, device="cuda:1").add(1).device == ONE
    with pytest.raises(RuntimeError, match="cuda:1 and cuda:0"):
        mismatch()
    virtualgpu.reset()
    pristine()
    virtualgpu.gpus(2)
    x = torch.ones(2, device="cuda:1")
    in_thread(virtualgpu.reset)
    assert virtualgpu.machine() is None and (x + 1).tolist() == [2, 2] and (x + 1).device.type == "cpu"
    virtualgpu.gpus(2)
    x = torch.ones(2, device="cuda:1")
    assert (x + 1).device == ONE
    virtualgpu.reset()
    pristine()


def test_a_running_thread_survives_reset():
    """It goes on, with tensors of the CPU."""
    virtualgpu.gpus(2)
    started, go_on, found = threading.Event(), threading.Event(), []

    def work():
        x = torch.ones(2, device="cuda:1")
        started.set()
        go_on.wait(30)
        try:
            found.append((x + 1).tolist())
            found.append((torch.ones(2) + x).device.type)
            x.requires_grad_().sum().backward()
            found.append(x.grad.tolist())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(30)
    virtualgpu.reset()
    go_on.set()
    thread.join(30)
    assert found == [[2, 2], "cpu", [1, 1]]


def test_threads_older_than_the_gpus_see_them():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the worker is there now
        for n in (2, 3):  # also those of a second call
            virtualgpu.gpus(n)
            assert pool.submit(lambda: torch.ones(2, device="cuda:1").add(1).device).result() == ONE
            with pytest.raises(RuntimeError, match="cuda:1 and cuda:0"):
                pool.submit(mismatch).result()
        virtualgpu.reset()
        assert pool.submit(lambda: torch.ones(2).add(1).device.type).result() == "cpu"


def test_a_plain_thread_older_than_the_gpus_sees_them():
    """Not of a pool: it meets them with the first tensor that it moves to a GPU."""
    asked, answers, on = threading.Event(), [], threading.Event()

    def work():
        asked.set()
        on.wait(30)
        try:
            with Counting():  # whose end must not end ours
                answers.append(torch.ones(2).to("cuda:1").add(1).device)
            answers.append(torch.ones(2, device="cuda:1").add(1).device)
            mismatch()
        except RuntimeError as error:
            answers.append(str(error)[:50])

    thread = threading.Thread(target=work)
    thread.start()
    asked.wait(30)
    virtualgpu.gpus(2)
    on.set()
    thread.join(30)
    assert answers == [ONE, ONE, "Expected all tensors to be on the same device, but"]


def test_an_operation_in_another_thread_during_backward(gpus):
    """It does not end the backward pass's own account of time."""
    x = torch.ones(3, device="cuda", requires_grad=True)
    kept = []

    def look(gradient):
        before = gpus.clock.host
        in_thread(lambda: torch.ones(2, device="cuda:1") + 1)
        kept.append(gpus.clock.host >= before)

    y = (x * 2) * 3
    y.register_hook(look)
    before = gpus.clock.host
    y.sum().backward()
    assert kept == [True] and gpus.clock.host > before and x.grad.tolist() == [6, 6, 6]


def test_attention_deep_in_a_thread(gpus):
    """Its C++ makes a mask "on the CPU", which belongs to the call, wherever the thread's first frames are."""
    x = torch.randn(1, 1, 4, 8, device="cuda", requires_grad=True)

    def at(depth):
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.1)
        return [out.device.type, *(at(depth - 1) if depth else ())]

    assert in_thread(lambda: at(30)) == ["cuda"] * 31


# -- modes and patches of others


class Counting(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_reset_inside_another_mode():
    virtualgpu.gpus(2)
    with Counting() as mode:
        x = torch.ones(2, device="cuda:1") + 1
        virtualgpu.reset()
        assert _get_current_dispatch_mode_stack() == [mode]
        seen = mode.seen
        assert (x + 1).device.type == "cpu" and mode.seen == seen + 1
        virtualgpu.gpus(2)
        assert (torch.ones(2, device="cuda:1") + 1).device == ONE
        virtualgpu.reset()
        assert _get_current_dispatch_mode_stack() == [mode]
    pristine()


def test_gpus_turned_on_inside_another_mode_outlive_it():
    with Counting() as mode:
        with virtualgpu.gpus(2), pytest.raises(RuntimeError, match="cuda:1 and cuda:0"):
            mismatch()
        virtualgpu.gpus(2)
        assert (torch.ones(2, device="cuda:1") + 1).device == ONE and mode.seen > 0
    seen = mode.seen
    with pytest.raises(RuntimeError, match="cuda:1 and cuda:0"):
        mismatch()
    assert mode.seen == seen and len(_get_current_dispatch_mode_stack()) == 1
    virtualgpu.reset()
    pristine()


def test_what_somebody_else_replaced_stays_theirs():
    pytest.importorskip("numpy")
    virtualgpu.gpus(2)
    ours = torch.Tensor.numpy

    def theirs(self, **options):
        return ours(self, **options)

    torch.Tensor.numpy = theirs
    try:
        with pytest.warns(UserWarning, match="numpy was replaced while virtual GPUs were on, and is left so"):
            virtualgpu.reset()
        assert torch.Tensor.numpy is theirs
    finally:
        del torch.Tensor.numpy
    assert torch.ones(2).numpy().tolist() == [1, 1]


def test_an_inner_with_leaves_the_outer_on():
    with virtualgpu.gpus(2) as outer:
        with virtualgpu.gpus(2) as inner:
            assert inner == outer
        assert torch.ones(1, device="cuda:1").device == ONE
    pristine()


# -- dry runs


WRONG = [({"n": n}, r"dry_run\(.*ask for 1 to 64 GPUs") for n in (0, -1, 65, 2.0, "2", True)]


@pytest.mark.parametrize(
    ("options", "message"), [*WRONG, ({"like": "RTX"}, "there is no GPU called"), ({"memory": "a lot"}, "memory=")]
)
def test_dry_run_checks_what_it_is_given(options, message):
    with pytest.raises(ValueError, match=message), virtualgpu.dry_run(**options):
        pass
    pristine()


@pytest.mark.parametrize(
    "options", [{"n": 4, "like": "H100"}, {"clock": "datasheet"}, {"like": "H100", "world_size": 8}]
)
def test_dry_run_has_other_gpus_beside_those_that_are_on(options):
    virtualgpu.gpus(2)
    here, machine = torch.arange(3.0, device="cuda:1"), virtualgpu.machine()
    with virtualgpu.dry_run(**options):
        assert virtualgpu.machine() is not machine
        assert torch.cuda.get_device_name(0) == ("NVIDIA H100 80GB HBM3" if "like" in options else "Tesla T4")
        torch.ones(3, device="cuda").sum()
    assert virtualgpu.machine() is machine and torch.cuda.memory_allocated(1) == 512
    assert (here + 1).tolist() == [1, 2, 3] and torch.cuda.get_device_name(1) == "Tesla T4"


def test_dry_run_does_not_quietly_use_other_gpus():
    virtualgpu.gpus(2)
    with virtualgpu.dry_run(2, like="T4"):
        assert torch.cuda.device_count() == 2
        with pytest.raises(ValueError, match="asks for other GPUs"), virtualgpu.dry_run(4, like="H100"):
            pass
    assert not virtualgpu.machine().dry


SETTINGS = [
    lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
    lambda on: torch.use_deterministic_algorithms(on, warn_only=True),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_dry_run_heeds_settings_that_change(setting):
    def results():
        x = torch.arange(3, device="cuda")
        return [(x / 2).dtype, torch.full((2,), 1.0, device="cuda").dtype, x.float().mean().dtype, x.sqrt().dtype]

    virtualgpu.gpus(1)
    with virtualgpu.dry_run():
        first = results()
        setting(True)
        try:
            dry = results()
            with dry_runs.set_here(False):
                with_numbers = results()
        finally:
            setting(False)
        assert dry == with_numbers and results() == first
        x = torch.ones(2, device="cuda")
        assert not (x + 1).is_inference()
        with torch.inference_mode():
            assert (x + 1).is_inference()
        assert not (x + 1).is_inference()


# -- errors and interruptions


def test_an_own_operation_that_raises_shows_its_frames(gpus):
    @torch.library.custom_op("virtualgpu_test::broken", mutates_args=())
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a mistake of mine")

    with pytest.raises(RuntimeError, match="a mistake of mine") as found:
        broken(torch.ones(2, device="cuda"))
    assert any(entry.name == "broken" for entry in found.traceback)


def test_an_optimizer_step_that_fails_ends_its_kind(gpus):
    """Adam's first step is where memory runs out; what follows is no optimizer's work."""
    virtualgpu.gpus(1, memory="64 MB")
    weight = torch.nn.Parameter(torch.zeros(6 << 20, device="cuda"))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    weight.grad = None
    gc.collect()
    with virtualgpu.recording() as spans:
        torch.ones(2, device="cuda") + 1
    assert {span.kind for span in spans} == {"forward"}


def test_a_gpu_used_before_a_fork_is_refused_after_it(gpus):
    code = """
import os, sys, torch, virtualgpu
virtualgpu.gpus(2)
x = torch.ones(2, device="cuda:1")
sys.stdout.flush()
if os.fork() == 0:
    for line in (lambda: x + 1, lambda: x.cpu(), lambda: repr(x), lambda: torch.ones(2, device="cuda"), lambda: torch.cuda.synchronize()):
        try:
            line(); print("nothing")
        except RuntimeError as error:
            print(str(error).splitlines()[0][:34])
    print(torch.ones(2).add(1).tolist(), flush=True)
    os._exit(0)
os.wait()
print((x + 1).tolist())
"""
    done = forks.run("-c", code)
    lines = done.stdout.splitlines()[1:]
    errors = ["CUDA error: initialization error"] * 3 + ["Cannot re-initialize CUDA in forke"] * 2  # as on an H100
    assert lines == [*errors, "[2.0, 2.0]", "[2.0, 2.0]"], done.stdout + done.stderr[-1500:]


def test_ctrl_c_in_an_operation_leaves_the_gpus_usable(gpus, ctrl_c):
    def interrupt(gradient):
        signal.raise_signal(signal.SIGINT)
        return gradient

    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert not gpus.local.bypass
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]


# -- GPUs that pass for real ones


@pytest.fixture
def as_real(monkeypatch):
    """as_real(n): so many T4s that the runner plays."""
    monkeypatch.setenv("HELPERS_GPUS", "real")
    yield lambda n: session.activate(find_specs(n, "T4", None))
    session.deactivate()
    assert session.current() is None


def test_beside_gpus_that_pass_for_real_ones_a_dry_run_has_its_own(as_real):
    """Real GPUs cannot do one, which a Monitor and a Timeline ask; and they are as they were, after it."""
    as_real(2)
    x = torch.ones(3, device="cuda:1")
    assert virtualgpu.machine() is None
    with virtualgpu.dry_run(3, like="A100"):
        torch.ones(3, device="cuda:2")
        assert virtualgpu.machine() is session.current()
        assert (torch.cuda.device_count(), torch.cuda.memory_allocated(1)) == (3, 0)
    for same in ({"n": 2}, {"like": "T4"}, {}):  # just as many, of the same card
        with virtualgpu.dry_run(**same):
            assert (torch.cuda.device_count(), torch.cuda.memory_allocated(1)) == (2, 0)
    assert (torch.cuda.device_count(), torch.cuda.memory_allocated(1)) == (2, 512)
    assert virtualgpu.machine() is None and (x + 1).device == ONE and x.sum() == 3


def test_more_gpus_than_the_runner_plays(as_real, capsys):
    """As where a notebook asks for two on a machine with one: `reset` turns off its own, twice if need be."""
    as_real(1)
    x = torch.ones(3, device="cuda:0")
    for _ in range(2):
        assert len(virtualgpu.gpus(2)) == 2 and len(virtualgpu.gpus(4, like="A100")) == 4
        assert torch.cuda.device_count() == 4 and torch.cuda.memory_allocated(0) == 0
        virtualgpu.reset()
        virtualgpu.reset()  # once more: real ones would stay, too
        assert (torch.cuda.device_count(), torch.cuda.memory_allocated(0), virtualgpu.machine()) == (1, 512, None)
        assert (x + 1).tolist() == [2, 2, 2]
    assert virtualgpu.gpus(1) == [torch.device("cuda:0")] and "1 real GPU" in capsys.readouterr().out
