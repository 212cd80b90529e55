"""What a stream keeps: nothing of the threads that enter it; and its priority, in CUDA's order."""

import threading

import torch


def test_two_threads_in_one_stream(gpus):
    """Each comes back to where it was before, whichever leaves first."""
    shared, own = torch.cuda.Stream(0), torch.cuda.Stream(0)
    inside, leave, found = threading.Event(), threading.Event(), []

    def other():
        torch.cuda.set_device(1)
        with torch.cuda.stream(own):
            shared.__enter__()
            inside.set()
            leave.wait(10)
            shared.__exit__(None, None, None)
            found.append((torch.cuda.current_device(), torch.cuda.current_stream(0)))

    thread = threading.Thread(target=other)
    default = torch.cuda.current_stream(0)
    shared.__enter__()
    thread.start()
    inside.wait(10)
    shared.__exit__(None, None, None)
    assert (torch.cuda.current_device(), torch.cuda.current_stream(0)) == (0, default)
    leave.set()
    thread.join()
    assert found == [(0, own)]


def test_one_stream_entered_twice(gpus):
    stream = torch.cuda.Stream(1)
    with stream:
        with stream:
            assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_device() == 0


def test_priorities_are_those_of_pytorchs_pools(gpus):
    assert torch.cuda.Stream.priority_range() == (0, -3)
    assert [torch.cuda.Stream(priority=p).priority for p in (2, 0, -1, -3, -9)] == [0, 0, -1, -3, -3]
    assert torch.cuda.default_stream().priority == 0
