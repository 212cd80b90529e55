"""The judge of models of libraries on a card, by one of them that needs no library."""

import pytest

from tests.judges.card import judge


def test_what_was_measured_is_a_program_here():
    assert list(judge.measured("H100")) == list(judge.PROGRAMS)
    assert set(judge.measured("H200")) < set(judge.PROGRAMS)


def test_within():
    assert judge.within([1.0, 1.1, 1 / 1.1, 1.4], 15) == 0.75


def test_a_mixer_takes_what_it_took(monkeypatch):
    """One whose linear layers go through transposed patches, so that every layer norm copies first."""
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    name = "mixer fp32 b64"
    measured, simulated = judge.measured("H100")[name], judge.simulate(name, "H100", "2026")
    assert simulated["kernels_ms"] == pytest.approx(measured["kernels_ms"], rel=0.15)
    assert simulated["allocated_mib"] == pytest.approx(measured["allocated_mib"], rel=0.01)
    assert simulated["reserved_mib"] == pytest.approx(measured["reserved_mib"], rel=0.05)


def test_without_a_gpu_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU here"):
        judge.main(["--measure", str(tmp_path / "lines.jsonl")])
