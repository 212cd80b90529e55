"""Programs that this process starts: they have its virtual GPUs, and share their memory."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import virtualgpu
from tests import forks
from virtualgpu import environment
from virtualgpu.engine.machine import CONTEXT
from virtualgpu.run import inherit

PROGRAM = """
import torch
held = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:1")
print(torch.cuda.device_count(), torch.cuda.get_device_name(1), torch.cuda.mem_get_info(1))
"""


@pytest.fixture
def two_gpus():
    virtualgpu.reset()
    with virtualgpu.gpus(2, like="T4,H100", memory="1 GB"):
        yield
    virtualgpu.reset()


def program() -> str:
    ran = forks.run("-c", PROGRAM, env=forks.environment() | inherit.variables())
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_program_has_the_same_gpus_and_sees_what_others_hold(two_gpus):
    held, before = torch.empty(300 << 20, dtype=torch.uint8, device="cuda:1"), dict(os.environ)
    own = 2 << 20  # what the program reserves for its one MiB
    free = (1 << 30) - (held.nbytes + CONTEXT) - (own + CONTEXT)
    assert program() == f"2 NVIDIA H100 80GB HBM3 ({free}, {1 << 30})"
    assert dict(os.environ) == before


def test_what_a_dry_run_left_cached_is_room_for_others(two_gpus):
    """Ranks of a lesson had none, where the dry run before had run out of memory (PyTorch 2.11)."""
    with virtualgpu.dry_run():
        with pytest.raises(torch.OutOfMemoryError):
            held = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda:1") for _ in range(20)]
        held = []
    assert torch.cuda.memory_reserved(1) > 800 << 20
    free = (1 << 30) - CONTEXT - (2 << 20) - CONTEXT
    assert not held and program() == f"2 NVIDIA H100 80GB HBM3 ({free}, {1 << 30})"


def test_a_card_of_ones_own_is_refused():
    virtualgpu.reset()
    spec = dataclasses.replace(virtualgpu.SPECS["T4"], name="Tesla T5")
    with virtualgpu.gpus(1, like=spec), pytest.raises(ValueError, match="Tesla T5"):
        inherit.variables()


def test_nothing_to_set_without_gpus_and_under_the_runner():
    virtualgpu.reset()
    assert inherit.variables() == {}
    environ = os.environ | {environment.VARIABLE: '{"gpus": [{"like": "T4"}]}'}
    code = "import virtualgpu.session as s, torch; from virtualgpu.run import child, inherit; child.start(); print(s.of_the_runner(), inherit.variables())"
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert ran.stdout.strip() == "True {}", ran.stderr
