"""Each kind of race raises, and says which; as it should be, the program is silent."""

import contextlib
import re

import pytest
import torch
from torch import nn

import virtualgpu
from tests.virtualgpu.sanitizer.programs import FREED, ON_THE_HOST, RACES, SILENT, ones, raised, run
from virtualgpu.sanitizer import UnsynchronizedAccessError


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("name", [*RACES, *ON_THE_HOST])
@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
def test_a_race_raises_unless_the_program_waits(sanitize, name, dry):
    if dry and name in ON_THE_HOST:
        pytest.skip("numbers of the host, which a dry run may not have")
    program, words = (RACES | ON_THE_HOST)[name]
    with virtualgpu.dry_run(2) if dry else contextlib.nullcontext():
        told = raised(program)
        assert told.startswith("a race: ") and words in told.splitlines()[0]
        torch.cuda.synchronize()
        run(program)


@pytest.mark.parametrize("name", SILENT)
def test_what_needs_no_waiting_for(sanitize, name):
    run(*SILENT[name])


def test_what_query_has_seen_is_done(sanitize):
    event, x = torch.cuda.Event(), torch.ones(8, device="cuda")
    host = x.to("cpu", non_blocking=True)
    event.record()
    with pytest.raises(UnsynchronizedAccessError):
        host.sum()
    while not event.query():
        torch.ones(1, device="cuda")  # the host does something else meanwhile
    assert host.sum() == 8


# -- larger programs, as they should be


def prefetcher():
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


def loader_with_pinned_batches():
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    loader = torch.utils.data.DataLoader(data, 4, pin_memory=True)
    assert sum(x.to("cuda", non_blocking=True).sum().item() for (x,) in loader) == 66


def backward_on_several_streams():
    streams, here = [torch.cuda.Stream() for _ in range(3)], torch.cuda.current_stream()
    layers = nn.ModuleList([nn.Linear(64, 64) for _ in streams]).cuda()
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(3):
        x = torch.ones(8, 64, device="cuda")
        for layer, stream in zip(layers, streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                x = layer(x).relu()
            here.wait_stream(stream)
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


@pytest.mark.parametrize(
    "program", [prefetcher, loader_with_pinned_batches, backward_on_several_streams, data_parallel]
)
def test_programs_that_wait_are_silent(sanitize, program):
    program()


def test_a_race_in_a_replica_comes_through(sanitize):
    """DataParallel makes the error again, in the caller's thread, from its words."""

    class Forgets(nn.Module):
        def forward(self, x):
            with torch.cuda.stream(torch.cuda.Stream()):
                return x * 2

    with pytest.raises(UnsynchronizedAccessError, match=r"Caught UnsynchronizedAccessError in replica \d(.|\n)*a race"):
        nn.DataParallel(Forgets())(torch.ones(8, 16, device="cuda"))


# -- what an error says, and how finely memory is told apart


def freed_while_in_use():
    side, x = torch.cuda.Stream(), ones()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x * 2
    del x
    ones()


def test_both_lines_both_streams_the_tensor_and_the_cure(sanitize):
    with pytest.raises(UnsynchronizedAccessError) as caught:
        freed_while_in_use()
    text, here = str(caught.value), r"tests/virtualgpu/sanitizer/test_races.py:\d+, in freed_while_in_use: "
    for pattern in (
        rf"^a race: aten::ones on the default stream of cuda:0 overwrites what aten::mul.Tensor on stream 3 of cuda:0 {FREED}\n",
        r"\n  tensor  float32 of shape \(262144,\), 1024.00 KiB on cuda:0, at 0x1000000000000\n",
        r"\n  made    .*programs.py:\d+, in ones: return torch.ones",
        rf"\n  now     .* writes it\n +.*programs.py.*\n +{here}ones\(\)\n",
        rf"\n  before  .* reads the tensor of shape \(262144,\).*\n +{here}x \* 2\n",
        rf"\n  freed   {here}del x\n",
        r"\n  cure    call tensor.record_stream\(stream\) for stream 3 of cuda:0 on the tensor that is freed, or ",
    ):
        assert re.search(pattern, text), (pattern, text)
    assert "site-packages" not in text and "virtualgpu/engine" not in text


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("read after write", "let the default stream of cuda:0 wait for stream 3 of cuda:0 before this line: "),
        ("source overwritten", "torch.cuda.synchronize() waits for all"),
    ],
)
def test_what_cures_it(sanitize, name, cure):
    assert cure in raised((RACES | ON_THE_HOST)[name][0]).splitlines()[-1]


VIEWS = {
    "columns": ("x[:, :32]", "x[:, 32:]", False),
    "columns that share one": ("x[:, :33]", "x[:, 32:]", True),
    "rows": ("x[:32]", "x[32:]", False),
    "rows and a column": ("x[:32]", "x[:, 3]", True),
    "every second": ("x[:, ::2]", "x[:, 1::2]", False),
    "transposed": ("x.t()[:32]", "x[:, 32:]", False),
    "transposed, and the same": ("x.t()", "x[3:4, 4:5]", True),
    "as bytes": ("x.view(torch.uint8)[:, :128]", "x[:, 32:]", False),
    "as bytes, one too many": ("x.view(torch.uint8)[:, :129]", "x[:, 32:]", True),
    "nothing": ("x[:0]", "x", False),
}


@pytest.mark.parametrize(("one", "other", "meet"), VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dry", [False, True])
def test_views_that_meet(sanitize, one, other, meet, dry):
    with virtualgpu.dry_run(2) if dry else contextlib.nullcontext():
        assert bool(raised(f"x=zeros(64, 64); s<d; s:{one}.zero_(); {other}.zero_()")) is meet
