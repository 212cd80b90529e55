"""`python -m tools.wheel`: virtualgpu alone, where nothing is installed but PyTorch and what PyTorch needs. And what `pip install .` installs."""

import importlib.metadata as metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest
import series

import virtualgpu

CHANGELOG = series.ROOT / "CHANGELOG.md"

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
def new_setuptools():
    version = metadata.version("setuptools")
    if int(version.split(".")[0]) < 77:
        pytest.skip(f"setuptools {version} is older than the package asks for, and there may be no network")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, new_setuptools):
    folder = tmp_path_factory.mktemp("my wheel")
    command = [sys.executable, str(series.ROOT / "tools" / "wheel.py"), "--offline", str(folder)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    (found,) = folder.glob("*.whl")
    assert shlex.split(said) == ["pip", "install", str(found)], "a line to be copied"
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


def files_of_virtualgpu() -> set[str]:
    paths = [path for kind in ("*.py", "*.csv", "*.toml") for path in (series.ROOT / "virtualgpu").rglob(kind)]
    return {path.relative_to(series.ROOT).as_posix() for path in paths} | {"virtualgpu/README.md"}


def files_in(wheel) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_what_is_in_it(wheel):
    assert files_in(wheel) == files_of_virtualgpu()
    assert any(name.endswith("/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


BUILD = "import sys, setuptools.build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"


def test_pip_install_installs_virtualgpu_alone_and_an_editable_one_is_the_checkout(tmp_path, new_setuptools):
    """`helpers` and `checks` are names that others use, too; after `make setup` the tools and the processes of a lesson find them by the
    path of the checkout. Built in a copy: setuptools leaves its own folders where it builds."""
    checkout, usual, editable = (tmp_path / name for name in ("checkout", "usual", "editable"))
    for name in ("virtualgpu", "helpers", "checks", "tests/colab", "tools"):
        shutil.copytree(series.ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE", "conftest.py", "noxfile.py"):
        shutil.copyfile(series.ROOT / name, checkout / name)
    for step, folder in (("build_wheel", usual), ("build_editable", editable)):
        folder.mkdir()
        subprocess.run([sys.executable, "-c", BUILD, step, str(folder)], cwd=checkout, check=True, capture_output=True)
    (wheel,) = usual.glob("*.whl")
    assert files_in(wheel) == files_of_virtualgpu()
    (about,) = metadata.distributions(path=[str(wheel)])
    assert [(entry.group, entry.value) for entry in about.entry_points] == [("pytest11", "virtualgpu.pytest_plugin")]
    (wheel,) = editable.glob("*.whl")
    (name,) = files_in(wheel)
    assert name.endswith(".pth") and zipfile.ZipFile(wheel).read(name).decode().split("\n")[0] == str(checkout)


def test_what_it_says_of_itself(wheel):
    (about,) = metadata.distributions(path=[str(wheel)])
    always = [line for line in about.requires if "extra ==" not in line]
    assert about.version == virtualgpu.__version__ == re.search(r"^## (\S+)", CHANGELOG.read_text("utf-8"), re.M)[1]
    assert about.name == "virtualgpu" and [re.match(r"\w+", line)[0] for line in always] == ["torch"]
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
