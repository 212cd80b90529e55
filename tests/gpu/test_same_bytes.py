"""The same programs on virtual and on real GPUs. Skipped without one; two are needed where a program uses both."""

import gc

import pytest
import torch

import virtualgpu
from tests.virtualgpu.memory.test_events import MODELS, steps
from virtualgpu.hardware.specs import SPECS, Spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a real GPU")


def figures(name: str) -> dict[str, int]:
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    model, x, y = model.to("cuda"), x.to("cuda"), y.to("cuda")
    kept = steps(model, x, y)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    del model, x, y, kept
    return {"allocated": allocated, "reserved": reserved}


@pytest.mark.parametrize("name", MODELS)
def test_allocated_to_the_byte_and_reserved_within_two_percent(name, monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    total = torch.cuda.get_device_properties(0).total_memory
    spec = SPECS["H100"]
    with virtualgpu.gpus(1, like=Spec(**{**vars(spec), "memory": total})):
        expected = figures(name)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # the virtual GPU was new, and its cuBLAS had none yet
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    measured = figures(name)
    assert measured["allocated"] - before == expected["allocated"]
    assert measured["reserved"] == pytest.approx(expected["reserved"], rel=0.02)
