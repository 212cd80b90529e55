"""PyTorch's own detector, torch.cuda._sanitizer, is told what CUDA would tell it: it agrees with ours on what it can see."""

import json
from pathlib import Path

import pytest

from tests import forks
from tests.virtualgpu.sanitizer import programs

ROOT = Path(__file__).parents[3]
PROGRAM = """
import contextlib, io, json, sys
import torch
from tests.virtualgpu.sanitizer import programs
{enable}
from torch.cuda._sanitizer import CUDASanitizerErrors
found = {{}}
for program in programs.STREAMS:
    found[program.__name__] = []
    for right in (True, False):
        with contextlib.redirect_stderr(io.StringIO()) as told:
            try:
                program(right)
                found[program.__name__].append("")
            except CUDASanitizerErrors:
                found[program.__name__].append(told.getvalue())
        torch.cuda.synchronize()
print(json.dumps(found))
"""
HOW = {
    "by the variable": ({"TORCH_CUDA_SANITIZER": "1"}, ""),
    "by the function": ({}, "import torch.cuda._sanitizer; torch.cuda._sanitizer.enable_cuda_sanitizer()"),
}


@pytest.mark.parametrize(("variables", "enable"), HOW.values(), ids=HOW)
def test_pytorchs_own_detector_is_right(clean_environ, tmp_path, variables, enable):
    code = PROGRAM.format(enable=enable)
    environ = {**clean_environ, **variables, "PYTHONPATH": str(ROOT)}
    done = forks.run("-m", "virtualgpu", "--quiet", "-c", code, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == [program.__name__ for program in programs.STREAMS]
    for name, (right, wrong) in found.items():
        assert right == "", name
        assert "CSAN detected a possible data race" in wrong, name
    told = found["read_after_write"][1]
    assert "aten::mul.Tensor" in told and "aten::add_.Tensor" in told and "allocated with stack trace" in told
