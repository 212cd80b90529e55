"""Each kind of race raises; its repaired twin stays silent, with the same numbers."""

import threading
import time

import pytest
import torch
from torch import nn

import virtualgpu
from tests.virtualgpu.sanitizer import programs
from virtualgpu.sanitizer import UnsynchronizedAccessError

ALL = [*programs.STREAMS, *programs.MEMORY, *programs.OTHERS, *programs.HOST]


def name(program):
    return program.__name__


@pytest.mark.parametrize("program", ALL, ids=name)
def test_a_race_raises(sanitize, program):
    with pytest.raises(UnsynchronizedAccessError, match="a race: "):
        program(False)


@pytest.mark.parametrize("program", ALL, ids=name)
def test_its_repaired_twin_is_silent(sanitize, program):
    program()


@pytest.mark.parametrize("program", [*programs.STREAMS, *programs.MEMORY, programs.read_early_as_a_number], ids=name)
def test_on_shapes_alone(sanitize, program):
    with virtualgpu.dry_run():
        program()
        with pytest.raises(UnsynchronizedAccessError):
            program(False)


@pytest.mark.parametrize("program", ALL, ids=name)
def test_off_nobody_is_told(program):
    """As before: the numbers are right."""
    virtualgpu.gpus(2)
    assert program is programs.halves or program(False) == program()


# -- ways to wait


@pytest.mark.parametrize(
    "wait",
    [
        lambda side, event: torch.cuda.synchronize(),
        lambda side, event: torch.accelerator.synchronize(),
        lambda side, event: side.synchronize(),
        lambda side, event: event.synchronize(),
        lambda side, event: event.wait(),
        lambda side, event: torch.cuda.current_stream().wait_event(event),
        lambda side, event: torch.cuda.default_stream().wait_stream(side),
    ],
)
def test_every_way_to_wait_counts(sanitize, wait):
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x = torch.ones(8, device="cuda")
        event.record()
    wait(side, event)
    assert (x + 1).sum().item() == 16


def test_what_query_has_seen_is_done(sanitize):
    side, event, x = torch.cuda.Stream(), torch.cuda.Event(), torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host = x.to("cpu", non_blocking=True)
        event.record()
    with pytest.raises(UnsynchronizedAccessError):
        host.sum()
    while not event.query():
        torch.ones(1, device="cuda")  # the host does something else meanwhile
    assert host.sum() == 8


def test_waiting_for_one_of_two_events_is_not_enough(sanitize):
    first, second, xs = torch.cuda.Stream(), torch.cuda.Stream(), []
    for stream in (first, second):
        with torch.cuda.stream(stream):
            xs.append(torch.ones(8, device="cuda"))
    first.synchronize()
    xs[0] + 1
    with pytest.raises(UnsynchronizedAccessError, match=f"on stream {second.stream_id} of cuda:0 may still be writing"):
        xs[1] + 1


def test_another_threads_waiting_counts(sanitize):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(8, device="cuda")
    thread = threading.Thread(target=side.synchronize)
    thread.start()
    thread.join()
    assert x.sum().item() == 8


def test_time_that_passes_is_no_waiting(sanitize):
    host = torch.ones(8, device="cuda").to("cpu", non_blocking=True)
    time.sleep(0.01)
    virtualgpu.machine().clock.wait_until(1.0)
    with pytest.raises(UnsynchronizedAccessError):
        host.sum()


# -- memory


def test_memory_handed_out_again_in_parts(sanitize):
    """The race is with the part that the other stream reads."""
    side, x = torch.cuda.Stream(), torch.ones(8 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    half = x[4 << 20 :]
    with torch.cuda.stream(side):
        y = half * 2
    del x, half
    first = torch.zeros(4 << 20, device="cuda")
    with pytest.raises(UnsynchronizedAccessError, match="may still be reading, of a tensor that was freed"):
        torch.zeros(4 << 20, device="cuda")
    assert y.numel() == first.numel()


def test_other_memory_is_other_memory(sanitize):
    side, x = torch.cuda.Stream(), torch.ones(4 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        del x
        z = torch.ones(4 << 20, device="cuda")  # of that stream's own blocks
        assert (y + z)[0].item() == 3


# -- the host


def test_pageable_memory_makes_the_host_wait(sanitize):
    x, host = torch.ones(8, device="cuda"), torch.empty(8)
    host.copy_(x, non_blocking=True)
    assert host.sum() == 8
    y = host.to("cuda", non_blocking=True)
    host.zero_()
    assert y.sum().item() == 8


def test_a_prefetcher_is_silent(sanitize):
    """Copies on a stream of their own, as NVIDIA's examples have it."""
    side, batches = torch.cuda.Stream(), [torch.full((64,), float(i)).pin_memory() for i in range(4)]

    def fetch(batch):
        with torch.cuda.stream(side):
            return batch.to("cuda", non_blocking=True)

    upcoming, total = fetch(batches[0]), 0.0
    for batch in [*batches[1:], None]:
        torch.cuda.current_stream().wait_stream(side)
        x = upcoming
        x.record_stream(torch.cuda.current_stream())
        upcoming = batch if batch is None else fetch(batch)
        total += (x * 2).sum().item()
    assert total == 64 * 2 * 6


def test_a_loader_with_pinned_batches_is_silent(sanitize):
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    loader = torch.utils.data.DataLoader(data, 4, pin_memory=True)
    assert sum(x.to("cuda", non_blocking=True).sum().item() for (x,) in loader) == 66


# -- autograd, DataParallel


def test_backward_on_several_streams_is_silent(sanitize):
    streams = [torch.cuda.Stream() for _ in range(3)]
    layers = nn.ModuleList([nn.Linear(64, 64) for _ in streams]).cuda()
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(3):
        x = torch.ones(8, 64, device="cuda")
        for layer, stream in zip(layers, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x = layer(x).relu()
            torch.cuda.current_stream().wait_stream(stream)
        x.square().sum().backward()
        nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert layers[0].weight.isfinite().all()


def test_data_parallel_is_silent(sanitize):
    model = nn.DataParallel(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(8, 16)).sum().backward()  # from the host: scattered on streams of their own
        optimizer.step()
        optimizer.zero_grad()


def test_a_race_in_a_replica_comes_through(sanitize):
    """DataParallel makes the error again, in the caller's thread, from its words."""

    class Forgets(nn.Module):
        def forward(self, x):
            with torch.cuda.stream(torch.cuda.Stream()):
                return x * 2

    with pytest.raises(UnsynchronizedAccessError, match=r"Caught UnsynchronizedAccessError in replica \d(.|\n)*a race"):
        nn.DataParallel(Forgets())(torch.ones(8, 16, device="cuda"))


def test_memory_given_back_has_been_waited_for(sanitize):
    """cudaFree waits for the GPU: what lay at those addresses is no matter of the next tensor there."""
    side = torch.cuda.Stream()
    x = torch.zeros(3 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x += 1
    address = x.data_ptr()
    del x
    torch.cuda.empty_cache()
    y = torch.zeros(3 << 20, device="cuda")
    assert y.data_ptr() == address
