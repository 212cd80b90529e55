"""What nbval cannot see of notebook 05: its curves are those that the script makes, and what it says of them holds for others."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import series

from helpers import data

PATH = series.NOTEBOOKS / "05_ray_tune.ipynb"


@pytest.fixture(scope="module")
def make():
    sys.path.insert(0, str(data.DATA))
    try:
        import make_tuning

        return make_tuning
    finally:
        sys.path.remove(str(data.DATA))


def test_the_file_has_what_the_script_makes(make):
    """One network again; another processor rounds otherwise, and 96 steps magnify it."""
    with np.load(data.shipped("tuning.npz")) as stored:
        assert stored["names"].tolist() == list(make.WAYS) and stored["sizes"].tolist() == make.SIZES
        assert stored["study_names"].tolist() == list(make.STUDIES)
        assert stored["losses"].shape == stored["right"].shape == (make.SETS, 25, 5, make.ROUNDS)
        losses, right = make.curve(0, make.RATES.index(0.1), 2)
        assert losses == pytest.approx(stored["losses"][0, 16, 2].tolist(), abs=0.1)
        assert right == pytest.approx(stored["right"][0, 16, 2].tolist(), abs=20)
        assert make.study(stored["right"], 7, *make.STUDIES["random"]) == stored["studies"][0, 7].tolist()


@pytest.mark.judge
def test_the_same_without_helpers_runs_as_it_stands(tmp_path):
    prose = "\n".join(cell.source for cell in series.read(PATH).cells if cell.cell_type == "markdown")
    (script,) = re.findall(r"```python\n(# tune_digits.py.+?)```", prose, re.S)
    (tmp_path / "tune_digits.py").write_text(script, "utf-8")
    command = [sys.executable, "-m", "virtualgpu", "--gpus", "2", "tune_digits.py"]
    home = {"HOME": str(tmp_path), "PYTHONPATH": str(series.ROOT)}  # Ray writes its results there
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | home, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Checkpoint(" in done.stdout.splitlines()[-1], done.stderr


def said_of(file: Path, monkeypatch) -> dict:
    """The lesson's names after its cells that look up curves have run with those of another file."""
    silent = SimpleNamespace(**dict.fromkeys(("dots", "curves", "sweep"), lambda *args, **more: None))
    drawn = SimpleNamespace(**dict.fromkeys(("search", "rungs", "workers"), lambda *args, **more: None))
    monkeypatch.setattr(data, "shipped", lambda name: file)
    helpers = SimpleNamespace(data=data, plots=silent, reveal=lambda *args, **more: None)
    names = {"np": np, "helpers": helpers, "lesson_05": drawn, "partial": __import__("functools").partial}
    for cell in series.code_cells(series.read(PATH)):
        mine = re.search(r"stored\[|look_up|halving|race\(|picked", cell.source)
        if (mine and not re.search(r"optuna|tune\.", cell.source)) or cell.source.startswith("guess"):
            exec(cell.source, names)
    return names


@pytest.mark.judge
@pytest.mark.parametrize("group", [1, 2, 3])
def test_what_the_lesson_says_holds_for_other_networks(make, group, tmp_path, monkeypatch, capsys):
    seeds = range(make.SETS * group, make.SETS * (group + 1))
    losses, right = map(np.stack, zip(*[make.curves(seed) for seed in seeds], strict=True))
    with np.load(data.shipped("tuning.npz")) as stored:
        arrays = {**stored, "losses": losses, "right": right, "studies": make.studies(right)}
    if group == 1:  # the others take minutes
        arrays["ways"] = make.ways(range(10, 20))
        arrays["by_images"], arrays["by_steps"] = np.moveaxis(make.batches(range(4, 8)), -1, 0)
    np.savez(tmp_path / "others.npz", **arrays)
    names = said_of(tmp_path / "others.npz", monkeypatch)
    judge(names)


def judge(names: dict) -> None:
    """Each sentence that compares."""
    grid, chance, alone = (np.array(names["shares"][name]) for name in names["shares"])
    assert (chance > grid).all(), "random search wins on each set"
    assert alone.mean() > chance.mean(), "a grid of the rate alone is best on average"
    often = names["often"]
    assert often[1] > 20 and often[1] > 2 * often[2] and often[4] < 3, (
        "a first rung after one round loses late bloomers"
    )
    equal, unequal, early = (gain.mean() for gain in names["gains"].values())
    assert equal < 0.5 and abs(unequal) < 2 and early > unequal, "ASHA's choice when halving ends"
    ahead = {pair: gain.mean(axis=0) for pair, gain in names["ahead"].items()}
    assert 0 < ahead["TPE", "random"][19] < 1.5 and 0 < ahead["BOHB", "random"][19] < 1.5, (
        "TPE leads by less than a point or so"
    )
    stopping = names["ahead"]["HyperBand", "random"]
    assert (abs(stopping.mean(axis=0)) < 3 * stopping.std(axis=0) / len(stopping) ** 0.5 + 0.1).all(), (
        "within its errors"
    )
    rows = names["middle"]
    assert rows["search the rate"] - rows["default, one trial"] > 2
    assert max(rows, key=rows.get) == "five times the images"
    assert (
        abs(rows["train longer"] - rows["search rate and size"]) < 2
        and rows["train longer"] > rows["search the rate"] - 0.5
    )
    by_images, by_steps = names["by_images"], names["by_steps"]
    assert by_images[0] > by_images[-1] + 2 and by_steps[-1] > by_steps[0] + 5
