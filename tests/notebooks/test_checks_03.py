"""The graders of notebook 03: the table of a pipeline."""

import numpy as np
import pytest

import checks

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def for_ever(*what):
    while True:
        pass


def gpipe(stages, pieces):
    return [[None] * s + list(range(pieces)) + [None] * (stages - 1 - s) for s in range(stages)]


@pytest.mark.parametrize(
    "table, complaint",
    [
        (lambda m, n: [[None] * (s * n) + list(range(n)) + [None] * ((m - 1 - s) * n) for s in range(m)],
         "with 2 stages and 4 micro-batches, stage 1 waits 4 of 8 slots; it need not wait more than 1"),
        (lambda m, n: [list(range(n)) for _ in range(m)], "stage 1 begins 0 in slot 0, before stage 0 has finished it"),
        (lambda m, n: gpipe(m, n)[:-1], "there should be 2 rows of one length"),
        (lambda m, n: [[0] * (n + m - 1) for _ in range(m)], "stage 0 should work on each of 0 to 3 once"),
        (lambda m, n: 1 / 0, "raised ZeroDivisionError"),
        (lambda m, n: gpipe(m, n) if (m, n) in ((2, 4), (3, 4), (4, 8)) else [], "there should be 5 rows"),
        (lambda m, n: gpipe(m, n) if n >= m else gpipe(m, m), "with 5 stages and 2 micro-batches, stage 0 should work"),
        (lambda m, n: [["." if piece is None else piece for piece in row] for row in gpipe(m, n)], "(None: on nothing)"),
        (lambda m, n: None, "it returns None; a list of rows is wanted"),
        (gpipe, "[passed]"),
        (lambda m, n: (iter(row) for row in gpipe(m, n)), "[passed]"),
        (lambda m, n: np.array(gpipe(m, n), dtype=object), "[passed]"),
        (lambda m, n: [[None if piece is None else n - 1 - piece for piece in row] for row in gpipe(m, n)], "[passed]"),
    ],
)  # fmt: skip
def test_slots(capsys, table, complaint):
    checks.slots(table)
    assert complaint in capsys.readouterr().out


@pytest.mark.parametrize("grade", [checks.slots])
def test_an_endless_loop_is_told(capsys, hurried, grade):
    grade(for_ever)
    out = capsys.readouterr().out
    assert out.startswith("[not yet] after ") and "in for_ever" in out and "does your loop end?" in out, out
