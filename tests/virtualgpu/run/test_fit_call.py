"""`virtualgpu.fit`: the command as a function; its table, its bar, its errors."""

import sys
from types import SimpleNamespace

import pytest

import virtualgpu
from virtualgpu.run.fit import cli, progress
from virtualgpu.run.fit import search as fit
from virtualgpu.run.fit.search import Range, Trial

PROGRAM = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int)
options = parser.parse_args()
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(options.batch_size, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)


def test_a_search_for_the_largest(here, warm):
    trials = virtualgpu.fit("train.py --epochs 1", ["T4"], memory="1GB", vary={"batch-size": "70000..140000"}, steps=2)
    assert repr(trials).splitlines()[0].split()[:3] == ["card", "GPUs", "batch-size"]
    assert "$ per GPU and hour: T4 0.35" in repr(trials) and 2**28 < trials[0].reserved < 2**30
    assert [(trial.values["batch-size"], trial.status) for trial in trials] == [
        ("70000", "fits"),
        ("140000", "out of memory"),
    ]
    (best,) = trials.largest
    assert best.fits and best.values == {"batch-size": "70000"}
    assert "Largest that fits: T4: batch-size=70000." in repr(trials)
    assert cli.Trials(trials, {}, None, "").largest == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"command": ""}, "name a program to try"),
        ({"gpus": 0}, "gpus=0: give whole numbers of GPUs"),
        ({"gpus": [1, True]}, "gpus=True: give whole numbers of GPUs"),
        ({"like": "T5"}, "T5"),
        ({"vary": {"n": []}}, "no value of n to try"),
        ({"vary": {"n": "9..3"}}, "n=9..3: the first number"),
        ({"samples": "n"}, "'n' is no product"),
        ({"prices": "nowhere.csv"}, "columns card and usd_per_hour"),
    ],
)
def test_what_is_wrong_is_a_sentence(monkeypatch, arguments, words):
    monkeypatch.setattr(fit, "_trial", None)  # nothing runs
    with pytest.raises(ValueError, match=words) as raised:
        virtualgpu.fit(**{"command": "a.py", **arguments})
    assert "\n" not in str(raised.value) or "T5" in words


def test_the_bar_of_a_terminal_goes_at_the_end(monkeypatch, capsys):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.of(["T4", "L4"], [1], {"n": ["1", "2"]}) as told:
        told(Trial("T4", 1, {"n": "1"}, "fits"))
    shown = capsys.readouterr().err.split("\r\033[K")
    assert shown == ["", "0 of 4 tried", "1 of 4 tried: 1 x T4 n=1 fits", ""]


def test_the_bar_of_a_notebook_goes_at_the_end(monkeypatch):
    IPython = pytest.importorskip("IPython")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    shown = []
    handle = SimpleNamespace(update=lambda bundle, raw: shown.append(bundle["text/plain"]))
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr("IPython.display.display", lambda *args, **options: handle)
    with progress.of(["T4"], [1], {"n": Range(1, 9)}) as told:
        told(Trial("T4", 1, {"n": "1"}, "fits"))
    assert shown == ["1 tried: 1 x T4 n=1 fits", ""]
    shown.clear()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with progress.of(["T4"], [1], {}) as told:
        told(Trial("T4", 1, {}, "fits"))
    assert shown == []
