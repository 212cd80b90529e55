"""Is one operation of PyTorch's own database on a virtual GPU what it is on the CPU?

`judge(op)` runs samples of an OpInfo three times: by plain PyTorch on the CPU (virtual GPUs off), on a virtual GPU with numbers, and
in a dry run. Forward and, where there is one, backward. It looks at

    place      every result and gradient is on cuda:0, where the sample had a tensor there
    numbers    results equal the CPU's in every bit (a nan is a nan), and gradients do
    bytes      what is requested of the GPU is what the storages of inputs, results and gradients hold; and memory_allocated() the same
               in whole blocks
    dry        shapes, dtypes, places, bytes (now and at the peak) and simulated seconds are those of the run with numbers;
               or a sentence says why a dry run cannot know them
    history    the same again in the dry run, and with other numbers that Python takes for equal (True, 1, 1.0, 1+0j): what the dry run
               remembers of one call is right for the next
    absent     an operation that CUDA has not raises, as it does there

Judged is what PyTorch's public functions say; of virtualgpu only `gpus`, `reset`, `dry_run` and VIRTUALGPU_CROSSCHECK are used.
"""

import contextlib
import io
import itertools
import os
import re
import signal
import warnings
from dataclasses import asdict, dataclass, field

import torch

import virtualgpu
from tests.judges.compare import different, storages, told
from tests.judges.sample import Run, dtype_of, run, samples, with_other_numbers

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
BLOCK = 512  # bytes; kMinBlockSize of c10/core/AllocatorConfig.h
SPLIT = 1 << 20  # bytes; kSmallSize: a block of the large pool is not split for a rest of this or less
LIMIT = 60  # seconds for one sample, ten times that for all

# What is in these results is whatever was in memory: only shape, dtype and place are judged.
UNDEFINED = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("resize_", "resize_as_"),
}


@dataclass
class Verdict:
    """What was found about one OpInfo. outcome: right, refused (in a dry run, in a sentence), wrong, crashed, or unjudged."""

    name: str
    variant: str
    outcome: str = "right"
    dtype: str = ""
    samples: int = 0
    why: list[str] = field(default_factory=list)

    def wrong(self, check: str, what) -> None:
        self.outcome = "wrong"
        self.note(f"{check}: {told(what)}")

    def note(self, text: str) -> None:
        if text not in self.why and len(self.why) < 8:
            self.why.append(text)

    def line(self) -> dict:
        return asdict(self)


class Late(BaseException):
    """The operation took too long."""


def judge(op, everything: bool = False, dry: bool = True) -> Verdict:
    """The verdict on one OpInfo; `everything`: on each of its samples, not on one alone."""
    verdict = Verdict(op.name, op.variant_test_name)
    dtype = dtype_of(op)
    if dtype is None:
        verdict.outcome = "unjudged"
        verdict.note("it has no dtype on the CPU to compare with")
        return verdict
    verdict.dtype = str(dtype)
    try:
        with warnings.catch_warnings(), _at_most(LIMIT * (10 if everything else 1)):
            warnings.simplefilter("ignore")
            for sample in samples(op, dtype, everything):
                _judge(op, sample, dry, verdict)
    except Late as late:
        verdict.wrong("time", late)
    finally:
        virtualgpu.reset()
    if not verdict.samples and verdict.outcome == "right":
        verdict.outcome = "unjudged"
        verdict.note("no sample")
    return verdict


def _judge(op, sample, dry: bool, verdict: Verdict) -> None:
    try:
        expected = run(op, sample, CPU)
    except Exception as error:
        verdict.note(f"the CPU refuses: {told(error)}")  # nothing to compare with
        return
    verdict.samples += 1
    _gpus()
    if not op.supported_dtypes("cuda"):
        _check_absent(op, sample, verdict)
        return
    numbers = None
    try:
        numbers = run(op, sample, GPU, expected.cotangents)
        _check_places(numbers, verdict)
        _check_bytes(numbers, verdict)
        if op.name not in UNDEFINED:
            _check_numbers(op, sample, expected, numbers, verdict)
    except Exception as error:
        verdict.wrong("raises", error)
    if not dry:
        return
    known = None if numbers is None else (numbers.shapes(), numbers.allocated, numbers.peak, numbers.seconds)
    del numbers
    _gpus()
    try:
        with virtualgpu.dry_run():
            found = run(op, sample, GPU, expected.cotangents)
            if known is not None:
                _check_dry(known, (found.shapes(), found.allocated, found.peak, found.seconds), verdict)
            del found
            _check_history(op, sample, expected.cotangents, verdict)
    except Exception as error:
        if isinstance(error, NotImplementedError) and re.search(r"dry[ _]run", str(error)):
            if verdict.outcome == "right":
                verdict.outcome = "refused"
            verdict.note(f"refused in a dry run: {told(error)}")
        else:
            verdict.wrong("dry raises", error)


