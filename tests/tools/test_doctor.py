"""`make doctor`: a line per package and device, and the cure of what fails."""

import importlib.metadata

import doctor
import pytest

from virtualgpu import monitor


def test_all_is_well_here(capsys):
    assert doctor.main() == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[ OK ] ") for line in lines[:-1])
    named = {line.split()[3] for line in lines[:-1]}
    assert named >= {"torch", "torchvision", "ray", "GPUtil", "torchsummary", "matplotlib", "jupyterlab", "nbval", "cpu",
                     "gpu", "disk", "data"}  # fmt: skip


def test_a_package_that_is_missing_old_or_does_not_import(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "torchsummary":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.1.0" if name == "torch" else real(name)

    def import_module(name):
        if name == "GPUtil":
            raise ModuleNotFoundError("No module named 'distutils'")

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    assert {what: found for fine, what, found in doctor.packages() if not fine} == {
        "torch": "2.1.0 is too old. Cure: pip install 'torch>=2.11'",
        "torchsummary": "not installed. Cure: pip install 'torchsummary>=1.5'",
        "GPUtil": "1.4.0 does not import (No module named 'distutils'). Cure: pip install setuptools",
    }


@pytest.mark.parametrize("commands, cuda, fine, said", [
    (None, None, True, "none: the lessons use the CPU"),
    ("exit 9", None, False, "nvidia-smi is there but reports no GPU"),
    ("healthy", None, False, "built without CUDA"),
    ("healthy", "13.2", False, "CUDA does not start"),
])  # fmt: skip
def test_gpus_that_only_some_can_see(nvidia_smi, monkeypatch, tmp_path, commands, cuda, fine, said):
    import torch

    def no_driver():
        raise monitor.NoSource("no driver")

    monkeypatch.setattr(monitor, "NVMLSource", no_driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if commands is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    elif commands == "healthy":
        nvidia_smi()
    else:
        nvidia_smi(commands)
    ((found, what, text),) = doctor.gpus()
    assert (found, what) == (fine, "gpu") and said in text
