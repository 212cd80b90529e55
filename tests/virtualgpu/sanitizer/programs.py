"""Programs with streams. Each takes whether it waits as it should: `f(False)` has a race, and gives the same numbers here."""

import contextlib
import threading
import time

import torch
from torch import nn

import virtualgpu

N = 1 << 18


def current():
    return torch.cuda.current_stream()


@contextlib.contextmanager
def beside(waits=True, then=False):
    """On a stream of its own, which waits for the current one; and then the current one for it."""
    here, side = current(), torch.cuda.Stream()
    if waits:
        side.wait_stream(here)
    with torch.cuda.stream(side):
        yield side
    if then:
        here.wait_stream(side)


def ones(n=N, device="cuda"):
    return torch.ones(n, device=device)


def read_after_write(wait=True):
    x = torch.zeros(N, device="cuda")
    with beside(then=wait):
        x.add_(1)
    return (x * 2)[0].item()


def write_after_read(wait=True):
    x = torch.zeros(N, device="cuda")
    with beside() as side:
        y = x * 2
    if wait:
        current().wait_event(side.record_event())
    x.fill_(3)
    torch.cuda.synchronize()
    return y[0].item()


def write_after_write(wait=True):
    x = torch.empty(N, device="cuda").fill_(1)
    with beside(wait) as side:
        x.fill_(2)
    side.synchronize()
    return x[0].item()


def event_recorded_too_early(late=True):
    x, event = torch.zeros(N, device="cuda"), torch.cuda.Event()
    with beside():
        if not late:
            event.record()
        x.add_(1)
        if late:
            event.record()
    event.wait()
    return x.sum().item()


def copied_in_on_a_stream(wait=True):
    host = torch.ones(N).pin_memory()
    with beside(False, wait):
        x = host.to("cuda", non_blocking=True)
    return (x + 1).sum().item()


def by_way_of_a_third_stream(wait=True):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        x = ones()
    if wait:
        second.wait_stream(first)
    current().wait_stream(second)
    return x.sum().item()


def of_lists(wait=True):
    xs = [ones() for _ in range(3)]
    with beside(wait) as side:
        torch._foreach_add_(xs, 1)
    side.synchronize()
    return xs[2][0].item()


def freed_while_in_use(record=True):
    x = ones()
    with beside() as side:
        y = x * 2
    if record:
        x.record_stream(side)
    del x
    z = torch.full((N,), 7.0, device="cuda")
    torch.cuda.synchronize()
    return y[0].item() + z[0].item()


def freed_after_waiting(wait=True):
    x = ones()
    with beside(then=wait):
        y = x * 2
    del x
    z = torch.full((N,), 7.0, device="cuda")
    torch.cuda.synchronize()
    return y[0].item() + z[0].item()


def freed_in_parts(wait=True):
    """The race is with the part that the other stream reads."""
    x = ones(8 << 20)
    half = x[4 << 20 :]
    with beside(then=wait):
        y = half * 2
    del x, half
    first, second = torch.zeros(4 << 20, device="cuda"), torch.zeros(4 << 20, device="cuda")
    torch.cuda.synchronize()
    return y[0].item() + first[0].item() + second[0].item()


def made_on_one_stream_filled_on_another(wait=True):
    """The memory of `y` is that of `x`, which the default stream may still be reading."""
    x = ones()
    z = x * 2
    del x
    y = torch.empty(N, device="cuda")
    with beside(wait):
        y.fill_(5)
    torch.cuda.synchronize()
    return z[0].item() + y[0].item()


def gradient_made_on_another_stream(wait=True):
    """ "Stream semantics of backward passes" of PyTorch's notes has this one as unsafe."""
    w = ones().requires_grad_()
    y = w * 3
    with beside(False, wait):
        initial = torch.full((N,), 2.0, device="cuda")
    y.backward(gradient=initial)
    return w.grad[0].item()


def gradient_read_on_another_stream(wait=True):
    side, w = torch.cuda.Stream(), ones().requires_grad_()
    (w * 3).sum().backward()
    if wait:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        return w.grad.sum().item()


def copied_to_the_other_gpu(wait=True):
    side, x = torch.cuda.Stream("cuda:1"), ones(device="cuda:0")
    y = x.to("cuda:1")
    if wait:
        side.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(side):
        return (y + 1).sum().item()


def halves(disjoint=True):
    """Of one tensor, each on a stream of its own."""
    x = torch.zeros(64, 64, device="cuda")
    left, right = x[:, :32], x[:, 32 if disjoint else 31 :]
    with beside():
        left.add_(1)
    right.add_(2)
    torch.cuda.synchronize()
    return x.sum().item()


def source_overwritten(wait=True):
    host = torch.ones(N).pin_memory()
    x = host.to("cuda", non_blocking=True)
    if wait:
        current().synchronize()
    host.zero_()
    return x.sum().item()


def read_early(wait=True):
    host = ones().to("cpu", non_blocking=True)
    if wait:
        torch.cuda.synchronize()
    return host.sum().item()


def read_early_from_a_buffer(wait=True):
    x, host, event = ones(), torch.empty(N).pin_memory(), torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    event.record()
    if wait:
        event.synchronize()
    return host.numpy()[0].item()


def read_early_as_a_list(wait=True):
    host = ones(8).to("cpu", non_blocking=True)
    if wait:
        current().synchronize()
    return host.tolist()


def read_early_as_a_number(wait=True):
    host = ones(8).to("cpu", non_blocking=True)
    if wait:
        ones(1).item()  # the host waits for the stream
    return host[3].item()


