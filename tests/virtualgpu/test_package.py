"""The package: what is in its wheel, and that it works where nothing is installed but PyTorch and what PyTorch needs."""

import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import virtualgpu
from virtualgpu import environment

PACKAGE = Path(virtualgpu.__file__).parent

# Python finds nothing but what is named here: as if nothing else were installed
ALONE = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top.startswith("_sysconfigdata") or top in NAMES:
            return PathFinder.find_spec(name, path, target)

runner = [finder for finder in sys.meta_path if type(finder).__name__ == "_Finder"]  # it asks the others
sys.meta_path[:] = [*runner, BuiltinImporter, FrozenImporter, Finder]
"""
PROGRAM = """
import importlib, pkgutil, sys
import torch, virtualgpu
from torch import nn

layers = [nn.Linear(64, 64).to(f"cuda:{i}") for i in range(torch.cuda.device_count())]
x = torch.randn(8, 64)
for layer in layers:
    x = layer(x.to(layer.weight.device))
x.sum().backward()
print(x.device, torch.cuda.max_memory_allocated(1) > 0, "numpy" in sys.modules)
with virtualgpu.dry_run(2), virtualgpu.recording() as spans:
    nn.DataParallel(nn.Linear(64, 64).cuda())(torch.ones(8, 64))
missing = set()
for module in pkgutil.walk_packages(virtualgpu.__path__, "virtualgpu."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        missing.add((module.name, error.name))
print(sorted(missing))
try:
    from virtualgpu.run.ranks import launch
    launch(print)
except ImportError as error:
    print(error)
print(virtualgpu.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built in a copy, since setuptools leaves folders of its own where it builds, and with the setuptools that is here: there may be no network."""
    version = metadata.version("setuptools")
    if int(version.split(".")[0]) < 77:
        pytest.skip(f"setuptools {version} is older than the package asks for")
    folder = tmp_path_factory.mktemp("my wheel")
    left = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "tests")
    shutil.copytree(PACKAGE, folder / "virtualgpu", ignore=left)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(folder / "virtualgpu")], check=True)
    (found,) = folder.glob("*.whl")
    return found


def modules_of(name: str) -> set[str]:
    """The modules of a package and of all that it needs."""
    needed, found = set(), [name]
    for wanted in found:
        try:
            lines = metadata.requires(wanted) or []
        except metadata.PackageNotFoundError:
            continue
        needed.add(wanted.lower().replace("_", "-"))
        names = [re.match(r"[\w.-]+", line)[0] for line in lines if "extra ==" not in line]
        found += [each for each in names if each not in found]
    provided = metadata.packages_distributions().items()
    return {name for name, packages in provided if needed & {one.lower().replace("_", "-") for one in packages}}


def test_what_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    kinds = ("*.py", "*.csv", "*.toml", "py.typed", "README.md")
    paths = {path.relative_to(PACKAGE) for kind in kinds for path in PACKAGE.rglob(kind)} - {Path("pyproject.toml")}
    wanted = {f"virtualgpu/{path.as_posix()}" for path in paths if path.parts[0] not in ("tests", "build")}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert any(name.endswith("/LICENSE") for name in names)


def test_what_it_says_of_itself(wheel):
    (about,) = metadata.distributions(path=[str(wheel)])
    always = [line for line in about.requires if "extra ==" not in line]
    assert about.name == "virtualgpu" and about.version == virtualgpu.__version__
    assert always == ["torch>={}.{}".format(*environment.PYTORCH[0])]
    assert [(entry.group, entry.value) for entry in about.entry_points] == [("pytest11", "virtualgpu.pytest_plugin")]


def test_alone_with_pytorch(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "alone").mkdir()
    names = modules_of("torch") | {"virtualgpu", "torch"}
    assert not names & {"matplotlib", "ray", "IPython", "psutil", "numpy", "cloudpickle", "pytest", "helpers"}
    (tmp_path / "alone" / "sitecustomize.py").write_text(ALONE.replace("NAMES", repr(names)))
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUALGPU", "HELPERS_GPUS")}
    environ["PYTHONPATH"] = os.pathsep.join(str(tmp_path / name) for name in ("alone", "installed"))

    def run(*arguments):
        command = [sys.executable, "-m", "virtualgpu", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)

    assert run("--help").stdout.startswith("usage: python -m virtualgpu")
    found = run("--report", "--trace", "trace.json", "program.py")
    assert found.returncode == 0, found.stderr
    place, missing, launch, file = found.stdout.splitlines()[-4:]
    assert place == "cuda:1 True False"
    assert missing == "[('virtualgpu.pytest_plugin', 'pytest')]"
    assert "pip install cloudpickle" in launch
    assert file == str(tmp_path / "installed" / "virtualgpu" / "__init__.py")
    assert "virtualgpu: 2 x Tesla T4, 1 process" in found.stderr and "at its peak" in found.stderr
