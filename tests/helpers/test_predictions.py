"""A prediction beside its answer: what is said of it, and what of a cell is folded while there is none."""

import os

import nbclient
import pytest
import series
import torch
from nbformat.v4 import new_code_cell, new_notebook

import helpers
from helpers.predictions import judged


@pytest.mark.parametrize("guess, answer, unit, said", [
    (22, 22.5, "ms", "right"),
    (45, 22.5, "ms", "too high by a factor of 2"),
    ("10", 22.5, "", "too low by a factor of 2.2"),
    (torch.tensor(4), 4.0, "", "right"),
    (97, 98.5, "%", "right"),
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
])  # fmt: skip
def test_judged(guess, answer, unit, said):
    assert judged(guess, answer, unit) == said


@pytest.mark.parametrize("guess, answer, facts, printed", [
    (None, 22.46, ("ms",), "simulated: 22.5 ms\n"),
    (None, "no", ("", "measured"), "measured: no\n"),
    ([1, 2], [1, 2048.0], ("MiB",), "simulated: 1 MiB, 2,048 MiB\nyou said: 1 MiB, 2 MiB (right; too low by a factor of 1e+03)\n"),
])  # fmt: skip
def test_reveal(capsys, guess, answer, facts, printed):
    helpers.reveal(guess, answer, *facts)
    assert capsys.readouterr().out == printed


CELLS = {
    "begins": "import helpers\nfrom helpers import plots\nguess = None",
    "folded": "print('a <b>')\nplots.slider(lambda n: plots.bars({'x': n}, 'A picture', 'n', 'data'), [1, 2], 'n')\n"
              "plots.bars({'x': 1}, 'Another', 'n', 'data')\nhelpers.reveal(guess, 3, 'ms')\nprint('c')",
    "bar": "for i in helpers.progress(range(2), 'work'):\n    pass\nhelpers.reveal(guess, 3)",
    "fails": "print('before')\nraise ValueError('x')\nhelpers.reveal(guess, 3)",
    "not asked": "print('open')",
    "answered": "guess = 3",
    "open": "print('d')\nhelpers.reveal(guess, 3, 'ms')",
}  # fmt: skip


def test_a_cell_without_a_prediction_is_folded_as_a_whole(monkeypatch):
    """But for a progress bar, and what was printed before an error."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(series.ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS.values()])
    nbclient.NotebookClient(notebook, timeout=120, allow_errors=True, coalesce_streams=True).execute()
    outputs = {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}
    (shown,) = outputs["folded"]
    page = shown.data["text/html"]
    assert page.startswith("<details><summary>The answer</summary>") and page.endswith("</details>")
    assert "folded" in shown.data["text/plain"] and page.count("<details") == 3
    parts = [
        "<pre>a &lt;b&gt;\n</pre>",
        '<img alt="Figure (data): A picture"',
        '<img alt="Figure (data): Another"',
        "<pre>simulated: 3 ms\nc\n</pre>",
    ]
    places = [page.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)
    bar, answer = outputs["bar"]
    assert "application/vnd.jupyter.widget-view+json" in bar.data and "<summary>The answer" in answer.data["text/html"]
    error, said = sorted(outputs["fails"], key=lambda output: output.output_type)
    assert (said.text, error.evalue) == ("before\n", "x")
    assert [output.text for output in outputs["not asked"]] == ["open\n"]
    assert [output.text for output in outputs["open"]] == ["d\nsimulated: 3 ms\nyou said: 3 ms (right)\n"]
