"""State belongs to its owner: nobody else assigns to what a machine, its clock, its GPUs and their memory keep."""

import ast
import re
from pathlib import Path

import pytest

import virtualgpu

ROOT = Path(virtualgpu.__file__).parent
OWNERS = {"machine", "clock", "memory", "gpu", "collectives", "communicators", "workspaces", "dry_runs"}


def assigned(tree: ast.AST) -> list[str]:
    """Every attribute of an owner, or of what a thread is doing with one, that the code assigns to."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            path = ast.unparse(node).removesuffix("()").split(".")[:-1]
            if OWNERS & {path[-1], path[-1].removesuffix("()")} or path[-2:-1] in (["machine"], ["clock"]):
                found.append(ast.unparse(node))
    return found


def test_nobody_assigns_to_what_another_keeps():
    files = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in ROOT.rglob("*.py")}
    assert {name: names for name, text in files.items() if (names := assigned(ast.parse(text)))} == {}


@pytest.mark.parametrize("package", ["distributed", "engine", "memory", "sanitizer", "timing"])
def test_a_packages_docstring_names_its_files(package):
    """It is the index of those folders whose files one has to find."""
    folder = ROOT / package
    index = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8")))
    files = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert not [name for name in sorted(files - {"__init__"}) if f"`{name}`" not in index]


def test_what_is_said_to_be_in_hardware_is_there():
    """Comments and docstrings name it by its module (`hardware.machine.HOSTS`), and files are joined and renamed."""
    said = {
        (name, file.stem)
        for file in ROOT.rglob("*.py")
        for name in re.findall(r"(?<![\w/])hardware\.([a-z_]+)", file.read_text("utf-8"))
    }
    assert len(said) > 10
    assert [pair for pair in sorted(said) if not (ROOT / "hardware" / f"{pair[0]}.py").exists()] == []
