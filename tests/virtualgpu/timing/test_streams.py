"""Streams of a GPU, by hand: what takes turns, what runs side by side, who waits for whom, and whose memory is whose.

`K` is the time of one matrix product, `C` that of one copy from or to pinned memory; dry runs, so that large ones cost nothing.
"""

import concurrent.futures
import itertools
import threading

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu.engine.machine import GAP

ZERO, ONE = torch.device("cuda:0"), torch.device("cuda:1")
MIB = 1 << 20


@pytest.fixture
def gpus():
    """A host that only launches: what is looked at is who waits for whom."""
    with virtualgpu.gpus(2, host="launch"):
        yield virtualgpu.machine()


@pytest.fixture
def dry(gpus):
    with virtualgpu.dry_run():
        yield gpus


def launch_time():
    from virtualgpu.timing.clock import LAUNCH

    return LAUNCH


class Bench:
    """A matrix product, copies, and what they take alone."""

    def __init__(self, machine, device="cuda:0"):
        self.clock, self.x = machine.clock, torch.ones(4096, 4096, device=device)
        self.pinned = torch.ones(4096, 4096).pin_memory()
        self.out = torch.empty_like(self.x)
        self.K = self.time(self.multiply)
        self.C = self.time(self.copy_in)

    def multiply(self):
        torch.mm(self.x, self.x, out=self.out)

    def copy_in(self):
        self.x.copy_(self.pinned, non_blocking=True)

    def copy_out(self):
        self.pinned.copy_(self.x, non_blocking=True)

    def time(self, *work):
        """Seconds from a GPU at rest to the end of all, without the first launch."""
        self.clock.wait()
        start = self.clock.host
        for part in work:
            part()
        self.clock.wait()
        return self.clock.host - start - launch_time()

    def on(self, stream, part):
        def run():
            with torch.cuda.stream(stream):
                part()

        return run


@pytest.fixture
def bench(dry):
    return Bench(dry)


def spans_of(*work):
    with virtualgpu.recording() as spans:
        for part in work:
            part()
    return list(spans)


# -- what takes turns, and what runs side by side


def test_kernels_of_two_streams_take_turns(bench):
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    both = bench.time(bench.on(one, bench.multiply), bench.on(other, bench.multiply))
    assert both == pytest.approx(2 * bench.K, rel=1e-3)
    spans = sorted(
        spans_of(*[bench.on(s, bench.multiply) for s in (one, other, one, None)]), key=lambda span: span.start
    )
    assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans))
    assert {span.stream for span in spans} == {one.stream_id, other.stream_id, 0}


def test_a_pinned_copy_runs_beside_kernels(bench):
    side = torch.cuda.Stream()
    assert bench.time(bench.multiply, bench.copy_in) == pytest.approx(bench.K + bench.C)  # one stream: in order
    beside = bench.time(bench.multiply, bench.on(side, bench.copy_in))
    assert beside == pytest.approx(max(bench.K, launch_time() + bench.C))
    kernel, copied = spans_of(bench.multiply, bench.on(side, bench.copy_in))
    assert copied.start == pytest.approx(kernel.start + launch_time()) and copied.kind == "copy"


def test_copies_in_and_out_run_beside_each_other(bench):
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    back = bench.time(bench.on(one, bench.copy_in), bench.on(other, bench.copy_out))
    assert back == pytest.approx(max(bench.C, launch_time() + bench.time(bench.copy_out)))
    same_way = bench.time(bench.on(one, bench.copy_in), bench.on(other, bench.copy_in))
    assert same_way == pytest.approx(2 * bench.C)


def test_a_pageable_copy_makes_the_host_wait(bench):
    side, pageable = torch.cuda.Stream(), torch.ones(4096, 4096)
    for copy in (lambda: bench.x.copy_(pageable, non_blocking=True), lambda: pageable.to("cuda", non_blocking=True)):
        start = bench.clock.host
        bench.on(side, copy)()
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


def test_two_gpus_do_not_take_turns(dry):
    first, second = Bench(dry), Bench(dry, "cuda:1")
    assert first.time(first.multiply, second.multiply) == pytest.approx(launch_time() + first.K, rel=1e-3)