def _check_history(op, sample, cotangents, verdict: Verdict) -> None:
    """Many calls meet in one dry run, which compares what it remembers with what it finds (VIRTUALGPU_CROSSCHECK)."""
    for other, backward in ((sample, True), *((alike, False) for alike in with_other_numbers(sample))):
        try:
            run(op, other, GPU, cotangents if backward else None, backward)
        except Exception as error:  # most operations take only some of the numbers
            if "a dry run remembered" in str(error):
                verdict.wrong("history", error)


def _check_absent(op, sample, verdict: Verdict) -> None:
    try:
        run(op, sample, GPU)
    except (NotImplementedError, RuntimeError) as error:
        verdict.note(f"CUDA has it not: {told(error)}")
    else:
        verdict.wrong("absent", "CUDA has no kernel for it and raises; here it gives a result")


def _check_places(numbers: Run, verdict: Verdict) -> None:
    if not numbers.moved:
        return  # nothing of the sample was on a GPU: where the result is, is the affair of the device it names
    for kind, values in (("result", numbers.results), ("gradient", numbers.gradients)):
        for at, value in enumerate(values):
            if isinstance(value, torch.Tensor) and (value.device != GPU or not value.is_cuda):
                verdict.wrong("place", f"{kind} {at} is on {value.device}")


def _check_bytes(numbers: Run, verdict: Verdict) -> None:
    sizes = storages(numbers.tensors).values()
    blocks = sum(-(-size // BLOCK) * BLOCK for size in sizes)
    rest = sum(SPLIT for size in sizes if size > SPLIT)
    if numbers.requested != sum(sizes):
        verdict.wrong("bytes", f"{numbers.requested} requested, {sum(sizes)} held by inputs, results and gradients")
    elif not blocks <= numbers.allocated <= blocks + rest:
        verdict.wrong("bytes", f"{numbers.allocated} allocated, {blocks} held by inputs, results and gradients")


def _check_numbers(op, sample, expected: Run, found: Run, verdict: Verdict) -> None:
    findings = list(_differences(found, expected))
    if not findings:
        return
    again = run(op, sample, CPU, expected.cotangents)  # is the CPU of one mind with itself?
    if itself := next(_differences(again, expected), None):
        verdict.note(f"the CPU differs from itself: {itself[1]}")
        return
    for finding in findings:
        verdict.wrong(*finding)


def _differences(found: Run, expected: Run):
    if found.structure != expected.structure:
        yield "numbers", f"structure {found.structure} instead of {expected.structure}"
        return
    checks = (("numbers", found.results, expected.results), ("gradients", found.gradients, expected.gradients))
    for check, ours, theirs in checks:
        if len(ours) != len(theirs):
            yield check, f"{len(ours)} instead of {len(theirs)}"
        for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if difference := different(one, other):
                yield check, f"{at}: {difference}"


def _check_dry(numbers: tuple, shapes: tuple, verdict: Verdict) -> None:
    if numbers[0] != shapes[0]:
        one, other = next((a, b) for a, b in itertools.zip_longest(numbers[0], shapes[0]) if a != b)
        verdict.wrong("dry", f"shapes, dtypes or places: {one} with numbers, {other} without")
    for what, one, other in zip(("bytes", "peak bytes", "seconds"), numbers[1:], shapes[1:], strict=True):
        if one != other:
            verdict.wrong("dry", f"{what}: {one} with numbers, {other} without")


def _gpus() -> None:
    """One virtual GPU, fresh."""
    virtualgpu.reset()
    os.environ["HELPERS_GPUS"], os.environ["VIRTUALGPU_CROSSCHECK"] = "virtual", "1"
    with contextlib.redirect_stdout(io.StringIO()):
        virtualgpu.gpus(1)


@contextlib.contextmanager
def _at_most(seconds: int):
    """Raises Late in this block after so long, where the system has alarms."""

    def ring(*_):
        raise Late(f"over {seconds} s")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