def read_early_though_time_has_passed(wait=True):
    host = ones(8).to("cpu", non_blocking=True)
    time.sleep(0.01)
    virtualgpu.machine().clock.wait_until(1.0)
    if wait:
        torch.cuda.synchronize()
    return host.sum().item()


def buffer_filled_again(wait=True):
    """A ring of one pinned buffer: the copy of the last step must be done."""
    host, total = torch.empty(N).pin_memory(), 0.0
    for step in range(3):
        host.fill_(step)
        x, done = host.to("cuda", non_blocking=True), torch.cuda.Event()
        done.record()
        total += 1
        if wait:
            done.synchronize()
    return total + x[0].item()


def waiting_for_another_stream(right=True):
    side, host = torch.cuda.Stream(), ones().to("cpu", non_blocking=True)
    (current() if right else side).synchronize()
    return host.sum().item()


def waiting_for_one_of_two_events(both=True):
    first, second, xs = torch.cuda.Stream(), torch.cuda.Stream(), []
    for stream in (first, second):
        with torch.cuda.stream(stream):
            xs.append(ones(8))
    for stream in (first, second) if both else (first,):
        stream.synchronize()
    return (xs[0] + 1).sum().item() + (xs[1] + 1).sum().item()


# -- what needs no waiting for


def pageable_memory():
    """The host waits for it."""
    x, host = ones(8), torch.empty(8)
    host.copy_(x, non_blocking=True)
    assert host.sum() == 8
    y = host.to("cuda", non_blocking=True)
    host.zero_()
    assert y.sum().item() == 8


def other_memory():
    """Of that stream's own blocks."""
    x = ones(4 << 20)
    with beside():
        y = x * 2
        del x
        assert (y + ones(4 << 20))[0].item() == 3


def memory_given_back():
    """cudaFree waits for the GPU: what lay at those addresses is no matter of the next tensor there."""
    x = torch.zeros(3 << 20, device="cuda")
    with beside():
        x += 1
    address = x.data_ptr()
    del x
    torch.cuda.empty_cache()
    y = torch.zeros(3 << 20, device="cuda")
    assert y.data_ptr() == address


def prefetcher():
    """Copies on a stream of their own, as NVIDIA's examples have it."""
    side, batches = torch.cuda.Stream(), [torch.full((64,), float(i)).pin_memory() for i in range(4)]

    def fetch(batch):
        with torch.cuda.stream(side):
            return batch.to("cuda", non_blocking=True)

    upcoming, total = fetch(batches[0]), 0.0
    for batch in [*batches[1:], None]:
        current().wait_stream(side)
        x = upcoming
        x.record_stream(current())
        upcoming = batch if batch is None else fetch(batch)
        total += (x * 2).sum().item()
    assert total == 64 * 2 * 6


def loader_with_pinned_batches():
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    loader = torch.utils.data.DataLoader(data, 4, pin_memory=True)
    assert sum(x.to("cuda", non_blocking=True).sum().item() for (x,) in loader) == 66


def another_threads_waiting():
    with beside(False) as side:
        x = ones(8)
    thread = threading.Thread(target=side.synchronize)
    thread.start()
    thread.join()
    assert x.sum().item() == 8


def backward_on_several_streams():
    streams = [torch.cuda.Stream() for _ in range(3)]
    layers = nn.ModuleList([nn.Linear(64, 64) for _ in streams]).cuda()
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(3):
        x = torch.ones(8, 64, device="cuda")
        for layer, stream in zip(layers, streams, strict=True):
            stream.wait_stream(current())
            with torch.cuda.stream(stream):
                x = layer(x).relu()
            current().wait_stream(stream)
        x.square().sum().backward()
        nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert layers[0].weight.isfinite().all()


def data_parallel():
    """From the host: scattered on streams of their own."""
    model = nn.DataParallel(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(8, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


FREED = "may still be reading, of a tensor that was freed"
WRITING = "may still be writing"
RACES = {  # and what is said of each
    read_after_write: f"on the default stream of cuda:0 reads what aten::add_.Tensor on stream 3 of cuda:0 {WRITING}",
    write_after_read: "may still be reading",
    write_after_write: WRITING,
    event_recorded_too_early: WRITING,
    copied_in_on_a_stream: WRITING,
    by_way_of_a_third_stream: WRITING,
    of_lists: WRITING,
    freed_while_in_use: FREED,
    freed_after_waiting: FREED,
    freed_in_parts: FREED,
    made_on_one_stream_filled_on_another: "of a tensor that was freed",
    gradient_made_on_another_stream: WRITING,
    gradient_read_on_another_stream: WRITING,
    copied_to_the_other_gpu: WRITING,
    halves: WRITING,
    source_overwritten: "the host (aten::zero_) overwrites what",
    read_early: "the host (aten::sum) reads what",
    read_early_from_a_buffer: "the host (Tensor.numpy) reads what",
    read_early_as_a_list: "the host (Tensor.tolist) reads what",
    read_early_as_a_number: "the host (aten::_local_scalar_dense) reads what",
    read_early_though_time_has_passed: "the host (aten::sum) reads what",
    buffer_filled_again: "the host (aten::fill_.Scalar) overwrites what",
    waiting_for_another_stream: "the host (aten::sum) reads what",
    waiting_for_one_of_two_events: WRITING,
}
SILENT = [pageable_memory, other_memory, memory_given_back, prefetcher, loader_with_pinned_batches, another_threads_waiting,
          backward_on_several_streams, data_parallel]  # fmt: skip
