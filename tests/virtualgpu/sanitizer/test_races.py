"""Each kind of race raises, and says which; its repaired twin stays silent, with the same numbers."""

import contextlib
import re

import pytest
import torch
from torch import nn

import virtualgpu
from tests.virtualgpu.sanitizer import programs
from tests.virtualgpu.sanitizer.programs import RACES, SILENT
from virtualgpu.sanitizer import UnsynchronizedAccessError


def name(program):
    return program.__name__


def message_of(program) -> list[str]:
    """The lines of the error that its race raises."""
    with pytest.raises(UnsynchronizedAccessError, match=r"^a race: ") as caught:
        program(False)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("program", RACES, ids=name)
def test_a_race_raises_and_its_repaired_twin_is_silent(sanitize, program):
    assert RACES[program] in message_of(program)[0]
    torch.cuda.synchronize()
    program()


@pytest.mark.parametrize("program", RACES, ids=name)
def test_off_nobody_is_told(program):
    """As before: the numbers are right."""
    virtualgpu.gpus(2)
    assert program is programs.halves or program(False) == program()


@pytest.mark.parametrize("program", SILENT, ids=name)
def test_what_needs_no_waiting_for(sanitize, program):
    program()


ON_SHAPES = [program for program, message in RACES.items() if "host" not in message] + [programs.read_early_as_a_number]


@pytest.mark.parametrize("program", ON_SHAPES, ids=name)
@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
def test_on_shapes_alone(sanitize, program):
    with virtualgpu.dry_run(2):
        program()
        message_of(program)


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
    event, x = torch.cuda.Event(), torch.ones(8, device="cuda")
    with programs.beside():
        host = x.to("cpu", non_blocking=True)
        event.record()
    with pytest.raises(UnsynchronizedAccessError):
        host.sum()
    while not event.query():
        torch.ones(1, device="cuda")  # the host does something else meanwhile
    assert host.sum() == 8


def test_a_race_in_a_replica_comes_through(sanitize):
    """DataParallel makes the error again, in the caller's thread, from its words."""

    class Forgets(nn.Module):
        def forward(self, x):
            with torch.cuda.stream(torch.cuda.Stream()):
                return x * 2

    with pytest.raises(UnsynchronizedAccessError, match=r"Caught UnsynchronizedAccessError in replica \d(.|\n)*a race"):
        nn.DataParallel(Forgets())(torch.ones(8, 16, device="cuda"))


# -- what an error says, and how finely memory is told apart


def test_both_lines_both_streams_the_tensor_and_the_cure(sanitize):
    lines = message_of(programs.read_after_write)
    text, here = "\n".join(lines), "tests/virtualgpu/sanitizer/programs.py"
    assert lines[0].startswith("a race: aten::mul.Tensor on the default stream of cuda:0 reads")
    for pattern in (
        r"tensor  float32 of shape \(262144,\), 1024.00 KiB on cuda:0, at 0x1000000000000",
        rf"made    .*{here}:\d+, in read_after_write: x = torch.zeros",
        rf"now .*\n +.*{here}:\d+, in read_after_write: return \(x \* 2\)",
        rf"before .*\n +.*{here}:\d+, in read_after_write: x.add_\(1\)",
    ):
        assert re.search(pattern, text)
    cure = "let the default stream of cuda:0 wait for stream 3 of cuda:0 before this line: stream.wait_stream(other)"
    assert lines[-1].startswith(f"  cure    {cure}")
    assert "site-packages" not in text and "virtualgpu/engine" not in text


def test_freed_memory(sanitize):
    lines = message_of(programs.freed_while_in_use)
    assert lines[0].endswith(programs.FREED) and "tensor.record_stream(stream)" in lines[-1]
    assert any(re.match(r"  freed   .*in freed_while_in_use: del x$", line) for line in lines)


def test_the_hosts_memory(sanitize):
    lines = message_of(programs.source_overwritten)
    assert "of the host's pinned memory" in lines[1] and "torch.cuda.synchronize()" in lines[-1]


VIEWS = {
    "columns": (lambda x: x[:, :32], lambda x: x[:, 32:], False),
    "columns that share one": (lambda x: x[:, :33], lambda x: x[:, 32:], True),
    "rows": (lambda x: x[:32], lambda x: x[32:], False),
    "rows and a column": (lambda x: x[:32], lambda x: x[:, 3], True),
    "every second": (lambda x: x[:, ::2], lambda x: x[:, 1::2], False),
    "transposed": (lambda x: x.t()[:32], lambda x: x[:, 32:], False),
    "transposed, and the same": (lambda x: x.t(), lambda x: x[3:4, 4:5], True),
    "as bytes": (lambda x: x.view(torch.uint8)[:, :128], lambda x: x[:, 32:], False),
    "as bytes, one too many": (lambda x: x.view(torch.uint8)[:, :129], lambda x: x[:, 32:], True),
    "nothing": (lambda x: x[:0], lambda x: x, False),
}


@pytest.mark.parametrize(("one", "other", "meet"), VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dry", [False, True])
def test_views_that_meet(sanitize, one, other, meet, dry):
    def program(_):
        x = torch.zeros(64, 64, device="cuda")
        with programs.beside():
            one(x).zero_()
        other(x).zero_()

    with virtualgpu.dry_run(2) if dry else contextlib.nullcontext():
        message_of(program) if meet else program(True)