def test_work_fills_an_earlier_gap(bench):
    """A stream that waits for a copy leaves the GPU to another."""
    waiting, free = torch.cuda.Stream(), torch.cuda.Stream()

    def behind_a_copy():
        bench.copy_in()
        bench.multiply()

    copied, late, early = spans_of(bench.on(waiting, behind_a_copy), bench.on(free, lambda: bench.out.zero_()))
    assert late.start == pytest.approx(copied.end + GAP) and early.start < copied.end and early.end <= late.start


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_utilization_never_exceeds_the_time(bench, streams):
    torch.cuda.utilization(), torch.cuda.synchronize()
    busy, start = bench.clock.busy[0], bench.clock.host
    for _ in range(4):
        for stream in [torch.cuda.Stream() for _ in range(streams)]:
            bench.on(stream, bench.multiply)()
            bench.on(stream, bench.copy_in)()
    torch.cuda.synchronize()
    assert 0 < bench.clock.busy[0] - busy <= bench.clock.host - start
    assert 50 < torch.cuda.utilization() <= 100


# -- waiting


def test_wait_stream_orders_two_streams(bench):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    (kernel,) = spans_of(bench.multiply)
    (beside,) = spans_of(bench.on(side, bench.copy_in))
    assert beside.start < kernel.end
    (kernel,) = spans_of(bench.multiply)
    side.wait_stream(torch.cuda.current_stream())
    (after,) = spans_of(bench.on(side, bench.copy_in))
    assert after.start == kernel.end
    (again,) = spans_of(bench.multiply)  # the other way round nothing waits
    assert again.start == pytest.approx(kernel.end + GAP)


def test_wait_event_waits_for_what_was_before_it(bench):
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    (first,) = spans_of(bench.multiply)
    event = main.record_event()
    (second,) = spans_of(bench.multiply)
    side.wait_event(event)
    (beside,) = spans_of(bench.on(side, bench.copy_in))
    assert beside.start == first.end and second.start == pytest.approx(first.end + GAP)
    third = torch.cuda.Stream()
    event.wait(third)
    (same,) = spans_of(bench.on(third, bench.copy_out))
    assert same.start == first.end
    torch.cuda.Event().wait(third)  # not recorded: nobody waits


def test_waiting_across_gpus(dry):
    first, second = Bench(dry), Bench(dry, "cuda:1")
    side = torch.cuda.Stream(ONE)
    (kernel,) = spans_of(first.multiply)
    side.wait_stream(torch.cuda.current_stream(ZERO))
    (after,) = spans_of(first.on(side, second.multiply))
    assert (after.gpu, after.stream) == (1, side.stream_id) and after.start == pytest.approx(kernel.end, abs=2 * GAP)


POLLED = {
    "event": lambda: torch.cuda.current_stream().record_event().query,
    "stream": lambda: torch.cuda.current_stream().query,
    "torch.Event": lambda: _recorded(torch.Event("cuda")).query,
    "torch.accelerator": lambda: torch.accelerator.current_stream().query,
    "timed": lambda: _recorded(torch.cuda.Event(enable_timing=True)).query,
}


def _recorded(event):
    event.record()
    return event


@pytest.mark.parametrize("mode", ["default", "error"])
@pytest.mark.parametrize("ask", POLLED.values(), ids=POLLED)
def test_who_asks_again_and_again_comes_to_the_end(bench, ask, mode):
    """Each time is a moment of the host, as it is on a GPU; to ask is not to wait."""
    query = ask()
    assert query()  # nothing is queued: at once, and at no time
    bench.multiply()
    before, query = bench.clock.host, ask()
    torch.cuda.set_sync_debug_mode(mode)
    polls = next((polls for polls in range(10_000) if query()), None)
    torch.cuda.set_sync_debug_mode("default")
    assert polls and bench.clock.host - before == pytest.approx(bench.K, rel=0.1)


def test_to_take_the_time_between_two_events_takes_none(bench):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    bench.multiply()
    end.record()
    before = bench.clock.host
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    assert bench.clock.host == before


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
    end.synchronize()
    assert end.query() and not side.query() and bench.clock.host - before == pytest.approx(bench.K, rel=1e-2)
    side.synchronize()
    assert side.query() and torch.cuda.current_stream().query()
    assert start.elapsed_time(end) == pytest.approx(1e3 * bench.K, rel=1e-2)


def test_synchronize_waits_for_every_stream(bench):
    side = torch.cuda.Stream()
    for wait in (torch.cuda.synchronize, torch.accelerator.synchronize, lambda: torch.cuda.synchronize("cuda:0")):
        bench.on(side, bench.multiply)()
        assert not side.query()
        wait()
        assert side.query()
    bench.on(side, bench.multiply)()
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

    class Other(torch.Stream):
        pass

    own = Own(device=1)
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
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    model, x = Recorder(streams).cuda(), torch.ones(32, 64, device="cuda", requires_grad=True)
    forward = spans_of(lambda: x.grad or setattr(model, "out", model(x)))
    backward = spans_of(lambda: model.out.sum().backward())
    ids = [stream.stream_id for stream in streams]
    assert [span.stream for span in forward if span.name == "addmm"] == ids
    products = [span for span in backward if span.name == "mm"]
    assert [span.stream for span in products] == [ids[1], ids[1], ids[0], ids[0]]  # two for each layer
    assert all(span.kind == "backward" for span in products)
    assert torch.equal(model.layers[1].bias.grad.cpu(), torch.full((64,), 32.0))


