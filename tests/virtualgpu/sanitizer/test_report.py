"""What an error says, and how finely memory is told apart."""

import re

import pytest
import torch

import virtualgpu
from tests.virtualgpu.sanitizer import programs
from virtualgpu.sanitizer import UnsynchronizedAccessError


def told(program) -> list[str]:
    with pytest.raises(UnsynchronizedAccessError) as caught:
        program(False)
    assert isinstance(caught.value, RuntimeError)
    return str(caught.value).splitlines()


def test_both_lines_both_streams_the_tensor_and_the_cure(sanitize):
    lines = told(programs.read_after_write)
    assert lines[0] == (
        "a race: aten::mul.Tensor on the default stream of cuda:0 reads what aten::add_.Tensor on stream 3 of cuda:0 may still be "
        "writing"
    )
    text = "\n".join(lines)
    assert re.search(r"tensor  float32 of shape \(262144,\), 1024.00 KiB on cuda:0, at 0x1000000000000", text)
    here = "tests/virtualgpu/sanitizer/programs.py"
    assert re.search(rf"made    .*{here}:\d+, in read_after_write: side, x = torch.cuda.Stream\(\), torch.zeros", text)
    assert re.search(rf"now .*\n +.*{here}:\d+, in read_after_write: return \(x \* 2\)", text)
    assert re.search(rf"before .*\n +.*{here}:\d+, in read_after_write: x.add_\(1\)", text)
    cure = "let the default stream of cuda:0 wait for stream 3 of cuda:0 before this line: stream.wait_stream(other)"
    assert lines[-1].startswith(f"  cure    {cure}")
    assert "site-packages" not in text and "virtualgpu/engine" not in text


def test_freed_memory(sanitize):
    lines = told(programs.freed_while_in_use)
    assert (
        lines[0].endswith("may still be reading, of a tensor that was freed")
        and "tensor.record_stream(stream)" in lines[-1]
    )
    assert any(re.match(r"  freed   .*in freed_while_in_use: del x$", line) for line in lines)


@pytest.mark.parametrize(
    ("program", "doing"), [(programs.source_overwritten, "overwrites"), (programs.read_early, "reads")]
)
def test_the_host(sanitize, program, doing):
    lines = told(program)
    assert f"the host (aten::{'zero_' if doing == 'overwrites' else 'sum'}) {doing} what" in lines[0]
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
    def program():
        side, x = torch.cuda.Stream(), torch.zeros(64, 64, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            one(x).zero_()
        other(x).zero_()

    def run():
        if not meet:
            return program()
        with pytest.raises(UnsynchronizedAccessError):
            program()

    if dry:
        with virtualgpu.dry_run():
            run()
    else:
        run()
