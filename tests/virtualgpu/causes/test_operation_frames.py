"""Recorded memory names the operation that asked for it, where C++ frames are recorded too."""

import torch


def allocations(stacks):
    """The frames of what a product and its backward pass allocate."""
    x = torch.rand(64, 32, device="cuda", requires_grad=True)
    w = torch.rand(32, 16, device="cuda")
    torch.cuda.memory._record_memory_history(stacks=stacks)
    try:
        (x @ w).sum().backward()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return [event["frames"] for event in events if event["action"] == "alloc" and event["size"] == 64 * 32 * 4]


def test_the_operation_comes_first(gpus):
    (frames,) = allocations("all")
    assert frames[0] == {"name": "at::_ops::mm::call", "filename": "??", "line": 0}
    assert any(frame["name"] == "backward" for frame in frames)
    assert frames[-1]["line"] > 0


def test_python_alone(gpus):
    (frames,) = allocations("python")
    assert not any("::" in frame["name"] for frame in frames)
    assert any(frame["name"] == "backward" for frame in frames)
