"""Open each notebook as Colab would: a folder with the notebook alone, Colab's own packages, *Run all*. Standard library and
what Colab has; started by noxfile.py (session colab) in an environment made from preinstalled.txt.

    run.py [01 02 ...]

The clone of the set-up cell is redirected to this working copy's last commit. Fails where a cell raises what it should not, an
output differs from the stored one, the set-up cell does something a second time, or a package of preinstalled.txt changed. Lines of
simulated figures are not compared: Colab's PyTorch is another version than that of the stored outputs (sanitize_versions.cfg).
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tools"))  # for this program; the notebooks find their helpers by themselves
import series  # noqa: E402


def main(only: list[str]) -> int:
    before = versions()
    repository = tempfile.TemporaryDirectory()
    os.environ.update(environment(repository.name))
    failures = []
    for path in series.notebooks():
        if not only or path.name.startswith(tuple(only)):
            start = time.perf_counter()
            told, found = open_alone(path)
            failures += [f"{path.name}: {failure}" for failure in found]
            print(f"{path.stem}: {told} | {time.perf_counter() - start:.0f} s | {len(found)} failures", flush=True)
    failures += [f"{name} was {old}, is {versions()[name]}" for name, old in before.items() if versions()[name] != old]
    print(*failures, f"torch {before['torch']}, torchvision {before['torchvision']}, numpy {before['numpy']}", sep="\n")
    return int(bool(failures))


def versions() -> dict[str, str]:
    """Of each package that Colab has."""
    names = re.findall(r"^([\w.-]+)==", (HERE / "preinstalled.txt").read_text(), re.M)
    return {name: importlib.metadata.version(name) for name in names}


def open_alone(path: Path) -> tuple[str, list[str]]:
    """Execute one notebook in an empty folder; what its set-up cell printed, and what went wrong."""
    stored, notebook = series.read(path), series.read(path)
    setup = next(cell for cell in notebook.cells if "bootstrap" in series.tags(cell))
    notebook.cells.insert(notebook.cells.index(setup) + 1, again := nbformat.v4.new_code_cell(setup.source))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, folder)
        client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}, coalesce_streams=True)
        try:
            client.execute()
        except Exception as failure:  # whatever it is, the other notebooks are still to be opened
            return "", [str(failure)[-2000:]]
        said = "".join(output.get("text", "") for output in setup.outputs)
        told = "".join(re.findall(r"^helpers from .+$", said, re.M))
        failures = [] if told else [f"the set-up cell said {said!r}"]
        failures += ["the set-up cell did something again"] if again.outputs else []
    notebook.cells.remove(again)
    for cell, kept in zip(notebook.cells, stored.cells, strict=True):
        compared = not {"bootstrap", "nbval-ignore-output"} & series.tags(cell)
        if cell.cell_type == "code" and compared and texts(cell) != texts(kept):
            failures.append(f"{kept.source}\nshould print\n{texts(kept)}\nbut printed\n{texts(cell)}\n")
    return told, failures


def environment(repository: str) -> dict[str, str]:
    """github.com/<repository> is this working copy's last commit, tagged; no bars, virtual GPUs: as the outputs were stored."""
    subprocess.run(["git", "clone", "-q", "--bare", ROOT, repository], check=True)
    subprocess.run(
        ["git", "-C", repository, "tag", "-f", series.settings()["tag"]], check=True, stdout=subprocess.DEVNULL
    )
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": f"https://github.com/{series.settings()['repository']}",
        "TQDM_DISABLE": "1",
        "HELPERS_GPUS": "virtual",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def texts(cell) -> list[str]:
    """What a cell printed and returned, without what nbval's sanitizer takes out; of an error its name and message.

    Ray's notice on ipywidgets 7 is left out: Colab's shell has another class name than Jupyter's, and Ray is silent there.
    """
    found = [
        output.get("text")
        or output.get("data", {}).get("text/plain")
        or f"{output.get('ename')}: {output.get('evalue')}"
        for output in cell.outputs
        if "ipywidgets>=8" not in output.get("text", "")
    ]
    for regex, instead in re.findall(
        r"^regex: (.+)\nreplace: (.+)$", (ROOT / "tests" / "sanitize_versions.cfg").read_text("utf-8"), re.M
    ):
        found = [re.sub(regex, instead, text) for text in found]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