def test_gradients_wait_for_the_other_stream(gpus):
    """Each product of the backward pass starts after the one whose result it takes."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    model, x = Recorder(streams).cuda(), torch.ones(2048, 64, device="cuda", requires_grad=True)
    loss = model(x).sum()
    spans = [span for span in spans_of(loss.backward) if span.name == "mm"]
    upper, lower = (
        [span for span in spans if span.stream == streams[1].stream_id],
        [span for span in spans if span.stream == streams[0].stream_id],
    )
    assert min(span.start for span in lower) >= min(span.end for span in upper)


def test_after_backward_the_current_stream_goes_on_behind_it(gpus):
    side = torch.cuda.Stream()
    x = torch.ones(1500, 1500, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        loss = (x @ x).sum()
    torch.cuda.current_stream().wait_stream(side)
    backward = spans_of(loss.backward)
    assert {span.stream for span in backward if span.name == "mm"} == {side.stream_id}
    (after,) = spans_of(lambda: x.grad.zero_())
    assert after.stream == 0 and after.start >= max(span.end for span in backward)


def test_backward_called_on_a_side_stream(gpus):
    """Forward on the default stream: backward's kernels are there too, whichever stream calls it; and that one then waits."""
    side, x = torch.cuda.Stream(), torch.ones(1500, 1500, device="cuda", requires_grad=True)
    loss = (x @ x).sum()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        backward = spans_of(loss.backward)
        (after,) = spans_of(lambda: x.grad.zero_())
    assert {span.stream for span in backward if span.name == "mm"} == {0}
    assert after.stream == side.stream_id and after.start >= max(span.end for span in backward)


def test_gradients_equal_those_of_one_stream(gpus):
    def gradients(streams):
        torch.manual_seed(0)
        model = Recorder(streams).cuda()
        model(torch.randn(8, 64, device="cuda")).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    several = gradients([torch.cuda.Stream() for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(several, gradients([torch.cuda.current_stream()] * 3), strict=True))


# -- memory


def test_free_blocks_belong_to_a_stream(gpus):
    side, size = torch.cuda.Stream(), 4 * MIB
    x = torch.empty(size, device="cuda")
    address, reserved = x.data_ptr(), torch.cuda.memory_reserved()
    del x
    with torch.cuda.stream(side):
        y = torch.empty(size, device="cuda")
    assert y.data_ptr() != address and torch.cuda.memory_reserved() == 2 * reserved
    x = torch.empty(size, device="cuda")
    assert x.data_ptr() == address and torch.cuda.memory_reserved() == 2 * reserved
    there = y.data_ptr()
    del y
    with torch.cuda.stream(side):
        assert torch.empty(size, device="cuda").data_ptr() == there
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


def long_kernel(gpus, stream):
    y = torch.ones(2000, 2000, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y @ y
    return y


@pytest.mark.parametrize("recorded", [True, False])
def test_record_stream_defers_the_free(gpus, recorded):
    side, x = torch.cuda.Stream(), torch.empty(4 * MIB, device="cuda")
    y = long_kernel(gpus, side)
    address = x.data_ptr()
    if recorded:
        x.record_stream(side)
    del x
    early = torch.empty(4 * MIB, device="cuda")
    assert (early.data_ptr() == address) is not recorded
    side.synchronize()
    if recorded:
        late = torch.empty(4 * MIB, device="cuda")
        assert late.data_ptr() == address
    assert y.sum().item() == 4_000_000


def test_running_out_waits_for_deferred_frees():
    virtualgpu.gpus(1, memory="96 MB")
    gpus = virtualgpu.machine()
    side, x = torch.cuda.Stream(), torch.empty(12 * MIB, device="cuda")  # 48 of 96 MiB
    y = long_kernel(gpus, side)
    x.record_stream(side)
    del x
    assert not side.query()
    again = torch.empty(12 * MIB, device="cuda")
    assert side.query()  # the host has waited
    stats = torch.cuda.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"], stats["num_sync_all_streams"]) == (0, 1, 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(12 * MIB, device="cuda")
    assert again.numel() + y.numel() > 0


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
