"""PyTorch's own operations on a virtual GPU: a sixteenth of the sweep `python -m tests.judges op_db`, and that the sweep sees faults."""

import itertools
import json
import subprocess
import sys

import pytest
import torch

from tests.judges.report import ROOT

pytest.importorskip("expecttest", reason="PyTorch's database of operations imports it")


@pytest.mark.judge
def test_a_sixteenth_of_all_operations_is_right(tmp_path):
    out = tmp_path / "op_db.jsonl"
    command = [sys.executable, "-m", "tests.judges", "op_db", "--dry", "--part", "1/16", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line)["outcome"] for line in out.read_text().splitlines()]
    assert len(outcomes) > 37 and outcomes.count("unjudged") < 2


class Fake:
    """An OpInfo of one sample, by a function of one tensor and the number of its call: CPU, GPU, dry run."""

    name, variant_test_name, supports_autograd = "fake", "", True

    def __init__(self, function):
        self.function, self.calls = function, itertools.count()

    def __call__(self, tensor):
        return self.function(tensor, next(self.calls))

    def supported_dtypes(self, device):
        return {torch.float32}

    def sample_inputs(self, device, dtype, requires_grad):
        from torch.testing._internal.opinfo.core import SampleInput

        yield SampleInput(torch.arange(4.0, dtype=dtype, requires_grad=requires_grad))


class Scaled(Fake):
    """With a number as second argument."""

    def __call__(self, tensor, number):
        return self.function(tensor, number)

    def sample_inputs(self, device, dtype, requires_grad):
        from torch.testing._internal.opinfo.core import SampleInput

        yield SampleInput(torch.arange(4.0, dtype=dtype, requires_grad=requires_grad), args=(1,))


KEPT = []  # by an operation that leaves memory behind


@pytest.mark.parametrize(
    ("found", "function"),
    [
        ([], lambda x, call: x.sin()),
        (["numbers", "gradients"], lambda x, call: x * 3 if x.is_cuda else x * 2),
        (["dry raises", "raises"], lambda x, call: x.sin().cpu()),  # its gradient is refused
        (["place"], lambda x, call: x.detach().sin().cpu()),
        (["bytes"], lambda x, call: (x.sin(), KEPT.append(torch.ones(9, device=x.device)))[0]),
        (["dry"], lambda x, call: x.sin().cos() if call == 2 else torch.sin(x)),
        (["dry raises"], lambda x, call: x.sin() if call < 2 else x.no_such_method()),
    ],
)
def test_the_sweep_notices(found, function):
    from tests.judges.one_operation import judge

    verdict = judge(Fake(function))
    KEPT.clear()
    assert sorted({why.split(":")[0] for why in verdict.why}) == sorted(found)
    assert verdict.outcome == ("wrong" if found else "right")


def test_the_sweep_notices_what_two_calls_share(monkeypatch):
    """A dry run in which True, 1 and 1.0 are one to the memory of results."""
    from tests.judges.one_operation import judge
    from virtualgpu.engine import dry_run

    describe = dry_run._describe
    monkeypatch.setattr(
        dry_run,
        "_describe",
        lambda values, key: describe([v for v in values if not isinstance(v, (bool, int, complex))], key),
    )
    found = judge(Scaled(lambda x, number: x * number))
    assert {why.split(":")[0] for why in found.why} == {"history"}


def test_one_bit_is_a_difference():
    from tests.judges.compare import different

    one = torch.tensor([1.0, float("nan"), 0.0])
    assert not different(one, one.clone())
    assert different(one, torch.tensor([1.0 + 2**-23, float("nan"), 0.0])) == "1 of 3 numbers differ"
    assert different(one, torch.tensor([1.0, float("nan"), -0.0])) == "1 of 3 numbers differ"
