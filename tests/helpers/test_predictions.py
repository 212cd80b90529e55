"""A prediction beside its answer: what is said of it, and what of a cell is folded while there is none."""

import os

import nbclient
import pytest
import series
import torch
from nbformat.v4 import new_code_cell, new_notebook

import helpers
from helpers.predictions import judged


@pytest.mark.parametrize(
    "guess, answer, unit, said",
    [
        (22, 22.5, "ms", "right"),
        (45, 22.5, "ms", "too high by a factor of 2"),
        ("10", 22.5, "", "too low by a factor of 2.2"),
        (torch.tensor(4), 4.0, "", "right"),
        (97, 98.5, "%", "right"),
        (0, 4, "%", "too low by 4 points"),
        ("200 %", "201 %", "", "right"),
        ("200 %", 150, "%", "too high by 50 points"),
        (0, 0, "MiB", "right"),
        (0, 3, "MiB", "too low by 3 MiB"),
        (-1, 2.0, "", "too low by 3"),
        ("1,000", 1000, "", "right"),
        ([1, 2], (1, 4), "GiB", "right; too low by a factor of 2"),
        (1, [1, 4], "", "2 answers are wanted, in a list"),
        ("one gpu", "One  GPU", "", "right"),
        (True, False, "", "not so"),
        ("many", 2048, "MiB", "not so"),
    ],
)
def test_judged(guess, answer, unit, said):
    assert judged(guess, answer, unit) == said


@pytest.mark.parametrize(
    "guess, answer, facts, printed",
    [
        (None, 22.46, ("ms",), "simulated: 22.5 ms\n"),
        (None, "no", ("", "measured"), "measured: no\n"),
        (45, 22.5, ("ms",), "simulated: 22.5 ms\nyou said: 45 ms (too high by a factor of 2)\n"),
        ([1, 2], [1, 2048.0], ("MiB",), "simulated: 1 MiB, 2,048 MiB\nyou said: 1 MiB, 2 MiB (right; too low by a factor of 1e+03)\n"),
    ],
)  # fmt: skip
def test_reveal(capsys, guess, answer, facts, printed):
    helpers.reveal(guess, answer, *facts)
    assert capsys.readouterr().out == printed


CELLS = {
    "begins": "import helpers\nfrom helpers import plots\nguess = None",
    "folded": "print('a <b>')\nplots.bars({'x': 1}, 'A picture', 'n', 'data')\nhelpers.reveal(guess, 3, 'ms')\nprint('c')",
    "slider": "plots.slider(lambda n: plots.bars({'x': n}, 'Bars', 'n', 'data'), [1, 2], 'n')\nhelpers.reveal(guess, 3)",
    "bar": "for i in helpers.progress(range(2), 'work'):\n    pass\nhelpers.reveal(guess, 3)",
    "fails": "print('before')\nraise ValueError('x')\nhelpers.reveal(guess, 3)",
    "not asked": "print('open')",
    "answered": "guess = 3",
    "open": "print('d')\nhelpers.reveal(guess, 3, 'ms')",
}


@pytest.fixture(scope="module")
def outputs():
    """{cell: what it shows}, run one after the other in a kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(series.ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.delenv("TQDM_DISABLE", raising=False)
        notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS.values()])
        nbclient.NotebookClient(notebook, timeout=120, allow_errors=True, coalesce_streams=True).execute()
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def test_a_cell_without_a_prediction_is_folded_as_a_whole(outputs):
    (shown,) = outputs["folded"]
    page = shown.data["text/html"]
    assert page.startswith("<details><summary>The answer</summary>") and page.endswith("</details>")
    assert "folded" in shown.data["text/plain"]
    parts = ["<pre>a &lt;b&gt;\n</pre>", '<img alt="Figure (data): A picture"', "<pre>simulated: 3 ms\nc\n</pre>"]
    places = [page.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)


def test_a_slider_is_folded_with_its_pictures_and_a_bar_stays_outside(outputs):
    (slider,) = outputs["slider"]
    assert slider.data["text/html"].count("<details") == 3 and "simulated: 3" in slider.data["text/html"]
    bar, answer = outputs["bar"]
    assert "application/vnd.jupyter.widget-view+json" in bar.data and "<summary>The answer" in answer.data["text/html"]


def test_what_was_printed_before_an_error_is_seen(outputs):
    error, said = sorted(outputs["fails"], key=lambda output: output.output_type)
    assert (said.text, error.evalue) == ("before\n", "x")


@pytest.mark.parametrize(
    "cell, text", [("not asked", "open\n"), ("open", "d\nsimulated: 3 ms\nyou said: 3 ms (right)\n")]
)
def test_open_are_other_cells_and_what_was_predicted(outputs, cell, text):
    assert [(output.output_type, output.text) for output in outputs[cell]] == [("stream", text)]
