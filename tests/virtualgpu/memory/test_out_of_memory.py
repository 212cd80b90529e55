"""Out of memory is decided before the host allocates, in CUDA's words, and leaves nothing behind; settings and threads around it."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu
from virtualgpu.engine import eager

MIB, GIB = 1 << 20, 1 << 30
HUGE, LONG = 1 << 40, 1 << 20


def one(*shape, dtype=None, like=None):
    """A number on the GPU, spread over so many."""
    return torch.ones(1, dtype=dtype, device=like or "cuda").expand(*shape)


def ones(*shape):
    return torch.ones(*shape, device="cuda")


def nothing(count):
    """Indices."""
    return torch.zeros(1, dtype=torch.long, device="cuda").expand(count)


def holder():
    module = nn.Module()
    module.register_buffer("big", torch.ones(1).expand(HUGE))
    return module


# Terabytes: the host's allocator would have its own words, or the machine would die
BEYOND = [
    lambda: torch.empty(HUGE, device="cuda"),
    lambda: torch.zeros(LONG, LONG, device="cuda"),
    lambda: torch.rand(HUGE, device="cuda"),
    lambda: torch.arange(0, 1, 1e-12, device="cuda"),
    lambda: torch.randperm(1 << 38, device="cuda"),
    lambda: ones(1).new_zeros(HUGE),
    lambda: torch.zeros_like(torch.ones(1).expand(HUGE), device="cuda"),
    lambda: torch.empty_like(one(LONG, LONG)),
    lambda: ones(LONG).repeat_interleave(LONG),
    lambda: ones(LONG, 1) @ ones(1, LONG),
    lambda: one(HUGE) + 1,
    lambda: one(HUGE).clone(),
    lambda: one(HUGE).half(),
    lambda: ones(LONG, 1).expand(LONG, LONG).reshape(-1),
    lambda: one(LONG, LONG).sort(),
    lambda: F.layer_norm(one(LONG, LONG), (LONG,)),
    lambda: torch.cat([one(1 << 39)] * 2),
    lambda: F.pad(ones(1), (0, HUGE)),
    lambda: F.embedding(nothing(1 << 30), ones(2, 1 << 10)),
    lambda: F.interpolate(ones(1, 1, 2, 2), scale_factor=1 << 19),
    lambda: torch.where(one(HUGE, dtype=torch.bool), 1.0, 2.0),
    lambda: F.conv2d(ones(1, 1, 1 << 11, 1 << 11), ones(1 << 14, 1, 1, 1)),
    lambda: ones(1).resize_(HUGE),
    lambda: torch.ones(1).expand(HUGE).to("cuda"),
    lambda: one(HUGE, like="cuda:1").to("cuda:0"),
    lambda: one(HUGE).to(copy=True, dtype=torch.float64),
    lambda: nn.Module.to(holder(), "cuda"),
]


@pytest.mark.parametrize("line", BEYOND)
@pytest.mark.parametrize("dry", [False, True])
def test_beyond_the_gpu_is_cudas_error(gpus, line, dry):
    heard = []
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        torch._C._cuda_attach_out_of_memory_observer(lambda *figures: heard.append(figures))
        words = r"^CUDA out of memory. Tried to allocate \d+\.\d\d [GTM]iB. GPU 0 has"
        with pytest.raises(torch.OutOfMemoryError, match=words):
            line()
        gc.collect()
        assert torch.cuda.memory_allocated(0) <= 600 * MIB  # what the line itself had made before
        assert torch.cuda.memory_stats(0)["num_ooms"] == len(heard) == 1 and heard[0][0] == 0
        assert ones(3).device.index == 0


@pytest.mark.parametrize(
    "line",
    [
        lambda x: torch.cat([x, x]),
        lambda x: x[torch.arange(len(x), device="cuda")],
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
        lambda: one(GIB) + 1,
        lambda: ones(1 << 15, 1) @ ones(1, 1 << 15),
        lambda: torch.ones(1 << 10, device="cuda").repeat(MIB),
    ],
)
def test_fits_the_gpu_and_not_the_host(monkeypatch, line):
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
    virtualgpu.gpus(1, like="H100", memory="8000 GB")
    monkeypatch.setattr(eager, "host_free", lambda: 1 << 60)
    with pytest.raises(RuntimeError, match=r"virtual GPU has room for these .* GiB, but this machine.*dry_run\(\)"):
        torch.empty(7 << 38, device="cuda")


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
