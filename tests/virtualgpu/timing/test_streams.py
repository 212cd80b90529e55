"""Streams of a GPU: what takes turns, what runs side by side, who waits for whom, and whose memory is whose.

Dry runs, so that large kernels cost nothing, under a host that only launches: what is looked at is who waits for whom.
"""

import concurrent.futures
import re
import threading

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu.engine.machine import GAP
from virtualgpu.timing.clock import LAUNCH

ZERO, ONE = torch.device("cuda:0"), torch.device("cuda:1")
MIB = 1 << 20


@pytest.fixture
def gpus():
    with virtualgpu.gpus(2, host="launch"):
        yield virtualgpu.machine()


@pytest.fixture
def dry(gpus):
    with virtualgpu.dry_run():
        yield gpus


class Bench:
    """A matrix product and copies, each on a stream of either GPU."""

    def __init__(self, machine):
        self.clock, self.streams, self.events = machine.clock, {}, {}
        self.x = [torch.ones(4096, 4096, device=device) for device in (ZERO, ONE)]
        self.out, self.pinned = [torch.empty_like(x) for x in self.x], torch.ones(4096, 4096).pin_memory()
        self.K, self.C, self.O = (self.alone(work) for work in ("mul", "in", "out"))

    def multiply(self, gpu=0):
        torch.mm(self.x[gpu], self.x[gpu], out=self.out[gpu])

    def launch(self, stream, work: str):
        with torch.cuda.stream(stream):
            gpu = stream.device_index
            if work == "mul":
                self.multiply(gpu)
            elif work == "zero":
                self.out[gpu].zero_()
            elif work == "in":
                self.x[gpu].copy_(self.pinned, non_blocking=True)
            else:
                self.pinned.copy_(self.x[gpu], non_blocking=True)

    def alone(self, work: str) -> float:
        """Seconds."""
        (span,) = spans_of(lambda: self.launch(self.stream("main"), work))
        self.clock.wait()
        return span.end - span.start

    def stream(self, name: str):
        """main: the default one; s1: of the second GPU; g and h: of a higher priority, and of one higher still."""
        gpu = int(name.endswith("1"))
        if name not in self.streams:
            made = torch.cuda.Stream(gpu, priority={"g": -1, "h": -2}.get(name[0], 0))
            self.streams[name] = torch.cuda.default_stream(gpu) if name.startswith("main") else made
        return self.streams[name]

    def play(self, script: str) -> dict:
        """What was launched, by its name."""
        names = []
        for name in re.findall(r"=(\w+)\.", script):
            self.stream(name)  # what is queued before the first stream with a priority is not moved
        self.clock.wait()
        with virtualgpu.recording() as spans:
            for step in script.split():
                first, sign, second, work = re.fullmatch(r"(\w*)(=|<|@|~)(\w+)(?:\.(\w+))?", step).groups()
                if sign == "=":  # a=s.mul: a product on stream s
                    names.append(first)
                    self.launch(self.stream(second), work)
                elif sign == "@":  # e@s: an event is recorded on it
                    self.events[first] = self.stream(second).record_event()
                elif sign == "~":  # the host waits for it
                    self.stream(second).synchronize()
                elif second in self.events:  # s<e: it waits for that
                    self.stream(first).wait_event(self.events[second])
                else:  # s<t: for all that the other has
                    self.stream(first).wait_stream(self.stream(second))
        return dict(zip(names, spans, strict=True))


@pytest.fixture
def bench(dry):
    return Bench(dry)


def spans_of(*work):
    with virtualgpu.recording() as spans:
        for part in work:
            part()
    return list(spans)


