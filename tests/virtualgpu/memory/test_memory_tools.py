"""Out of memory is decided before the host allocates; every figure, and what tools ask, by PyTorch's own names."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu

MIB, GIB = 1 << 20, 1 << 30


# -- more than the GPU has


BEYOND = {
    "empty": lambda: torch.empty(1 << 40, device="cuda"),
    "zeros": lambda: torch.zeros(1 << 40, device="cuda"),
    "zeros of two sizes": lambda: torch.zeros(1 << 20, 1 << 20, device="cuda"),
    "ones, half": lambda: torch.ones((1 << 40,), dtype=torch.float16, device="cuda"),
    "full": lambda: torch.full((1 << 40,), 2.0, device="cuda"),
    "rand": lambda: torch.rand(1 << 40, device="cuda"),
    "randint": lambda: torch.randint(0, 9, (1 << 40,), device="cuda"),
    "arange": lambda: torch.arange(1 << 40, device="cuda"),
    "linspace": lambda: torch.linspace(0, 1, 1 << 38, device="cuda"),
    "eye": lambda: torch.eye(1 << 20, device="cuda"),
    "randperm": lambda: torch.randperm(1 << 38, device="cuda"),
    "empty_strided": lambda: torch.empty_strided((1 << 20, 1 << 20), (1 << 20, 1), device="cuda"),
    "new_zeros": lambda: torch.ones(1, device="cuda").new_zeros(1 << 40),
    "zeros_like": lambda: torch.zeros_like(torch.ones(1).expand(1 << 40), device="cuda"),
    "empty_like": lambda: torch.empty_like(torch.ones(1, device="cuda").expand(1 << 20, 1 << 20)),
    "repeat": lambda: torch.ones(1 << 20, device="cuda").repeat(1 << 20),
    "tile": lambda: torch.ones(1 << 20, device="cuda").tile((1 << 20,)),
    "repeat_interleave": lambda: torch.ones(1 << 20, device="cuda").repeat_interleave(1 << 20),
    "matmul": lambda: torch.ones(1 << 20, 1, device="cuda") @ torch.ones(1, 1 << 20, device="cuda"),
    "outer": lambda: torch.outer(torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")),
    "einsum": lambda: torch.einsum("i,j->ij", torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")),
    "expand, add": lambda: torch.ones(1, device="cuda").expand(1 << 40) + 1,
    "broadcast": lambda: torch.ones(1 << 20, 1, device="cuda") + torch.ones(1 << 20, device="cuda"),
    "expand, clone": lambda: torch.ones(1, device="cuda").expand(1 << 40).clone(),
    "expand, contiguous": lambda: torch.ones(1, device="cuda").expand(1 << 20, 1 << 20).contiguous(),
    "expand, half": lambda: torch.ones(1, device="cuda").expand(1 << 40).half(),
    "expand, reshape": lambda: torch.ones(1 << 20, 1, device="cuda").expand(1 << 20, 1 << 20).reshape(-1),
    "comparison": lambda: torch.ones(1, device="cuda").expand(1 << 40) > 0,
    "softmax": lambda: torch.ones(1, device="cuda").expand(1 << 20, 1 << 20).softmax(0),
    "cumsum": lambda: torch.ones(1, device="cuda").expand(1 << 20, 1 << 20).cumsum(0),
    "sort": lambda: torch.ones(1, device="cuda").expand(1 << 20, 1 << 20).sort(),
    "layer norm": lambda: F.layer_norm(torch.ones(1, device="cuda").expand(1 << 20, 1 << 20), (1 << 20,)),
    "cat": lambda: torch.cat([torch.ones(1, device="cuda").expand(1 << 39)] * 2),
    "stack": lambda: torch.stack([torch.ones(1, device="cuda").expand(1 << 39)] * 2),
    "pad": lambda: F.pad(torch.ones(1, device="cuda"), (0, 1 << 40)),
    "embedding": lambda: F.embedding(
        torch.zeros(1, dtype=torch.long, device="cuda").expand(1 << 30), torch.ones(2, 1 << 10, device="cuda")
    ),
    "index": lambda: torch.ones(2, 1 << 10, device="cuda")[
        torch.zeros(1, dtype=torch.long, device="cuda").expand(1 << 30)
    ],
    "one_hot": lambda: F.one_hot(torch.zeros(1 << 20, dtype=torch.long, device="cuda"), 1 << 20),
    "cdist": lambda: torch.cdist(torch.ones(1 << 20, 2, device="cuda"), torch.ones(1 << 20, 2, device="cuda")),
    "interpolate": lambda: F.interpolate(torch.ones(1, 1, 2, 2, device="cuda"), scale_factor=1 << 19),
    "unfold": lambda: F.unfold(torch.ones(1, 1, 1 << 12, 1 << 12, device="cuda"), 64),
    "tril": lambda: torch.ones(1, device="cuda").expand(1 << 20, 1 << 20).tril(),
    "where": lambda: torch.where(torch.ones(1, dtype=torch.bool, device="cuda").expand(1 << 40), 1.0, 2.0),
    "meshgrid": lambda: torch.cartesian_prod(*[torch.ones(1 << 20, device="cuda")] * 2),
    "conv": lambda: F.conv2d(
        torch.ones(1, 1, 1 << 11, 1 << 11, device="cuda"), torch.ones(1 << 14, 1, 1, 1, device="cuda")
    ),
    "linear": lambda: F.linear(torch.ones(1 << 20, 1, device="cuda"), torch.ones(1 << 20, 1, device="cuda")),
    "resize_": lambda: torch.ones(1, device="cuda").resize_(1 << 40),
    "to": lambda: torch.ones(1).expand(1 << 40).to("cuda"),
    "to, of another GPU": lambda: torch.ones(1, device="cuda:1").expand(1 << 40).to("cuda:0"),
    "cuda": lambda: torch.ones(1).expand(1 << 40).cuda(),
    "to, copy": lambda: torch.ones(1, device="cuda").expand(1 << 40).to(copy=True, dtype=torch.float64),
    "Module.to": lambda: nn.Module.to(holder(), "cuda"),
    "arange, a small step": lambda: torch.arange(0, 1, 1e-12, device="cuda"),
}


def holder():
    module = nn.Module()
    module.register_buffer("big", torch.ones(1).expand(1 << 40))
    return module


@pytest.mark.parametrize("line", BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("dry", [False, True])
def test_beyond_the_gpu_is_cudas_error(gpus, line, dry):
    """Terabytes: the host's allocator would have its own words, or the machine would die."""
    context = virtualgpu.dry_run() if dry else torch.enable_grad()
    with context:
        with pytest.raises(
            torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate \d+\.\d\d [GTM]iB. GPU 0 has"
        ):
            line()
        gc.collect()
        assert torch.cuda.memory_allocated(0) <= 600 * MIB  # what the line itself had made before
        assert torch.cuda.memory_stats(0)["num_ooms"] == 1 and torch.ones(3, device="cuda").device.index == 0


