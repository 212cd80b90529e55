"""Programs with streams. Each takes whether it waits as it should: `f(False)` has a race, and gives the same numbers here.

STREAMS: races that torch.cuda._sanitizer sees, too.
"""

import torch

N = 1 << 18


def current():
    return torch.cuda.current_stream()


def read_after_write(wait=True):
    side, x = torch.cuda.Stream(), torch.zeros(N, device="cuda")
    side.wait_stream(current())
    with torch.cuda.stream(side):
        x.add_(1)
    if wait:
        current().wait_stream(side)
    return (x * 2)[0].item()


def write_after_read(wait=True):
    side, x = torch.cuda.Stream(), torch.zeros(N, device="cuda")
    side.wait_stream(current())
    with torch.cuda.stream(side):
        y = x * 2
    if wait:
        current().wait_event(side.record_event())
    x.fill_(3)
    torch.cuda.synchronize()
    return y[0].item()


def write_after_write(wait=True):
    side, x = torch.cuda.Stream(), torch.empty(N, device="cuda")
    x.fill_(1)
    if wait:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        x.fill_(2)
    side.synchronize()
    return x[0].item()


def event_recorded_too_early(late=True):
    side, x, event = torch.cuda.Stream(), torch.zeros(N, device="cuda"), torch.cuda.Event()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        if not late:
            event.record()
        x.add_(1)
        if late:
            event.record()
    event.wait()
    return x.sum().item()


def copied_in_on_a_stream(wait=True):
    side, host = torch.cuda.Stream(), torch.ones(N).pin_memory()
    with torch.cuda.stream(side):
        x = host.to("cuda", non_blocking=True)
    if wait:
        current().wait_stream(side)
    return (x + 1).sum().item()


def by_way_of_a_third_stream(wait=True):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        x = torch.ones(N, device="cuda")
    if wait:
        second.wait_stream(first)
    current().wait_stream(second)
    return x.sum().item()


def of_lists(wait=True):
    side = torch.cuda.Stream()
    xs = [torch.ones(N, device="cuda") for _ in range(3)]
    if wait:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        torch._foreach_add_(xs, 1)
    side.synchronize()
    return xs[2][0].item()


def freed_while_in_use(record=True):
    side, x = torch.cuda.Stream(), torch.ones(N, device="cuda")
    side.wait_stream(current())
    with torch.cuda.stream(side):
        y = x * 2
    if record:
        x.record_stream(side)
    del x
    z = torch.full((N,), 7.0, device="cuda")
    torch.cuda.synchronize()
    return y[0].item() + z[0].item()


def freed_after_waiting(wait=True):
    side, x = torch.cuda.Stream(), torch.ones(N, device="cuda")
    side.wait_stream(current())
    with torch.cuda.stream(side):
        y = x * 2
    if wait:
        current().wait_stream(side)
    del x
    z = torch.full((N,), 7.0, device="cuda")
    torch.cuda.synchronize()
    return y[0].item() + z[0].item()


def made_on_one_stream_filled_on_another(wait=True):
    """The memory of `y` is that of `x`, which the default stream may still be reading."""
    side, x = torch.cuda.Stream(), torch.ones(N, device="cuda")
    z = x * 2
    del x
    y = torch.empty(N, device="cuda")
    if wait:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        y.fill_(5)
    torch.cuda.synchronize()
    return z[0].item() + y[0].item()


def gradient_made_on_another_stream(wait=True):
    """ "Stream semantics of backward passes" of PyTorch's notes has this one as unsafe."""
    side, w = torch.cuda.Stream(), torch.ones(N, device="cuda", requires_grad=True)
    y = w * 3
    with torch.cuda.stream(side):
        initial = torch.full((N,), 2.0, device="cuda")
    if wait:
        current().wait_stream(side)
    y.backward(gradient=initial)
    return w.grad[0].item()


def gradient_read_on_another_stream(wait=True):
    side, w = torch.cuda.Stream(), torch.ones(N, device="cuda", requires_grad=True)
    side.wait_stream(current())
    with torch.cuda.stream(side):
        pass
    (w * 3).sum().backward()
    if wait:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        return w.grad.sum().item()


def copied_to_the_other_gpu(wait=True):
    side, x = torch.cuda.Stream("cuda:1"), torch.ones(N, device="cuda:0")
    y = x.to("cuda:1")
    if wait:
        side.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(side):
        return (y + 1).sum().item()


def halves(disjoint=True):
    """Of one tensor, each on a stream of its own."""
    side, x = torch.cuda.Stream(), torch.zeros(64, 64, device="cuda")
    side.wait_stream(current())
    left, right = x[:, :32], x[:, 32 if disjoint else 31 :]
    with torch.cuda.stream(side):
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
    x = torch.ones(N, device="cuda")
    host = x.to("cpu", non_blocking=True)
    if wait:
        torch.cuda.synchronize()
    return host.sum().item()


def read_early_from_a_buffer(wait=True):
    x, host, event = torch.ones(N, device="cuda"), torch.empty(N).pin_memory(), torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    event.record()
    if wait:
        event.synchronize()
    return host.numpy()[0].item()


def read_early_as_a_list(wait=True):
    host = torch.ones(8, device="cuda").to("cpu", non_blocking=True)
    if wait:
        torch.cuda.current_stream().synchronize()
    return host.tolist()


def read_early_as_a_number(wait=True):
    host = torch.ones(8, device="cuda").to("cpu", non_blocking=True)
    if wait:
        torch.ones(1, device="cuda").item()  # the host waits for the stream
    return host[3].item()


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
    side, x = torch.cuda.Stream(), torch.ones(N, device="cuda")
    host = x.to("cpu", non_blocking=True)
    (current() if right else side).synchronize()
    return host.sum().item()


STREAMS = [
    read_after_write,
    write_after_read,
    write_after_write,
    event_recorded_too_early,
    copied_in_on_a_stream,
    by_way_of_a_third_stream,
    of_lists,
    gradient_made_on_another_stream,
    gradient_read_on_another_stream,
]
MEMORY = [freed_while_in_use, freed_after_waiting, made_on_one_stream_filled_on_another]
OTHERS = [copied_to_the_other_gpu, halves]
HOST = [
    source_overwritten,
    read_early,
    read_early_from_a_buffer,
    read_early_as_a_list,
    read_early_as_a_number,
    buffer_filled_again,
    waiting_for_another_stream,
]