# K: the seconds of one product; C, O: of a copy from and to pinned memory; L: of a launch
SCRIPTS = """
kernels of two streams take turns         | a=s.mul b=t.mul | b.start == a.end, a.end - a.start == K
also where they go back and forth         | a=s.mul b=t.mul c=s.mul d=main.mul | a.end <= b.start, b.end <= c.start, c.end <= d.start
one stream is in order                    | a=main.mul b=main.in | b.start == a.end
a pinned copy runs beside kernels         | a=main.mul b=s.in | b.start == a.start + L, b.start < a.end, b.end - b.start == C
copies in and out run beside each other   | a=s.in b=t.out | b.start == a.start + L, b.end - b.start == O
copies of one way do not                  | a=s.in b=t.in | b.start == a.end
two GPUs do not take turns                | a=main.mul b=main1.mul | b.start < a.start + 3 * L
work fills an earlier gap                 | a=s.in b=s.mul c=t.zero | b.start == a.end + GAP, c.start < a.end, c.end <= b.start
what was waited for before does not count | s<main a=main.mul b=s.in | b.start < a.end
a stream waits for another                | a=main.mul s<main b=s.in | b.start == a.end
and not the other way round               | a=main.mul s<main b=s.in c=main.mul | b.start == a.end, c.start == a.end + GAP
an event is what was before it            | a=main.mul e@main b=main.mul s<e c=s.in | c.start == a.end, b.start == a.end + GAP
of each stream that waits for it          | a=main.mul e@main b=main.mul s<e t<e c=s.in d=t.out | c.start == a.end, d.start == a.end
a kernel goes before what has not begun   | a=s.mul b=s.mul c=s.mul d=g.mul e@s t<e f=t.in | d.start == a.end, b.start == d.end, c.start == b.end, f.start == c.end
before what has a lower priority alone    | a=g.mul b=g.mul c=g0.mul d=h.mul | d.start == a.end, b.start == d.end, c.start == b.end
what is over stays                        | a=s.mul b=s.mul ~s c=g.mul | b.start == a.end + GAP, c.start >= b.end
streams wait across GPUs                  | a=main.mul s1<main b=s1.mul | b.start >= a.end, b.start <= a.end + 2 * GAP
"""
ROWS = [[part.strip() for part in row.split("|")] for row in SCRIPTS.strip().splitlines()]