@pytest.mark.parametrize(
    "line",
    [
        lambda x: x + 1,
        lambda x: x.relu(),
        lambda x: x.repeat(2),
        lambda x: torch.cat([x, x]),
        lambda x: x.double(),
        lambda x: x.clone(),
        lambda x: x[torch.arange(len(x), device="cuda")],
        lambda x: x.sort(),
        lambda x: F.dropout(x),
        lambda x: x.view(64, -1).softmax(0),
        lambda x: x.view(-1, 1).expand(-1, 4).contiguous(),
    ],
)
def test_what_fits_nearly_fails_cleanly(line):
    """A result that fits the host but not the GPU: the error, and nothing left behind; beside it, the same line passes."""
    virtualgpu.gpus(1, memory="96 MB")
    x = torch.ones(15 * MIB, device="cuda")  # 60 of 96 MiB
    torch.cuda.reset_peak_memory_stats()
    with pytest.raises(torch.OutOfMemoryError):
        line(x)
    gc.collect()
    assert torch.cuda.memory_allocated() == 60 * MIB
    small = torch.ones(MIB // 64, device="cuda")
    line(small)


def test_a_backward_pass_that_runs_out():
    """72 MiB: x, what is kept, and two gradients on the way have 16 each; a fifth block of 16 does not fit."""
    virtualgpu.gpus(1, memory="72 MB")
    x = torch.ones(4 * MIB, device="cuda", requires_grad=True)
    loss = (x * 2 * 3).sum()
    kept = [torch.empty(4 * MIB, device="cuda") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward(retain_graph=True)
    assert x.grad is None
    kept.pop()
    loss.backward()
    assert torch.cuda.memory_allocated() == 48 * MIB + 512  # x, one of the kept, the gradient; the loss
    assert x.grad.min() == x.grad.max() == 6


@pytest.mark.parametrize(
    "line",
    [
        lambda: torch.empty(GIB, device="cuda"),
        lambda: torch.zeros(GIB, device="cuda"),
        lambda: torch.ones(1, device="cuda").expand(GIB) + 1,
        lambda: torch.ones(1 << 15, 1, device="cuda") @ torch.ones(1, 1 << 15, device="cuda"),
        lambda: torch.ones(1 << 10, device="cuda").repeat(MIB),
    ],
)
def test_fits_the_gpu_and_not_the_host(monkeypatch, line):
    from virtualgpu.engine import eager

    virtualgpu.gpus(1, like="H100")
    monkeypatch.setattr(eager, "host_free", lambda: GIB)
    with pytest.raises(RuntimeError, match=r"virtual GPU has room for these 4\.0 GiB.*dry_run\(\)") as found:
        line()
    assert not isinstance(found.value, torch.OutOfMemoryError)
    assert torch.cuda.memory_allocated() < 8 * MIB
    with virtualgpu.dry_run():
        made = line()
        assert torch.cuda.memory_allocated() >= 4 * GIB and made.numel() == GIB


def test_moving_what_does_not_fit_the_host(monkeypatch):
    from virtualgpu.engine import eager

    virtualgpu.gpus(2, like="H100")
    big = torch.ones(1).expand(GIB)
    monkeypatch.setattr(eager, "host_free", lambda: GIB)
    for move in (
        lambda: big.to("cuda"),
        lambda: big.cuda(1),
        lambda: torch.ones(1, device="cuda:1").expand(GIB).to("cuda:0"),
    ):
        with pytest.raises(RuntimeError, match=r"room for these 4\.0 GiB.*dry_run\(\)"):
            move()


def test_the_hosts_own_refusal_is_translated(monkeypatch):
    """Where the guess was too good: the CPU's allocator says no."""
    from virtualgpu.engine import eager

    virtualgpu.gpus(1, like="H100", memory="8000 GB")
    monkeypatch.setattr(eager, "host_free", lambda: 1 << 60)
    with pytest.raises(RuntimeError, match=r"virtual GPU has room for these .* GiB, but this machine.*dry_run\(\)"):
        torch.empty(7 << 38, device="cuda")


# -- figures


def test_every_figure_of_memory_stats(gpus):
    """The names of PyTorch's own documentation, each a number, and equal to the nested ones."""
    torch.ones(1000, device="cuda")
    stats, nested = torch.cuda.memory_stats(), torch.cuda.memory_stats_as_nested_dict()
    names = [
        f"{what}.{pool}.{when}"
        for what in (
            "allocated_bytes",
            "reserved_bytes",
            "active_bytes",
            "inactive_split_bytes",
            "requested_bytes",
            "allocation",
            "segment",
        )
        for pool in ("all", "large_pool", "small_pool")
        for when in ("current", "peak", "allocated", "freed")
    ]
    names += [
        "num_alloc_retries",
        "num_ooms",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "max_split_size",
    ]
    assert set(names) <= set(stats) and len(stats) > 110 and all(isinstance(value, int) for value in stats.values())
    assert nested["allocated_bytes"]["all"]["peak"] == stats["allocated_bytes.all.peak"] == 4096
    assert stats["requested_bytes.all.peak"] == 4000 and stats["allocated_bytes.all.current"] == 0


def test_accumulated_figures_are_reset(gpus):
    x = torch.ones(1000, device="cuda")
    del x
    stats = torch.cuda.memory_stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (1, 1)
    torch.cuda.reset_accumulated_memory_stats()
    stats = torch.cuda.memory_stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"], stats["allocated_bytes.all.peak"]) == (
        0,
        0,
        4096,
    )
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    text = torch.cuda.memory_summary()
    assert "PyTorch CUDA memory summary, device ID 0" in text and "Requested memory" in text
    assert torch.cuda.memory_summary(abbreviated=True, device=1).count("\n") < text.count("\n")


def test_a_snapshot_names_the_readers_line(gpus):
    torch.cuda.memory._record_memory_history()
    try:
        kept = torch.ones(1000, device="cuda:1")
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    (event,) = [event for event in snapshot["device_traces"][1] if event["action"] == "alloc"]
    assert event["size"] == 4000  # as it was asked for, before rounding
    assert any(
        frame["filename"] == __file__ and frame["name"] == "test_a_snapshot_names_the_readers_line"
        for frame in event["frames"]
    )
    del kept


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


def test_a_recorded_allocation_names_its_operation_first(gpus):
    (frames,) = allocations("all")
    assert frames[0] == {"name": "at::_ops::mm::call", "filename": "??", "line": 0}
    assert any(frame["name"] == "backward" for frame in frames)
    assert frames[-1]["line"] > 0


def test_recorded_with_pythons_frames_alone(gpus):
    (frames,) = allocations("python")
    assert not any("::" in frame["name"] for frame in frames)
    assert any(frame["name"] == "backward" for frame in frames)


def test_the_observer_hears_of_running_out(gpus):
    heard = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *figures: heard.append(figures))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, device="cuda:1")
    assert len(heard) == 1 and heard[0][0] == 1 and heard[0][1] == 4 << 40


