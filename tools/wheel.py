"""`python -m tools.wheel`: virtualgpu alone as a package to install anywhere, under build/. It needs PyTorch, and nothing of the lessons.

The version is the engine's own, `virtualgpu.__version__`; licence and Python are the series'. The wheel is built in a folder of its own, so that
there is one pyproject here.

    wheel.py --offline FOLDER    another folder than build/; with the setuptools that is installed instead of a fresh one
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = """\
[build-system]
requires = {requires}
build-backend = "setuptools.build_meta"

[project]
name = "virtualgpu"
version = "{version}"
description = "Unmodified multi-GPU PyTorch on a machine that has no GPU"
readme = "virtualgpu/README.md"
license = "{license}"
license-files = ["LICENSE"]
requires-python = "{python}"
dependencies = ["{torch}"]

[project.optional-dependencies]
launch = ["{cloudpickle}"]  # virtualgpu.run.ranks sends a notebook's function to processes
test = ["pytest"]  # the plugin

[project.entry-points.pytest11]
virtualgpu = "virtualgpu.pytest_plugin"

[tool.setuptools]
packages = {{ find = {{ include = ["virtualgpu*"] }} }}
package-data = {{ virtualgpu = ["README.md", "hardware/data/*", "timing/data/*", "torch_api/*.toml"] }}
"""


def version() -> str:
    """The engine's own: it stands in virtualgpu/__init__.py, as text."""
    return re.search(r'^__version__ = "(.+?)"', (ROOT / "virtualgpu" / "__init__.py").read_text("utf-8"), re.M)[1]


def pyproject() -> str:
    """The wheel's own, from the series' and from requirements.txt."""
    series = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    wanted = {re.match(r"[\w-]*", line)[0]: line.partition(";")[0].strip() for line in lines}
    return PYPROJECT.format(
        requires=series["build-system"]["requires"],
        version=version(),
        license=series["project"]["license"],
        python=series["project"]["requires-python"],
        torch=wanted["torch"],
        cloudpickle=wanted["cloudpickle"],
    )


def main(arguments: list[str]) -> int:
    offline = "--offline" in arguments
    folders = [argument for argument in arguments if argument != "--offline"]
    target = Path(folders[0] if folders else ROOT / "build").resolve()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        shutil.copytree(ROOT / "virtualgpu", tree / "virtualgpu", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(ROOT / "LICENSE", tree / "LICENSE")
        (tree / "pyproject.toml").write_text(pyproject(), "utf-8")
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
        command += [*(["--no-build-isolation"] if offline else []), "-w", str(target), str(tree)]
        status = subprocess.run(command).returncode
    if status == 0:
        print(
            *(f"pip install {shlex.quote(str(wheel))}" for wheel in sorted(target.glob("virtualgpu-*.whl"))), sep="\n"
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