@pytest.mark.parametrize(("name", "script", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_who_starts_when(bench, name, script, expected):
    spans = bench.play(script)
    names = spans | {"K": bench.K, "C": bench.C, "O": bench.O, "L": LAUNCH, "GAP": GAP}
    for condition in expected.split(", "):
        left, sign, right = re.fullmatch(r"(.+) (==|<=|<|>=) (.+)", condition).groups()
        difference = eval(left, names) - eval(right, names)
        met = {"==": abs(difference) < 1e-9, "<": difference < 0, "<=": difference < 1e-9, ">=": difference > -1e-9}
        assert met[sign], (condition, difference)
    for span, step in zip(spans.values(), re.findall(r"=(\w+)\.", script), strict=True):
        assert (span.gpu, span.stream) == (int(step.endswith("1")), bench.stream(step).stream_id)


def test_what_was_not_recorded_keeps_nobody_waiting(bench):
    torch.cuda.Event().wait(bench.stream("s"))
    assert bench.stream("s").query()


def test_a_pageable_copy_makes_the_host_wait(bench):
    side, pageable = torch.cuda.Stream(), torch.ones(4096, 4096)
    for copy in (lambda: bench.x[0].copy_(pageable, non_blocking=True), lambda: pageable.to("cuda", non_blocking=True)):
        start = bench.clock.host
        with torch.cuda.stream(side):
            copy()
        assert bench.clock.host - start >= bench.C  # whatever non_blocking says


def test_a_sleep_leaves_the_gpu_to_others(gpus):
    """The kernel of torch.cuda._sleep is one thread: two streams sleep at the same time, and work beside it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]
    begin.record()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    alone = 10_000_000 / virtualgpu.machine().gpus[0].spec.clock * 1e3
    assert alone <= begin.elapsed_time(end) < 1.1 * alone


@pytest.mark.parametrize("streams", [1, 5])
def test_utilization_never_exceeds_the_time(bench, streams):
    torch.cuda.utilization(), torch.cuda.synchronize()
    busy, start = bench.clock.busy[0], bench.clock.host
    for _ in range(4):
        bench.play(" ".join(f"a=s{number}0.mul b=s{number}0.in" for number in range(streams)))
    torch.cuda.synchronize()
    assert 0 < bench.clock.busy[0] - busy <= bench.clock.host - start
    assert 50 < torch.cuda.utilization() <= 100


# -- waiting


POLLED = {
    "event": lambda: torch.cuda.current_stream().record_event().query,
    "stream": lambda: torch.cuda.current_stream().query,
    "torch.accelerator": lambda: torch.accelerator.current_stream().query,
    "timed": lambda: _recorded(torch.cuda.Event(enable_timing=True)).query,
}


def _recorded(event):
    event.record()
    return event


@pytest.mark.parametrize("ask", POLLED.values(), ids=POLLED)
def test_who_asks_again_and_again_comes_to_the_end(bench, ask):
    """Each time is a moment of the host, as it is on a GPU; to ask is not to wait, which that mode would refuse."""
    query = ask()
    assert query()  # nothing is queued: at once, and at no time
    bench.multiply()
    before, query = bench.clock.host, ask()
    torch.cuda.set_sync_debug_mode("error")
    polls = next((polls for polls in range(10_000) if query()), None)
    torch.cuda.set_sync_debug_mode("default")
    assert polls and bench.clock.host - before == pytest.approx(bench.K, rel=0.1)


def test_events_and_streams_are_asked_and_waited_for(bench):
    side = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    assert side.query() and start.query()
    with torch.cuda.stream(side):
        start.record()
        bench.multiply()
        end.record()
        bench.multiply()
    assert not side.query() and not end.query() and (start.device, end.device) == (ZERO, ZERO)
    before = bench.clock.host
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    assert bench.clock.host == before, "to ask for it takes no time"
    end.synchronize()
    assert end.query() and not side.query() and bench.clock.host - before == pytest.approx(bench.K, rel=1e-2)
    side.synchronize()
    assert side.query() and torch.cuda.current_stream().query()
    assert start.elapsed_time(end) == pytest.approx(1e3 * bench.K, rel=1e-2)
    for event, words in (
        (torch.cuda.Event(), "enable_timing=True"),
        (torch.cuda.Event(enable_timing=True), "must be recorded"),
    ):
        with pytest.raises(ValueError, match=words):
            event.elapsed_time(end)


def test_synchronize_waits_for_every_stream(bench):
    side = bench.stream("s")
    for wait in (torch.cuda.synchronize, torch.accelerator.synchronize, lambda: torch.cuda.synchronize("cuda:0")):
        bench.play("a=s.mul")
        assert not side.query()
        wait()
        assert side.query()
    bench.play("a=s.mul")
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize(1)
    assert not side.query()


def test_reading_a_value_waits_for_the_current_stream_alone(gpus):
    side, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    y = torch.ones(2000, 2000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        y @ y
    assert x[0].item() == 1 and not side.query()
    with torch.cuda.stream(side):
        x[0].item()
    assert side.query()


# -- which stream is current


def test_with_a_stream(gpus):
    side, other = torch.cuda.Stream(), torch.cuda.Stream(ONE)
    default = torch.cuda.current_stream()
    assert default == torch.cuda.default_stream() and default.stream_id == 0 and default.cuda_stream == 0
    with side:
        assert torch.cuda.current_stream() == side and torch.cuda.current_device() == 0
        with torch.cuda.stream(other):
            assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == other
            assert torch.cuda.current_stream(0) == side and torch.ones(1, device="cuda").device == ONE
            with side, side:  # again, and twice
                assert torch.cuda.current_device() == 0 and torch.cuda.current_stream(ONE) == other
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0 and torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
        with pytest.raises(ZeroDivisionError), torch.cuda.stream(other):
            raise ZeroDivisionError
        assert torch.cuda.current_stream() == side
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == side
        with torch.cuda.device(1):
            assert torch.cuda.current_stream() == torch.cuda.default_stream(1)
    assert torch.cuda.current_stream() == default


def test_set_stream_stays(gpus):
    side = torch.cuda.Stream(ONE)
    torch.cuda.set_stream(side)
    assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == side
    (span,) = spans_of(lambda: torch.ones(2, device="cuda"))
    assert (span.gpu, span.stream) == (1, side.stream_id)
    torch.cuda.set_stream(torch.cuda.default_stream(0))
    assert torch.cuda.current_device() == 0 and torch.cuda.current_stream(1) == side


def test_each_thread_has_its_current_stream(gpus):
    side, found = torch.cuda.Stream(), []

    def work(stream):
        found.append(torch.cuda.current_stream() == torch.cuda.default_stream())
        torch.cuda.set_stream(stream)
        found.append(torch.cuda.current_stream() == stream)

    torch.cuda.set_stream(side)
    thread = threading.Thread(target=work, args=(torch.cuda.Stream(),))
    thread.start()
    thread.join()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(work, torch.cuda.Stream()).result()
    assert found == [True] * 4 and torch.cuda.current_stream() == side


def test_kinds_of_stream(gpus):
    side = torch.cuda.Stream(priority=-1)
    assert isinstance(side, torch.cuda.Stream) and isinstance(side, torch.Stream) and side.priority == -1
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream) and not isinstance(3, torch.Stream)
    assert isinstance(torch.Stream("cuda:1"), torch.Stream) and torch.Stream(device=ONE).device == ONE
    assert torch.cuda.Stream("cuda:1").device == torch.cuda.Stream(1).device == ONE and side.device_index == 0

    class Own(torch.cuda.Stream):
        def twice(self):
            return 2 * self.stream_id

    own, Other = Own(device=1), type("Other", (torch.Stream,), {})
    assert isinstance(own, torch.cuda.Stream) and own.twice() == 2 * own.stream_id and own.device == ONE
    with own:
        assert torch.cuda.current_stream() == own
    assert issubclass(Own, torch.cuda.Stream) and issubclass(Own, torch.Stream) and issubclass(Other, torch.Stream)
    low, high = torch.cuda.Stream.priority_range()
    assert low == 0 > high
    assert torch.cuda.Stream(stream_id=own.stream_id, device_index=1, device_type=1) == own != side
    assert hash(torch.cuda.ExternalStream(own.cuda_stream, device=1)) == hash(own) and len({own, own}) == 1
    made = [torch.cuda.Stream() for _ in range(33)]
    assert len({stream.stream_id for stream in made}) == 32 and made[32] == made[0]  # PyTorch's pool


def test_kinds_of_event(gpus):
    event = torch.cuda.Event()
    assert isinstance(event, torch.cuda.Event) and isinstance(event, torch.Event)
    generic = torch.Event("cuda", enable_timing=True)
    torch.cuda.current_stream(ONE).record_event(event)
    generic.record(torch.cuda.Stream())
    assert event.device == ONE and generic.query() in (True, False)
    event.synchronize()
    assert event.query()
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(torch.cuda.Stream(ZERO))


def test_the_accelerators_names(gpus):
    side = torch.Stream("cuda:1")
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == torch.cuda.current_device() == 1
        torch.accelerator.set_stream(side)
        assert torch.accelerator.current_stream() == side == torch.cuda.current_stream()
    assert torch.accelerator.current_device_index() == 0 and torch.accelerator.current_stream(1) == side
    torch.accelerator.set_device_index(1)
    assert torch.cuda.current_device() == 1 and torch.accelerator.current_stream() == side
    with torch.accelerator.device_index(None):
        assert torch.cuda.current_device() == 1
    torch.accelerator.synchronize(0)


# -- the backward pass


class Recorder(nn.Module):
    def __init__(self, streams):
        super().__init__()
        self.layers, self.streams = nn.ModuleList([nn.Linear(64, 64) for _ in streams]), streams

    def forward(self, x):
        for layer, stream in zip(self.layers, self.streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x = layer(x)
            torch.cuda.current_stream().wait_stream(stream)
        return x


def test_backward_runs_on_the_streams_of_forward(gpus):
    """And each product of it after the one whose result it takes."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    model, x = Recorder(streams).cuda(), torch.ones(2048, 64, device="cuda", requires_grad=True)
    forward = spans_of(lambda: setattr(model, "out", model(x)))
    backward = spans_of(lambda: model.out.sum().backward())
    ids = [stream.stream_id for stream in streams]
    assert [span.stream for span in forward if span.name == "addmm"] == ids
    products = [span for span in backward if span.name == "mm"]
    assert [span.stream for span in products] == [ids[1], ids[1], ids[0], ids[0]]  # two for each layer
    assert all(span.kind == "backward" for span in products)
    assert min(span.start for span in products[2:]) >= min(span.end for span in products[:2])
    assert torch.equal(model.layers[1].bias.grad.cpu(), torch.full((64,), 2048.0))


@pytest.mark.parametrize("caller", ["default", "side"])
def test_backward_runs_where_forward_did_and_its_caller_waits(gpus, caller):
    """Whichever stream calls it goes on behind it."""
    side, default = torch.cuda.Stream(), torch.cuda.default_stream()
    calls, forward = (default, side) if caller == "default" else (side, default)
    x = torch.ones(1500, 1500, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        loss = (x @ x).sum()
    with torch.cuda.stream(calls):
        calls.wait_stream(forward)
        backward = spans_of(loss.backward)
        (after,) = spans_of(lambda: x.grad.zero_())
    assert {span.stream for span in backward if span.name == "mm"} == {forward.stream_id}
    assert after.stream == calls.stream_id and after.start >= max(span.end for span in backward)


# -- memory


def place(size=4 * MIB) -> int:
    """Where a new block lies."""
    return torch.empty(size, device="cuda").data_ptr()


@pytest.mark.parametrize("recorded", [True, False])
def test_free_blocks_belong_to_a_stream(gpus, recorded):
    """And one that another stream uses is free when that one is done with it."""
    side, y, first = torch.cuda.Stream(), torch.ones(2000, 2000, device="cuda"), place()
    with torch.cuda.stream(side):
        assert (there := place()) != first and there == place()
        side.wait_stream(torch.cuda.default_stream())
        y @ y
    x = torch.empty(4 * MIB, device="cuda")
    assert x.data_ptr() == first
    if recorded:
        x.record_stream(side)
    del x
    early = torch.empty(4 * MIB, device="cuda")
    assert (early.data_ptr() == first) is not recorded
    side.synchronize()
    assert not recorded or place() == first
    assert y.sum().item() == 4_000_000


# -- who uses none


def test_one_stream_is_as_without_them(gpus):
    """The default stream's times do not change because a stream was made."""

    def times():
        clock = virtualgpu.machine().clock
        torch.cuda.synchronize()
        start = clock.host
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
        for _ in range(2):
            model(torch.ones(8, 64, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        return clock.host - start

    plain = times()
    side = torch.cuda.Stream()
    assert times() == pytest.approx(plain)
    with torch.cuda.stream(side):
        torch.ones(1, device="cuda")
    assert times() == pytest.approx(plain)


def test_a_callback_at_the_end_of_a_backward_pass_keeps_its_stream(dry):
    """FSDP2 reduces the root's gradients there."""
    side, current = torch.cuda.Stream(), []

    def end():
        with torch.cuda.stream(side):
            current.append(torch.cuda.current_stream())
        current.append(torch.cuda.current_stream())

    def begin(gradient):
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return gradient

    x = torch.ones(4, device=ZERO, requires_grad=True)
    y = x * 2
    y.register_hook(begin)
    y.sum().backward()
    assert current == [side, torch.cuda.default_stream()]