def mib(*sizes):
    return [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in sizes]


def cut():
    mib(64)
    return mib(33)


@pytest.mark.parametrize(
    ("options", "reserved"),
    [
        ("expandable_segments:True", [(lambda: mib(12, 14), 40), (lambda: mib(3, 4), 20)]),
        ("", [(lambda: mib(3, 4), 20), (cut, 64)]),
        ("max_split_size_mb:32", [(cut, 98)]),
    ],
)
def test_settings_of_the_environment(monkeypatch, options, reserved):
    """By hand: a page of a large expandable segment has 20 MiB; blocks above max_split_size are not cut up for smaller ones."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", options)
    virtualgpu.gpus(1)
    for make, expected in reserved:
        kept = make()
        assert torch.cuda.memory_reserved() >> 20 == expected
        del kept
        torch.cuda.empty_cache()


# -- two threads


def test_threads_that_allocate_and_empty_the_cache(gpus):
    """The books are right in the end, whoever came in between."""
    errors, stop = [], threading.Event()

    def work(seed):
        try:
            for step in range(60):
                x = [torch.empty(1 + (seed * 7919 + step * 104729 + i) % 400_000, device="cuda") for i in range(5)]
                del x[::2]
        except Exception as error:
            errors.append(error)

    def sweep():
        try:
            while not stop.is_set():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.memory_snapshot()
        except Exception as error:
            errors.append(error)

    sweeper = threading.Thread(target=sweep)
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in (sweeper, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    sweeper.join()
    gc.collect()
    torch.cuda.empty_cache()
    assert not errors and torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
