"""What nbval cannot see of notebook 01: measured figures against the prose, and starting it from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

import nbformat
import pytest
import series
import stamp

from helpers import data

PATH = series.NOTEBOOKS / "01_save_load_transfer_learning.ipynb"


def cell(beginning):
    """The one cell of code that begins so."""
    (found,) = [cell for cell in series.code_cells(series.read(PATH)) if cell.source.startswith(beginning)]
    return found


def figures(words):
    """The percentages in the title of the one picture whose title holds `words`, be it in a folded answer."""
    stored = "\n".join(series.said(cell) for cell in series.code_cells(series.read(PATH)))
    (said,) = {title for title in re.findall(r"Figure \(measured\): ([^\"\n]+)", stored) if words in title}
    return [int(figure) for figure in re.findall(r"(\d+) %", said)]


def test_the_prose_is_true_of_the_stored_figures():
    """nbval leaves measured shares out of its comparison; what the sentences beside them claim is held here."""
    best, last = figures("the last epoch")
    assert best > 90 and last < best - 30, "the best epoch is worth keeping"
    random, by_writer = figures("writers never seen")
    assert random > 95 and by_writer < random - 2, "new writers are harder"
    scratch, frozen, tuned = figures("After 80 steps")
    assert tuned > frozen + 10 and tuned > scratch + 10, "at equal steps fine-tuning is ahead"


def test_the_first_picture_holds_a_run_that_was_brought_back():
    stored = series.said(cell("# @title Three runs"))
    (times,) = set(
        re.findall(r"From everything: the run itself\. From the weights alone: (\d+) times the loss", stored)
    )
    assert int(times) > 1


def test_the_networks_boundaries_of_writers_are_where_the_digits_begin_anew():
    """Each block of one writer begins with 0 to 9 in order, as no image in the middle of a block should be a boundary."""
    (listed,) = re.findall(r"ends = torch\.tensor\(\[(.+?)\]\)", cell("ends = torch.tensor").source)
    labels = data.digits()[1].tolist()
    for begin in (0, *map(int, listed.split(","))):
        assert labels[begin : begin + 10] == list(range(10)), begin


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """What git would clone: helpers, virtualgpu and data in a repository of one commit, reached under the name in pyproject."""
    origin = tmp_path_factory.mktemp("origin")
    for folder in ("helpers", "virtualgpu", "checks", "data", "notebooks/scripts", "docs"):
        shutil.copytree(series.ROOT / folder, origin / folder, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(origin), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "init", "-q", "-b", series.settings()["tag"], str(origin)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{origin}.insteadOf",
            "GIT_CONFIG_VALUE_0": f"https://github.com/{series.settings()['repository']}"}  # fmt: skip


# found, and not imported: that would take as long as all the rest
WHERE = "import os; from importlib.util import find_spec as find; print(*(os.path.relpath(find(name).submodule_search_locations[0]) for name in ('checks', 'helpers', 'virtualgpu')), flush=True)"
USES = f"{WHERE}\nimport subprocess\nsubprocess.run([sys.executable, '-S', '-c', {WHERE!r}])"


def bootstrap(folder, environment=None, then=USES, tag="2026.1"):
    """Run the set-up cell twice in `folder`, in a Python that has no helpers installed (it reads no .pth files); what it printed, and
    where it finds them then, and a program that the notebook starts."""
    source = stamp.bootstrap(series.read(PATH)).replace("2026.1", tag)
    code = f"import sys\n{source}\nprint('again', flush=True)\n{source}\n{then}"
    packages = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(packages), **(environment or {})},
        capture_output=True,
        text=True,
    )


FETCHED = "helpers from beyond-one-gpu/; installed: nothing, all was there"
FOUND = " ".join(f"beyond-one-gpu/{name}" for name in ("checks", "helpers", "virtualgpu"))


def test_without_helpers_the_set_up_cell_clones_them(tmp_path, repository):
    folder = tmp_path / "empty"
    folder.mkdir()
    done = bootstrap(folder, repository)
    assert done.stdout.splitlines() == [FETCHED, "again", FOUND, FOUND], done.stderr
    assert os.listdir(folder) == ["beyond-one-gpu"]
    fetched = {"checks", "data", "helpers", "notebooks", "virtualgpu", ".git"}
    assert set(os.listdir(folder / "beyond-one-gpu")) == fetched, "what lessons need"
    done = bootstrap(folder, then="")  # the kernel was started again: nothing is fetched
    assert done.stdout.splitlines() == [FETCHED, "again"], done.stderr


def test_beside_the_helpers_it_finds_them(tmp_path):
    """Also where another package called helpers is installed (where none is, every lesson under nbval does). It says nothing: the
    stored outputs have no word of it."""
    for folder in ("helpers", "virtualgpu", "checks", "data"):
        shutil.copytree(series.ROOT / folder, tmp_path / folder)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "installed" / "helpers").mkdir(parents=True)
    (tmp_path / "installed" / "helpers" / "__init__.py").write_text("")
    path = os.pathsep.join([str(tmp_path / "installed"), sysconfig.get_path("purelib")])
    done = bootstrap(tmp_path / "notebooks", {"PYTHONPATH": path})
    assert done.stdout.splitlines() == ["again", *["../checks ../helpers ../virtualgpu"] * 2], done.stderr


def test_in_another_folder_it_finds_the_installed_ones(tmp_path):
    """Copied elsewhere and run from there, with the checkout on sys.path (`pip install -e .`)."""
    path = os.pathsep.join([str(series.ROOT), sysconfig.get_path("purelib")])
    done = bootstrap(tmp_path, {"PYTHONPATH": path}, then=WHERE)
    found = " ".join(os.path.relpath(series.ROOT / name, tmp_path) for name in ("checks", "helpers", "virtualgpu"))
    assert done.stdout.splitlines() == ["again", found], done.stderr


def test_an_old_pytorch_is_named(tmp_path):
    (tmp_path / "torch-2.10.1.dist-info").mkdir()
    (tmp_path / "torch-2.10.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.10.1\n"
    )
    path = os.pathsep.join(map(str, [tmp_path, series.ROOT, sysconfig.get_path("purelib")]))
    done = bootstrap(tmp_path, {"PYTHONPATH": path})
    assert done.stderr.startswith("virtual GPUs work with PyTorch 2.11 to") and "2.10.1, which is" in done.stderr
    assert len(done.stderr.splitlines()) == done.returncode == 1 and not done.stdout


@pytest.mark.parametrize("change, said", [
    ({"GIT_CONFIG_KEY_0": "url.http://127.0.0.1:9/.insteadOf"}, "Is there a network?"),
    ({"PATH": "/nowhere"}, "Install git"),
    ({"tag": "2025.1"}, "or its tag 2025.1 does not exist"),
    ({"mine.txt": "mine"}, "Rename or remove"),  # a folder of that name keeps what is in it
])  # fmt: skip
def test_what_cannot_be_fetched_names_the_cure(tmp_path, repository, change, said):
    home, mine, tag = tmp_path / "beyond-one-gpu", change.pop("mine.txt", None), change.pop("tag", "2026.1")
    if mine:
        home.mkdir()
        (home / "mine.txt").write_text(mine)
    done = bootstrap(tmp_path, {**repository, **change}, tag=tag)
    assert done.returncode == 1 and "could not be fetched" in done.stderr and said in done.stderr
    assert "Traceback" not in done.stderr and ("network" in done.stderr) == ("network" in said)
    assert [path.read_text() for path in home.iterdir()] == [mine] if mine else not home.exists()


def test_a_fork_changes_one_line(tmp_path, monkeypatch):
    """Another repository name in pyproject reaches badge and set-up cell of a stamped notebook, and --check notices."""
    (tmp_path / "notebooks").mkdir()
    copy = shutil.copy(PATH, tmp_path / "notebooks")
    shutil.copy(series.ROOT / "README.md", tmp_path)
    text = (series.ROOT / "pyproject.toml").read_text("utf-8").replace(series.settings()["repository"], "someone/fork")
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.setattr(series, "ROOT", tmp_path)
    monkeypatch.setattr(series, "NOTEBOOKS", tmp_path / "notebooks")
    assert stamp.main(["--check"]) == 1
    assert stamp.main(["--fix"]) == 0 and stamp.main(["--check"]) == 0
    stamped = series.read(copy)
    address = f"github/someone/fork/blob/{series.settings()['tag']}/notebooks/{PATH.name}"
    assert address in stamped.cells[0].source and address in (tmp_path / "README.md").read_text("utf-8")
    set_up = next(c for c in stamped.cells if "bootstrap" in series.tags(c))
    assert "https://github.com/someone/fork" in set_up.source
    del set_up.metadata["jupyter"]
    nbformat.write(stamped, copy)
    assert stamp.main(["--check"]) == 1, "a set-up cell that lost its fold is noticed too"
