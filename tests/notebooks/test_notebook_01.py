"""What nbval cannot see of notebook 01: VGG-16 with weights on the disk, and starting it from elsewhere."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest
import series
import stamp
import torch
from nbclient import NotebookClient
from torchvision import models

PATH = series.NOTEBOOKS / "01_save_load_transfer_learning.ipynb"


def cell(beginning):
    """The source of the one cell that begins so."""
    (found,) = [cell.source for cell in series.code_cells(series.read(PATH)) if cell.source.startswith(beginning)]
    return found


def test_vgg16_takes_its_weights_from_the_hub_folder(tmp_path, monkeypatch):
    """With a file where torchvision looks first, the notebook's own cells load it, freeze it and train the head alone."""
    torch.manual_seed(0)
    monkeypatch.setattr(
        torch.nn.init, "kaiming_normal_", lambda tensor, **_: tensor
    )  # 138 million draws teach nothing here
    monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor, *_: tensor)
    stored = models.vgg16().state_dict()
    stored["features.0.weight"].uniform_(-1, 1)
    stored["classifier.6.bias"].uniform_(-1, 1)
    hub = tmp_path / "hub" / "checkpoints"
    hub.mkdir(parents=True)
    torch.save(stored, hub / models.VGG16_Weights.IMAGENET1K_V1.url.split("/")[-1])
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    names = {"nn": torch.nn, "torch": torch, "device": "cpu"}
    for beginning in (
        "from torchvision import models",
        "weights = models.VGG16_Weights",
        "for param in my_model.parameters",
    ):
        exec(cell(beginning), names)
    model = names["my_model"]
    assert names["weights"] is models.VGG16_Weights.IMAGENET1K_V1
    assert torch.equal(model.vgg16.features[0].weight, stored["features.0.weight"])
    assert torch.equal(model.vgg16.classifier[6].bias, stored["classifier.6.bias"])
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "linear_layers.weight",
        "linear_layers.bias",
    }


def test_the_notebook_starts_in_another_folder(tmp_path):
    """Copied elsewhere and run from there, with the helpers installed: its first cells work."""
    notebook = series.read(PATH)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:5]
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells[4].outputs[0].text.startswith("1258 images")


@pytest.fixture
def repository(tmp_path):
    """What git would clone: helpers, virtualgpu and data in a repository of one commit, reached under the name in pyproject."""
    origin = tmp_path / "origin"
    for folder in ("helpers", "virtualgpu", "checks", "data"):
        shutil.copytree(series.ROOT / folder, origin / folder, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(origin), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "init", "-q", "-b", stamp.settings()["branch"], str(origin)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{origin}.insteadOf",
            "GIT_CONFIG_VALUE_0": f"https://github.com/{stamp.settings()['repository']}"}  # fmt: skip


def bootstrap(folder, environment=None):
    """Run the set-up cell twice in `folder`, in a Python that has no helpers installed; what it printed."""
    hide = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; sys.path = [p for p in sys.path if p != '']\n"
    source = stamp.bootstrap(series.read(PATH))
    code = f"{hide}{source}\nprint('again')\n{source}\nfrom helpers import data\nprint(len(data.digits()[1]))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )


def test_without_helpers_the_set_up_cell_clones_them(tmp_path, repository):
    folder = tmp_path / "empty"
    folder.mkdir()
    done = bootstrap(folder, repository)
    assert done.stdout.splitlines() == [
        "helpers from beyond-one-gpu/; installed: nothing, all was there",
        "again",
        "1797",
    ], done.stderr
    assert os.listdir(folder) == ["beyond-one-gpu"]


def test_beside_the_helpers_it_finds_them(tmp_path):
    for folder in ("helpers", "virtualgpu", "checks", "data"):
        shutil.copytree(series.ROOT / folder, tmp_path / folder)
    (tmp_path / "notebooks").mkdir()
    done = bootstrap(tmp_path / "notebooks")
    assert done.stdout.splitlines()[1:] == ["again", "1797"], done.stderr


def test_without_helpers_and_network_it_names_the_cure(tmp_path, repository):
    done = bootstrap(tmp_path, {**repository, "GIT_CONFIG_KEY_0": "url.file:///nowhere/.insteadOf"})
    assert done.returncode == 1
    assert "The helpers could not be fetched" in done.stderr and "Is there a network?" in done.stderr
    assert not (tmp_path / "beyond-one-gpu").exists()


def test_a_fork_changes_one_line(tmp_path, monkeypatch):
    """Another repository name in pyproject reaches badge and set-up cell of a stamped notebook, and --check notices."""
    (tmp_path / "notebooks").mkdir()
    shutil.copy(PATH, tmp_path / "notebooks")
    shutil.copy(series.ROOT / "README.md", tmp_path)
    text = (series.ROOT / "pyproject.toml").read_text("utf-8").replace(stamp.settings()["repository"], "someone/fork")
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.setattr(series, "ROOT", tmp_path)
    monkeypatch.setattr(series, "NOTEBOOKS", tmp_path / "notebooks")
    assert stamp.main(["--check"]) == 1
    assert stamp.main(["--fix"]) == 0 and stamp.main(["--check"]) == 0
    unfolded = series.read(tmp_path / "notebooks" / PATH.name)
    del next(c for c in unfolded.cells if "bootstrap" in series.tags(c)).metadata["jupyter"]
    nbformat.write(unfolded, tmp_path / "notebooks" / PATH.name)
    assert stamp.main(["--check"]) == 1, "a set-up cell that lost its fold is noticed too"
    assert stamp.main(["--fix"]) == 0 and stamp.main(["--check"]) == 0
    stamped = nbformat.read(tmp_path / "notebooks" / PATH.name, 4)
    assert f"github/someone/fork/blob/main/notebooks/{PATH.name}" in stamped.cells[0].source
    assert f"github/someone/fork/blob/main/notebooks/{PATH.name}" in (tmp_path / "README.md").read_text("utf-8")
    assert "https://github.com/someone/fork" in next(c.source for c in stamped.cells if "bootstrap" in series.tags(c))
