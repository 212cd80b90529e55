"""`python -m tests.faults`, where it begins."""

from pathlib import Path

from tests.faults import place


def test_a_project_among_temporary_files_keeps_them(monkeypatch, capsys):
    """A program that has a /tmp of its own would not find the project there."""
    monkeypatch.delenv(place.IN_NAMESPACE, raising=False)
    monkeypatch.setattr(place, "ROOT", Path("/tmp/a folder/course"))
    monkeypatch.setattr(place.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(place.os, "execvp", None)
    place.enter_namespace()
    assert "no disk is filled" in capsys.readouterr().out
